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
from torchrl_vla.learner import Learner, ParameterGroup
from torchrl_vla.loops.on_policy import positions_of
from torchrl_vla.loops.run import Run
from torchrl_vla.metrics import TRAIN_SUCCESS, WAIT_ACTORS, WAIT_LEARNER, Stopwatch
from torchrl_vla.objectives.critics import ActorCritic
from torchrl_vla.policies.heads import QHead
from torchrl_vla.policies.shard import full_weights, shard
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


@dataclass(frozen=True)
class PaceSettings:
    """How updates and decisions keep step."""

    updates_per_decision: float
    slack_decisions: int
    """Decisions that actors may be ahead of what the learner has used."""
    publish_updates: int
    """Updates between publishes."""
    average_share: float = 1.0
    """Share of the newest weights in the average that is evaluated, per publish; 1: no average."""
    warm_up_updates: int = 0
    """Updates on the first ``min_decisions`` alone, before the ratio counts."""

    def __post_init__(self) -> None:
        for name in ("updates_per_decision", "slack_decisions", "publish_updates"):
            if getattr(self, name) <= 0:
                raise ValueError(f"pace.{name} is {getattr(self, name)}; it must be above 0")
        if not 0 < self.average_share <= 1:
            raise ValueError(
                f"pace.average_share is {self.average_share}; it must be in (0, 1] (at 0 the "
                "evaluated policy would never move)"
            )
        if self.warm_up_updates < 0:
            raise ValueError(f"pace.warm_up_updates is {self.warm_up_updates}; it is at least 0")


@dataclass(frozen=True)
class UpdateSettings:
    """Optimizers of actor, critic and entropy coefficient."""

    lr: float
    critic_lr: float
    alpha_lr: float | None
    """Of the entropy coefficient; ``None`` for an algorithm that has none."""
    max_grad_norm: float
    trunk_lr: float = 0.0
    """0: the trunk is frozen and its features are cached; above: the critic trains it."""
    q_heads: int = 2
    actor_warm_up: int = 0
    """Updates of linear warm-up of the actor's learning rate, once it begins to move."""
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.max_grad_norm <= 0:
            raise ValueError(f"updates.max_grad_norm is {self.max_grad_norm}; it must be above 0")


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
class Pacer:
    """Keeps ``updates ≈ ratio × decisions``: two predicates, one for each side."""

    settings: PaceSettings
    batch: int
    """Decisions that one request brings."""
    min_decisions: int
    updates: int = 0
    decisions: int = 0

    def may_update(self) -> bool:
        """Whether the data so far allows one more update."""
        new = self.decisions - self.min_decisions
        allowed = self.settings.warm_up_updates + self.settings.updates_per_decision * new
        return new >= 0 and self.updates < max(allowed, 1)

    def may_request(self, pending: int) -> bool:
        """Whether actors may collect one more batch beyond ``pending`` ones."""
        paced = max(0, self.updates - self.settings.warm_up_updates)
        used = self.min_decisions + paced / self.settings.updates_per_decision
        return self.decisions + pending * self.batch < used + self.settings.slack_decisions


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


def make_learner(
    run: Run,
    policy: nn.Module,
    objective: Callable[..., ActorCritic],
    settings: UpdateSettings,
    gamma: float,
) -> tuple[Learner, ActorCritic]:
    """Shard the trunk, build critics, objective and learner.

    Raises:
        TypeError: the policy has no continuous actor.
    """
    if not hasattr(policy, "actor"):
        raise TypeError(
            f"{type(policy).__name__} has no actor on features; use policy.head=gaussian"
        )
    model, meta = policy.model.model, run.suite.meta
    shard(model, run.topology.mesh, blocks=model.shard_plan())
    heads = [
        QHead(model.feature_dim, run.chunk_size, meta.action_dim) for _ in range(settings.q_heads)
    ]
    goal = objective(policy.actor, heads, policy.features, gamma=gamma)
    limit = settings.max_grad_norm
    groups = [
        ParameterGroup(
            "actor",
            goal.actor_parameters,
            settings.lr,
            limit,
            warm_up=settings.actor_warm_up,
            start=goal.critic_only_updates,
        ),
        ParameterGroup("critic", goal.critic_parameters, settings.critic_lr, limit),
    ]
    if bool(goal.alpha_parameters) != (settings.alpha_lr is not None):
        raise ValueError(
            f"updates.alpha_lr is {settings.alpha_lr}, but {type(goal).__name__} has "
            f"{len(goal.alpha_parameters)} entropy coefficients; give a learning rate exactly if "
            "there is one, otherwise null"
        )
    if settings.alpha_lr is not None:
        groups.append(ParameterGroup("alpha", goal.alpha_parameters, settings.alpha_lr))
    if settings.trunk_lr:
        idle = ("token_head", "value_head", "ground_head")
        trunk = [p for name, p in model.named_parameters() if not name.startswith(idle)]
        groups.append(ParameterGroup("trunk", trunk, settings.trunk_lr, limit))
    learner = Learner(
        goal,
        groups,
        run.topology,
        sharded=[model] if settings.trunk_lr else [],
        micro_batch_size=settings.micro_batch_size,
        after_step=goal.after_step,
    )
    return learner, goal
