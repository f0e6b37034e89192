"""Off-policy training: actors write the replay while the learner samples it.

    actors ──transitions──▶ replay (memmap) ──minibatch──▶ learner.update
       ▲        paced: updates ≈ ratio × decisions, bounded both ways      │
       └──────────────── publish every few updates ◀──────────────────────┘

Neither side runs away: the learner waits when it has updated enough for the data there is, and the
actors are asked for more only while the learner keeps up. Both waits are metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from torchrl_vla.actors import Actors, ActorSettings
from torchrl_vla.data import demonstrations
from torchrl_vla.data.demonstrations import Episode
from torchrl_vla.evaluate import q_judge
from torchrl_vla.learner import Learner
from torchrl_vla.loops.actor_critic import UpdateSettings, make_learner
from torchrl_vla.loops.intake import Recent, collect_in_step, drain
from torchrl_vla.loops.pacing import Pacer, PaceSettings
from torchrl_vla.loops.publishing import Publishing
from torchrl_vla.loops.replay_folder import ReplayFolder, saved_replays
from torchrl_vla.loops.run import Run, in_segments
from torchrl_vla.loops.workers import first_decisions, restarts_of, start_workers
from torchrl_vla.metrics import (
    ACTOR_RESTARTS,
    ACTORS_REMOTE,
    WAIT_LEARNER,
    Means,
    Stopwatch,
)
from torchrl_vla.objectives.critics import ActorCritic
from torchrl_vla.policies.deferred import features_on_host, without_weights
from torchrl_vla.remote import Listening, RemoteActors
from torchrl_vla.replay import ReplayFeed, Sampling
from torchrl_vla.schema import SuiteMeta
from torchrl_vla.storage.buffer import JournalReplayBuffer
from torchrl_vla.topology import Topology


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
    folder: str | None = None
    """Where the rows are, such as a fast local disk; ``None``: in the run's folder."""
    compress_to: float | None = None
    """Share of their size for which the disk has room for pictures, which are packed without loss;
    ``None``: as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_decisions < 1:
            raise ValueError(f"min_decisions is {self.min_decisions}; it must be at least 1")
        if self.uses_demonstrations != (self.demonstration_episodes > 0):
            raise ValueError(
                f"demonstration_episodes is {self.demonstration_episodes} with a share of "
                f"{self.demonstration_share}; give episodes exactly when minibatches hold some"
            )


@in_segments
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
    remote: Listening | None = None,
) -> bool:
    """Train until the run's budget is spent; arguments as in ``loops/on_policy.py``.

    ``dataset`` reads recorded episodes for the demonstrations' part of the minibatches, instead of
    the scripted expert's. With ``remote`` no actor is started: others join there.

    Raises:
        ValueError: settings that contradict each other, as they say.
    """
    check_together(run, actors, pace, remote)
    policy, evaluated, learner, goal = build_learner(
        run, make_policy, objective, updates, seed=seed, gamma=gamma
    )
    state = {
        "modules": {"policy": policy, "critic": goal.state, "evaluated": evaluated},
        "optimizers": {"learner": (learner.optimizer, [policy, goal.state])},
    }
    place = {"parent": replay.folder, "compress_to": replay.compress_to}
    rows = ReplayFolder(run, policy, replay.capacity, actors.num_workers, pace, **place)
    loaded = run.begin(state, resume, rows.planned_bytes(), rows.disk)
    if loaded is not None:
        learner.updates = goal.updates = run.counters["updates"]
    buffer, saved = rows.open(resume, loaded)
    frozen = not updates.trunk_lr
    feed = make_feed(
        run, policy, buffer, replay, frozen=frozen, seed=seed, gamma=gamma, dataset=dataset
    )
    if saved:
        feed.absorb()  # these rows were counted before
        if loaded["rank_tensors"] is not None:
            feed.generator.set_state(loaded["rank_tensors"]["draws"])
    # The burst on the first decisions belongs to the start of a run, not to each resume.
    steady = pace if loaded is None or saved else replace(pace, warm_up_updates=0)
    batch_size = actors.envs_per_worker * actors.decisions_per_env
    pacer = Pacer(steady, batch_size, replay.min_decisions, **(saved["pacer"] if saved else {}))
    recent = Recent.of(loaded, first_decisions(run, actors))
    watch, means = Stopwatch(), Means()
    workers = start_workers(
        run,
        make_policy,
        actors,
        evaluated,
        seed=seed,
        gamma=gamma,
        loaded=loaded,
        replay=buffer,
        remote=remote,
    )
    publish = Publishing(policy, evaluated, workers)
    wait_for_data = collect_in_step if run.deterministic else drain
    if remote is not None:
        wait_for_data = partial(drain, give_up=run.would_stop)
    with workers:
        publish(run.counters["version"], 1.0 if loaded is None else 0.0)
        if not run.history:
            run.record(run.evaluate(evaluated, final=True))
        while True:
            before = learner.updates
            for _ in range(pace.publish_updates):
                ready = wait_for_data(workers, feed, recent, pacer, watch, run.counters["version"])
                if remote is not None and run.topology.any_true(not ready):
                    break  # the end, and a rank waits for actors that may never come
                batch = feed.sample(learner.updates, run.counters["version"])
                means.add(learner.update(batch))
                pacer.updates += 1
            run.count(*recent.pop(), updates=learner.updates)
            publish(run.counters["version"], pace.average_share)
            metrics = means.pop() | recent.metrics() | watch.pop_shares()
            metrics |= feed.metrics(run.counters["version"]) | actor_metrics(workers, run.topology)
            over = run.finished()
            if run.evaluation_due(over):
                metrics |= run.evaluate(evaluated, final=over)
            if learner.updates > before:
                run.record(metrics)
            saves = over or run.save_due()
            if saves:
                own = {
                    "json": {"replays": saved_replays(run, feed, pacer)},
                    "rank_json": workers.positions() | {"outcomes": list(recent.outcomes)},
                    "rank_tensors": {"draws": feed.generator.get_state()},
                }
                run.save(state | own, last=over)
            if over or (saves and run.deterministic):
                break
    if over and not run.interrupted:
        run.finish(evaluated, q_judge(evaluated, goal.state.q.cpu()))
    return over


def check_together(
    run: Run, actors: ActorSettings, pace: PaceSettings, remote: Listening | None
) -> None:
    """Check settings that are each right but do not go together.

    Raises:
        ValueError: which, and what to change.
    """
    if not run.deterministic:
        if remote is None:
            pace.check(actors.num_workers, actors.envs_per_worker * actors.decisions_per_env)
        return
    if actors.publish != "blocking":
        raise ValueError(
            f"topology.deterministic=true and actors.publish={actors.publish!r}: which weights "
            "chose an action would depend on who is faster; use actors.publish=blocking"
        )
    if remote is not None:
        raise ValueError(
            "topology.deterministic=true with remote actors: what they bring, and when, differs "
            "from run to run; use topology=local"
        )


def build_learner(
    run: Run,
    make_policy: Callable[..., nn.Module],
    objective: Callable[..., ActorCritic],
    updates: UpdateSettings,
    *,
    seed: int,
    gamma: float,
) -> tuple[nn.Module, nn.Module, Learner, ActorCritic]:
    """Return policy, the whole copy that is evaluated, learner and objective; see :func:`train`."""
    torch.manual_seed(seed)
    with without_weights():
        policy = make_policy(run.suite.meta)
    evaluated = make_policy(run.suite.meta)
    learner, goal = make_learner(run, policy, objective, updates, gamma)
    # Equal weights, different noise on every rank.
    torch.manual_seed(seed * 1000 + run.topology.rank)
    return policy, evaluated, learner, goal


def actor_metrics(workers: Actors | RemoteActors, topology: Topology) -> dict[str, float]:
    """Return how long actors waited, how many were replaced, who is there; collective."""
    metrics = {
        WAIT_LEARNER: workers.idle_share(),
        ACTOR_RESTARTS: restarts_of(workers, topology),
    }
    if isinstance(workers, RemoteActors):
        present = topology.all_reduce_sum(torch.tensor(workers.present))
        metrics[ACTORS_REMOTE] = float(present)
    return metrics


def make_feed(
    run: Run,
    policy: nn.Module,
    buffer: JournalReplayBuffer,
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
        demonstrations=recorded,
        rule=settings,
        tasks=len(run.suite.meta.instructions),
        encode=features_on_host(policy, run.topology) if frozen else None,
        seed=seed * 1000 + run.topology.rank,
        gamma=gamma,
        n_steps=settings.n_steps,
    )
