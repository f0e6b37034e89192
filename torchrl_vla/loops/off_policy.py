"""Off-policy training: actors write the replay while the learner samples it.

    actors ──transitions──▶ replay (memmap) ──minibatch──▶ learner.update
       ▲        paced: updates ≈ ratio × decisions, bounded both ways      │
       └──────────────── publish every few updates ◀──────────────────────┘

Neither side runs away: the learner waits when it has updated enough for the data there is, and the
actors are asked for more only while the learner keeps up. Both waits are metrics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.data import TensorDictReplayBuffer

from torchrl_vla import schema
from torchrl_vla.actors import Actors, ActorSettings, load_full_weights, start_actors
from torchrl_vla.data import demonstrations
from torchrl_vla.data.demonstrations import Episode
from torchrl_vla.loops.actor_critic import UpdateSettings, make_learner
from torchrl_vla.loops.on_policy import positions_of
from torchrl_vla.loops.pacing import Pacer, PaceSettings
from torchrl_vla.loops.run import Run
from torchrl_vla.metrics import TRAIN_SUCCESS, WAIT_ACTORS, WAIT_LEARNER, Stopwatch
from torchrl_vla.objectives.critics import ActorCritic
from torchrl_vla.policies.shard import full_weights
from torchrl_vla.replay import ReplayFeed, Sampling, make_replay
from torchrl_vla.schema import SuiteMeta


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Sampling):
    """What the learner samples from, and by which rule."""

    capacity: int
    demonstration_episodes: int = 0
    """Recorded expert episodes; needed when any minibatch has demonstrations in it."""
    demonstration_noise: float = 0.0
    """Action noise of the recorded expert."""
    min_decisions: int
    """Decisions in the replay before the first update."""
    n_steps: int = 1
    """Decisions that an online row looks ahead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_decisions < 1:
            raise ValueError(f"min_decisions is {self.min_decisions}; it must be at least 1")
        if self.uses_demonstrations != (self.demonstration_episodes > 0):
            raise ValueError(
                f"demonstration_episodes is {self.demonstration_episodes} with a share of "
                f"{self.demonstration_share}; give episodes exactly when minibatches hold some"
            )


def train(
    run: Run,
    *,
    make_policy: Callable[..., nn.Module],
    objective: Callable[..., ActorCritic],
    actors: ActorSettings,
    replay: ReplaySettings,
    pace: PaceSettings,
    updates: UpdateSettings,
    seed: int,
    gamma: float,
    resume: bool,
    dataset: Callable[[SuiteMeta], list[Episode]] | None = None,
) -> None:
    """Train until the run's budget is spent; arguments as in ``loops/on_policy.py``.

    ``dataset`` reads recorded episodes for the demonstrations' part of the minibatches, instead of
    the scripted expert's.
    """
    rank = run.topology.rank
    build = partial(make_policy, run.suite.meta)
    torch.manual_seed(seed)
    policy, evaluated = build(), build()
    learner, goal = make_learner(run, policy, objective, updates, gamma)
    torch.manual_seed(seed * 1000 + rank)
    state = {
        "modules": {"policy": policy, "critic": goal.state, "evaluated": evaluated},
        "optimizers": {"learner": (learner.optimizer, [policy, goal.state])},
    }
    loaded = run.resume(state) if resume else None
    if loaded is not None:
        learner.updates = goal.updates = run.counters["updates"]
    buffer = make_replay(run.folder / "replay" / f"rank-{rank}-{learner.updates}", replay.capacity)
    feed = make_feed(
        run,
        policy,
        buffer,
        replay,
        frozen=not updates.trunk_lr,
        seed=seed,
        gamma=gamma,
        dataset=dataset,
    )
    workers = start_actors(
        run.suite,
        build,
        actors,
        chunk_size=run.chunk_size,
        gamma=gamma,
        seed=seed,
        rank=rank,
        folder=run.folder / "actors" / f"rank-{rank}",
        positions=positions_of(loaded),
        attempt=learner.updates,
        replay=buffer,
    )

    def publish(share: float) -> None:
        weights = full_weights(policy)
        load_full_weights(evaluated, weights, share)
        workers.publish(weights, run.counters["version"])

    watch, recent = Stopwatch(), Recent(deque(maxlen=200))
    with workers:
        publish(1.0 if loaded is None else 0.0)
        if not run.history:
            run.record(run.evaluate(evaluated, final=True))
        # The burst on the first decisions belongs to the start of a run, not to each resume.
        steady = pace if loaded is None else replace(pace, warm_up_updates=0)
        batch_size = actors.envs_per_worker * actors.decisions_per_env
        pacer = Pacer(steady, batch_size, replay.min_decisions)
        while True:
            metrics: dict[str, float] = {}
            for _ in range(pace.publish_updates):
                drain(workers, feed, recent, pacer, watch, run.counters["version"])
                batch = feed.sample(learner.updates, run.counters["version"])
                metrics |= learner.update(batch)  # the actor may pause at the last
                pacer.updates += 1
            run.count(*recent.pop(), updates=learner.updates)
            publish(pace.average_share)
            metrics |= recent.metrics() | watch.pop_shares()
            metrics |= feed.metrics(run.counters["version"])
            metrics[WAIT_LEARNER] = workers.idle_share()
            over = run.finished()
            if over or run.evaluation_due():
                metrics |= run.evaluate(evaluated, final=over)
            run.record(metrics)
            if over or run.save_due():
                run.save(state | {"rank_json": workers.positions()})
            if over:
                break
    run.finish(evaluated)


