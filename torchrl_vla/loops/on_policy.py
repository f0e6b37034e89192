"""On-policy training: collect a round, assign credit, a few epochs of updates, publish, repeat.

    actors ──round [N, T]──▶ objective.credit ──▶ shuffled minibatches ──▶ learner.update
       ▲                        │  nothing complete yet: collect on                │
       └────────────────────────┴───────── publish (version + 1) ◀─────────────────┘

With ``max_lag=0`` weights change between rounds only and every round is of the newest version. With
``max_lag=k`` up to k more rounds are asked for before this one is used, so actors collect while the
learner updates; new weights reach them between two decisions, and a decision is at most k versions
old when its round is used. The stored log-probs and ``policy_version`` account for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from torchrl_vla import schema
from torchrl_vla.actors import Actors, ActorSettings
from torchrl_vla.learner import Learner
from torchrl_vla.loops.publishing import Publishing
from torchrl_vla.loops.run import Run, in_segments
from torchrl_vla.loops.updates import UpdateSettings, frozen_copy, make_learner, update_epochs
from torchrl_vla.loops.workers import first_decisions, own_part, restarts_of, start_workers
from torchrl_vla.metrics import (
    ACTOR_RESTARTS,
    TRAIN_SUCCESS,
    WAIT_ACTORS,
    WAIT_LEARNER,
    Stopwatch,
)
from torchrl_vla.policies.deferred import without_weights
from torchrl_vla.topology import Topology


@in_segments
def train(
    run: Run,
    *,
    make_policy: Callable[..., nn.Module],
    objective: Callable[..., Any],
    actors: ActorSettings,
    updates: UpdateSettings,
    seed: int,
    gamma: float,
    max_lag: int,
    resume: bool,
) -> bool:
    """Train until the run's budget is spent.

    Args:
        run: folder, budget, evaluation.
        make_policy: picklable; ``make_policy(meta)`` builds the policy, in learner and actors.
        objective: ``objective(policy, gamma=..., group_size=..., max_lag=..., make_reference=...)``
            builds the algorithm's objective.
        actors: this rank's actor processes.
        updates: how a round becomes updates.
        seed: of everything.
        gamma: discount per control step.
        max_lag: rounds that actors may be asked for ahead, and versions that a decision may be old.
        resume: continue from the folder's last checkpoint.

    Raises:
        ValueError: the run is deterministic and rounds are asked for ahead.
    """
    if run.deterministic and max_lag:
        raise ValueError(
            f"topology.deterministic=true and max_lag={max_lag}: which decisions of a round see "
            "new weights would depend on who is faster; set max_lag=0"
        )
    policy, learner, goal, evaluated = build_learner(
        run, make_policy, objective, actors, updates, seed=seed, gamma=gamma, max_lag=max_lag
    )
    state = {
        "modules": {"policy": policy, "evaluated": evaluated},
        "optimizers": {"learner": (learner.optimizer, [policy])},
    }
    loaded = run.begin(state, resume)
    if loaded is not None:
        learner.updates, goal.rounds = run.counters["updates"], loaded["json"]["rounds"]
    lost = own_part(loaded).get("held", 0)  # decisions of trajectories that a resume leaves behind
    workers = start_workers(
        run, make_policy, actors, evaluated, seed=seed, gamma=gamma, loaded=loaded
    )
    publish, watch = Publishing(policy, evaluated, workers), Stopwatch()
    seen = Seen(first_decisions(run, actors))
    generator = torch.Generator().manual_seed(seed * 1000 + run.topology.rank + learner.updates)
    with workers:
        publish(run.counters["version"])
        if not run.history:
            run.record(run.evaluate(evaluated, final=True))
        while True:
            with watch.wait(WAIT_ACTORS):
                rollout = next_round(workers, max_lag)
            seen.add(rollout)
            rows, metrics = goal.credit(rollout, run.counters["version"])
            trained = len(rows) > 0
            if trained:
                metrics |= update_epochs(learner, rows, updates, generator)
            run.count(*seen.pop_new(), updates=learner.updates, published=trained)
            over = run.finished()
            if trained:
                publish(run.counters["version"])
                metrics |= seen.pop_metrics(run.topology) | watch.pop_shares()
                metrics |= {WAIT_LEARNER: workers.idle_share(), "dropped_resume": float(lost)}
                metrics[ACTOR_RESTARTS] = restarts_of(workers, run.topology)
                lost = 0
            elif not over:
                continue
            if run.evaluation_due(over):
                metrics |= run.evaluate(evaluated, final=over)
            if trained:
                run.record(metrics)
            saves = over or run.save_due()
            if saves:
                own = workers.positions() | {"held": goal.held}
                run.save(state | {"json": {"rounds": goal.rounds}, "rank_json": own}, last=over)
            if over or (saves and run.deterministic):
                break
    if over and not run.interrupted:
        run.finish(evaluated)
    return over


def build_learner(
    run: Run,
    make_policy: Callable[..., nn.Module],
    objective: Callable[..., Any],
    actors: ActorSettings,
    updates: UpdateSettings,
    *,
    seed: int,
    gamma: float,
    max_lag: int,
) -> tuple[nn.Module, Learner, Any, nn.Module]:
    """Return policy, learner, objective and the whole copy that is evaluated; see :func:`train`."""
    build = partial(make_policy, run.suite.meta)
    torch.manual_seed(seed)
    with without_weights():
        policy = build()
    evaluated = build()
    learner, goal = make_learner(
        run.topology,
        policy,
        objective,
        updates,
        gamma=gamma,
        group_size=actors.group_size,
        max_lag=max_lag,
        make_reference=partial(frozen_copy, policy, build, run.topology),
    )
    # Equal weights, different noise on every rank.
    torch.manual_seed(seed * 1000 + run.topology.rank)
    return policy, learner, goal, evaluated


def next_round(workers: Actors, ahead: int) -> TensorDictBase:
    """Wait for the next round, with up to ``ahead`` more under way."""
    while workers.pending <= ahead:
        workers.request()
    return workers.receive()


@dataclass
class Seen:
    """What actors did: counts since the last look, and outcomes since the last record."""

    left_out: int = 0
    """Decisions still to come before outcomes count (``first_decisions`` of ``loops.workers``)."""
    env_steps: int = 0
    decisions: int = 0
    new_episodes: int = 0
    episodes: int = 0
    successes: int = 0
    sim_errors: int = 0

    def add(self, rollout: TensorDictBase) -> None:
        """Take in a round."""
        ended = int(rollout[schema.DONE].sum())
        self.env_steps += int(rollout[schema.NUM_EXECUTED].sum())
        self.decisions += rollout.numel()
        self.new_episodes += ended
        if self.left_out > 0:
            self.left_out -= rollout.numel()
        else:
            self.episodes += ended
            self.successes += int(rollout[schema.SUCCESS].sum())
        self.sim_errors += int(rollout[schema.SIM_ERROR].sum())

    def pop_new(self) -> tuple[int, int, int]:
        """Return ``(env_steps, decisions, episodes)`` since the last call."""
        new = self.env_steps, self.decisions, self.new_episodes
        self.env_steps = self.decisions = self.new_episodes = 0
        return new

    def pop_metrics(self, topology: Topology) -> dict[str, float]:
        """Return success and counts of the episodes that ended, over all ranks; collective."""
        mine = torch.tensor([self.successes, self.episodes, self.sim_errors])
        self.successes = self.episodes = self.sim_errors = 0
        succeeded, ended, errors = topology.all_reduce_sum(mine).tolist()
        return {
            TRAIN_SUCCESS: succeeded / ended if ended else math.nan,
            "episodes_in_round": float(ended),
            "sim_errors_in_round": float(errors),
        }
