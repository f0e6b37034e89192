"""On-policy training: collect a round, assign credit, a few epochs of updates, publish, repeat.

    actors ──round [N, T]──▶ objective.credit ──▶ shuffled minibatches ──▶ learner.update
       ▲                                                                        │
       └──────────────────────────── publish (version + 1) ◀────────────────────┘

Weights change between rounds only, and a round is dropped after use. With ``overlap`` the actors
collect the next round, under the weights published before it began, while the learner updates on
this one: every decision is then one version old when it is used, which the ratio of the stored
log-probs accounts for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from torchrl_vla import schema
from torchrl_vla.actors import ActorSettings, load_full_weights, start_actors
from torchrl_vla.learner import Learner, ParameterGroup
from torchrl_vla.loops.run import Run
from torchrl_vla.metrics import TRAIN_SUCCESS, WAIT_ACTORS, Stopwatch
from torchrl_vla.policies.shard import full_weights, shard


@dataclass(frozen=True)
class UpdateSettings:
    """How a round becomes updates."""

    minibatch_size: int
    """Decisions per update, on this rank."""
    epochs: int
    """Passes over a round."""
    lr: float
    value_lr: float
    max_grad_norm: float
    micro_batch_size: int | None = None
    """Decisions per backward pass; the whole minibatch if ``None``."""
    betas: tuple[float, float] = (0.9, 0.95)
    warm_up: int = 0
    """Updates of linear warm-up."""
    frozen: tuple[str, ...] = ()
    """Parameters of the model that stay as they are, by the start of their names."""

    def __post_init__(self) -> None:
        for name in ("minibatch_size", "epochs", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"updates.{name} is {getattr(self, name)}; it must be above 0")


def train(
    run: Run,
    *,
    make_policy: Callable[..., nn.Module],
    objective: Callable[..., Any],
    actors: ActorSettings,
    updates: UpdateSettings,
    seed: int,
    gamma: float,
    overlap: bool,
    resume: bool,
) -> None:
    """Train until the run's budget is spent.

    Args:
        run: folder, budget, evaluation.
        make_policy: picklable; ``make_policy(meta)`` builds the policy, in learner and actors.
        objective: ``objective(policy, gamma=...)`` builds the algorithm's objective.
        actors: this rank's actor processes.
        updates: how a round becomes updates.
        seed: of everything.
        gamma: discount per control step.
        overlap: collect the next round during the updates on this one (policy lag 1).
        resume: continue from the folder's last checkpoint.
    """
    rank = run.topology.rank
    build = partial(make_policy, run.suite.meta)
    torch.manual_seed(seed)
    policy, evaluated = build(), build()
    learner, goal = make_learner(run, policy, objective, updates, gamma)
    torch.manual_seed(seed * 1000 + rank)  # equal weights, different noise on every rank
    state = {
        "modules": {"policy": policy, "evaluated": evaluated},
        "optimizers": {"learner": (learner.optimizer, [policy])},
    }
    loaded = run.resume(state) if resume else None
    if loaded is not None:
        learner.updates, goal.rounds = run.counters["updates"], loaded["json"]["rounds"]
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
        attempt=run.counters["version"],
    )

    def gather() -> TensorDict:
        weights = full_weights(policy)
        load_full_weights(evaluated, weights)
        return weights

    watch = Stopwatch()
    generator = torch.Generator().manual_seed(seed * 1000 + rank + learner.updates)
    with workers:
        weights = gather()
        workers.publish(weights, run.counters["version"])
        if not run.history:
            run.record(run.evaluate(evaluated, final=True))
        while True:
            with watch.wait(WAIT_ACTORS):
                rollout = workers.collect()
            if overlap:
                workers.publish(weights, run.counters["version"])
                workers.request()
            lag = run.counters["version"] - rollout[schema.POLICY_VERSION].min()
            metrics = rollout_metrics(rollout) | goal.credit(rollout) | {"policy_lag": float(lag)}
            metrics |= update_epochs(learner, rollout, updates, generator)
            steps, ended = (int(rollout[k].sum()) for k in (schema.NUM_EXECUTED, schema.DONE))
            run.count(steps, rollout.numel(), ended, updates=learner.updates)
            weights = gather()
            if not overlap:
                workers.publish(weights, run.counters["version"])
            metrics |= watch.pop_shares()
            over = run.finished()
            if over or run.evaluation_due():
                metrics |= run.evaluate(evaluated, final=over)
            run.record(metrics)
            if over or run.save_due():
                own = {"json": {"rounds": goal.rounds}, "rank_json": workers.positions()}
                run.save(state | own)
            if over:
                break
    run.finish(evaluated)


def positions_of(loaded: dict[str, Any] | None) -> list[int] | None:
    """Return this rank's initial-state positions from a checkpoint, if it holds them."""
    ranks = None if loaded is None else loaded["rank_json"]
    return None if ranks is None else ranks["positions"]


def make_learner(
    run: Run,
    policy: nn.Module,
    objective: Callable[..., Any],
    settings: UpdateSettings,
    gamma: float,
) -> tuple[Learner, Any]:
    """Shard the policy and build objective and learner on it."""
    model = policy.model.model
    idle = ("ground_head", *settings.frozen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(idle))
    shard(model, run.topology.mesh, blocks=[type(model.blocks[0])])
    goal = objective(policy, gamma=gamma)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    value = [p for n, p in named if n.startswith("value_head")]
    rest = [p for n, p in named if not n.startswith("value_head")]
    limit, betas, warm_up = settings.max_grad_norm, settings.betas, settings.warm_up
    groups = [
        ParameterGroup("policy", rest, settings.lr, limit, betas=betas, warm_up=warm_up),
        ParameterGroup("value", value, settings.value_lr, limit, betas=betas, warm_up=warm_up),
    ]
    learner = Learner(
        goal, groups, run.topology, sharded=[model], micro_batch_size=settings.micro_batch_size
    )
    return learner, goal


def minibatches(
    rollout: TensorDictBase, size: int, epochs: int, generator: torch.Generator
) -> Iterator[TensorDictBase]:
    """Yield every decision of ``rollout`` once per epoch, in shuffled minibatches of ``size``."""
    rows = rollout.reshape(-1)
    for _ in range(epochs):
        for index in torch.randperm(len(rows), generator=generator).split(size):
            yield rows[index]


def update_epochs(
    learner: Learner,
    rollout: TensorDictBase,
    settings: UpdateSettings,
    generator: torch.Generator,
) -> dict[str, float]:
    """Take all updates of a round; return the mean of their metrics."""
    sums: dict[str, float] = {}
    number = 0
    for minibatch in minibatches(rollout, settings.minibatch_size, settings.epochs, generator):
        number += 1
        for name, value in learner.update(minibatch).items():
            sums[name] = sums.get(name, 0.0) + value
    return {name: value / number for name, value in sums.items()}


def rollout_metrics(rollout: TensorDictBase) -> dict[str, float]:
    """Return what the actors did in a round: success of the episodes that ended, and counts."""
    ended = int(rollout[schema.DONE].sum())
    succeeded = int(rollout[schema.SUCCESS].sum())
    return {
        TRAIN_SUCCESS: succeeded / ended if ended else float("nan"),
        "episodes_in_round": float(ended),
        "sim_errors_in_round": float(rollout[schema.SIM_ERROR].sum()),
    }