@dataclass
class Recent:
    """What actors did lately: counts since the last report, success of the last episodes."""

    outcomes: deque[bool]
    env_steps: int = 0
    decisions: int = 0
    episodes: int = 0

    def add(self, rows: TensorDictBase) -> None:
        """Take in newly committed transitions."""
        done = rows[schema.DONE]
        self.env_steps += int(rows[schema.NUM_EXECUTED].sum())
        self.decisions += len(rows)
        self.episodes += int(done.sum())
        self.outcomes.extend(rows[schema.SUCCESS][done].tolist())

    def pop(self) -> tuple[int, int, int]:
        """Return ``(env_steps, decisions, episodes)`` since the last call."""
        counts = self.env_steps, self.decisions, self.episodes
        self.env_steps = self.decisions = self.episodes = 0
        return counts

    def metrics(self) -> dict[str, float]:
        """Return the success rate of the last episodes."""
        outcomes = self.outcomes
        return {TRAIN_SUCCESS: sum(outcomes) / len(outcomes) if outcomes else float("nan")}


def drain(
    workers: Actors,
    feed: ReplayFeed,
    recent: Recent,
    pacer: Pacer,
    watch: Stopwatch,
    version: int = 0,
) -> None:
    """Take in what actors committed; wait for them only if no update is allowed yet.

    Args:
        workers: this rank's actors.
        feed: what they wrote, and the rule of what may be drawn.
        recent: counts.
        pacer: whether an update, or a request, is due.
        watch: of the waits.
        version: newest published policy.
    """
    while True:
        while pacer.may_request(workers.pending):
            workers.request()
        while workers.pending and workers.receive(wait=False):
            pass
        rows = feed.absorb()
        if rows is not None:
            pacer.decisions += len(rows)
            recent.add(rows)
        if pacer.may_update():
            if feed.can_draw(version):
                return
            if not workers.pending:  # nothing there that the sampling rule allows: collect on
                workers.request()
        if rows is None:
            with watch.wait(WAIT_ACTORS):
                workers.receive()


def make_feed(
    run: Run,
    policy: nn.Module,
    buffer: TensorDictReplayBuffer,
    settings: ReplaySettings,
    *,
    frozen: bool,
    seed: int,
    gamma: float,
    dataset: Callable[[SuiteMeta], list[Episode]] | None = None,
) -> ReplayFeed:
    """Record or read the demonstrations and join them with the actors' buffer.

    Raises:
        ValueError: a data set with settings that only the expert has, or too few episodes in it.
    """
    recorded = None
    if dataset is not None:
        if not settings.uses_demonstrations or settings.demonstration_noise:
            raise ValueError(
                f"demonstration_share={settings.demonstration_share} and demonstration_noise="
                f"{settings.demonstration_noise} with a data set: give a share above 0, and noise 0"
                " (it is the scripted expert's)"
            )
        episodes = dataset(run.suite.meta)
        if len(episodes) < settings.demonstration_episodes:
            raise ValueError(
                f"the data set has {len(episodes)} episodes, demonstration_episodes asks for "
                f"{settings.demonstration_episodes}; ask for fewer"
            )
        episodes = episodes[: settings.demonstration_episodes]
        recorded = demonstrations.decision_transitions(episodes, run.chunk_size, gamma)
    elif settings.uses_demonstrations:
        first = run.suite.splits["demo"].start
        ids = range(first, first + settings.demonstration_episodes)
        episodes = demonstrations.record(
            run.suite.simulators(1), ids, noise=settings.demonstration_noise, seed=seed
        )
        recorded = demonstrations.decision_transitions(episodes, run.chunk_size, gamma)
    return ReplayFeed(
        buffer,
        capacity=settings.capacity,
        demonstrations=recorded,
        rule=settings,
        tasks=len(run.suite.meta.instructions),
        encode=policy.features if frozen else None,
        seed=seed * 1000 + run.topology.rank,
        gamma=gamma,
        n_steps=settings.n_steps,
    )
