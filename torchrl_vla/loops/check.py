"""The lr = 0 self-check: with weights that never move, every importance ratio must be 1.

Actors and learner score the same action twice: when it is chosen and when it is trained on. If
anything differs between the two (temperature, precision, masks, preprocessing, a stale copy of the
weights), clipping starts to act before anything was learned. This loop builds a run as configured,
takes real rounds and real updates with learning rate 0, publishes as training does, and measures.

    python launch/train.py algo=ppo check=ratio
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from torchrl_vla import schema
from torchrl_vla.actors import ActorSettings
from torchrl_vla.loops.on_policy import build_learner, next_round
from torchrl_vla.loops.run import Run
from torchrl_vla.loops.updates import UpdateSettings, minibatches
from torchrl_vla.loops.workers import start_workers
from torchrl_vla.objectives.policy_gradient import score
from torchrl_vla.policies.shard import full_weights

BOUNDS = {"float32": 1e-5, "bfloat16": 0.05}
"""Largest |log ratio| of one number that passes, by the policy's precision. Measured on a CPU: 1e-6
in both (its bfloat16 kernels round a row alike in a batch of 32 and of 128). Kernels that choose
their order of summation by batch size may differ by units of bfloat16's last place, 0.4 % of a
logit; the bound is a quarter of the usual clip range, so that rounding alone never clips."""
ROUNDS = 3
"""Rounds that are trained on."""
MOST_ROUNDS = 50
"""Rounds to collect before giving up on a complete group."""


@dataclass(frozen=True)
class Gap:
    """The decision, and the number of its chunk, where two log-probs are furthest apart."""

    size: float
    """|log ratio|, nats."""
    where: str

    def __str__(self) -> str:
        return f"{self.size:.3g} at {self.where}"


def check_ratio(
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
    """Measure the ratios of a run with learning rate 0; arguments as in ``on_policy.train``.

    Returns:
        Whether all ratios are 1 within the bound of the policy's precision, and in float32 the
        clip fraction and the approximate KL are 0. Rank 0 prints the largest gap and where.

    Raises:
        ValueError: ``resume`` is set: the check trains nothing and has nothing to continue.
        RuntimeError: no group became complete.
    """
    if resume:
        raise ValueError("check=ratio starts afresh; use resume=never and a new run_dir")
    still = replace(
        updates,
        lr=0.0,
        value_lr=None if updates.value_lr is None else 0.0,
        head_lr=None if updates.head_lr is None else 0.0,
    )
    policy, learner, goal, evaluated = build_learner(
        run, make_policy, objective, actors, still, seed=seed, gamma=gamma, max_lag=max_lag
    )
    goal.value_only_rounds = 0  # the check is about the policy
    workers = start_workers(run, make_policy, actors, evaluated, seed=seed, gamma=gamma)
    generator = torch.Generator().manual_seed(seed)
    gaps, reports = [], []
    with workers:
        workers.publish(full_weights(policy), 0)
        for _ in range(MOST_ROUNDS):
            rows, _ = goal.credit(next_round(workers, max_lag), run.counters["version"])
            if not len(rows):
                continue
            for minibatch in minibatches(rows, still.minibatch_size, 1, generator):
                gaps.append(largest_gap(goal, minibatch))
                reports.append(goal.finish(learner.update(minibatch)))
            run.counters["version"] += 1
            workers.publish(full_weights(policy), run.counters["version"])
            if run.counters["version"] == ROUNDS:
                break
        else:
            raise RuntimeError(
                f"no {ROUNDS} rounds to train on among {MOST_ROUNDS} collected; lower "
                "actors.group_size or objective.min_groups, or collect longer rounds"
            )
    precision = getattr(policy.model, "precision", "float32")  # the strict bound, if it says none
    return verdict(run, precision, gaps, reports)


def largest_gap(goal: Any, minibatch: TensorDictBase) -> Gap:
    """Score a minibatch once more and find the number whose log-prob differs most."""
    new, _ = score(goal.policy, minibatch)
    apart = (new - minibatch[schema.LOG_PROBS]).abs()
    apart = torch.where(goal.numbers(minibatch), apart, -1.0)
    row, step, dim = (int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    size = float(apart[row, step, dim])
    if size < 0:
        return Gap(0.0, "no executed number in the minibatch")
    ids = (int(minibatch[key][row]) for key in (schema.EPISODE_ID, schema.DECISION))
    episode, decision = ids
    return Gap(
        size,
        f"episode {episode}, decision {decision}, step {step}, action dim {dim}, version "
        f"{int(minibatch[schema.POLICY_VERSION][row])}: stored "
        f"{float(minibatch[schema.LOG_PROBS][row, step, dim]):.6f}, now "
        f"{float(new[row, step, dim]):.6f}",
    )


def verdict(run: Run, precision: str, gaps: list[Gap], reports: list[dict[str, float]]) -> bool:
    """Gather the gaps of all ranks, print, and decide; collective."""
    bound = BOUNDS[precision]
    mine = max(gaps, key=lambda gap: gap.size if math.isfinite(gap.size) else math.inf)
    everyone = run.topology.gather_objects(mine)
    largest = max(everyone, key=lambda gap: gap.size if math.isfinite(gap.size) else math.inf)
    clipped = max(report["clip_fraction"] for report in reports)
    far = max(report["approx_kl"] for report in reports)
    pulled = max(abs(report.get("loss_kl", 0.0)) for report in reports)
    passed = largest.size <= bound
    if precision == "float32":
        passed = passed and clipped == 0 and far <= bound**2 and pulled <= bound**2
    if run.topology.is_main:
        print(
            f"check=ratio {run.algorithm}: {'passed' if passed else 'FAILED'} in {precision}\n"
            f"  largest |log ratio| {largest}\n"
            f"  bound {bound:g}; clip fraction {clipped:.3g}; approximate KL {far:.3g}; KL to the "
            f"reference {pulled:.3g}\n"
            f"  {len(reports)} updates of learning rate 0 on {ROUNDS} rounds, "
            f"{run.topology.world_size} ranks",
            flush=True,
        )
    return passed
