"""Small real runs of the on-policy loop: counters instead of physics, a policy of a few thousand
weights, actors in real processes."""

from functools import partial
from pathlib import Path
from typing import Any

from envs.counter import CounterSuite

from torchrl_vla import topology as topo
from torchrl_vla.actors import ActorSettings
from torchrl_vla.loops.plans import Budget, CheckpointPlan, EvaluationPlan
from torchrl_vla.loops.run import Run
from torchrl_vla.loops.updates import UpdateSettings
from torchrl_vla.objectives.credit import Gae, GroupRelative
from torchrl_vla.objectives.policy_gradient import PolicyGradient
from torchrl_vla.policies.tiny import make_policy

CHUNK = 2
# Success once the first action's numbers add up to 2: what a group does depends on the policy.
SUITE = CounterSuite(goal=2.0)
POLICY = partial(
    make_policy, weights=None, chunk_size=CHUNK, num_bins=8, width=16, heads=2, keypoints=4
)
PPO = partial(PolicyGradient, advantage=Gae(), value_weight=0.5)
GRPO = partial(PolicyGradient, advantage=GroupRelative(False), max_hold=3, min_groups=1)


def make_run(
    folder: Path,
    ranks: topo.Topology,
    *,
    updates: int,
    suite: CounterSuite = SUITE,
    run: dict[str, Any] | None = None,
    **budget: Any,
) -> Run:
    """Build a run; ``run`` changes its other settings."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {
        "evaluation": EvaluationPlan(2, 2, every_minutes=99, num_envs=2, videos=0),
        "saves": CheckpointPlan(every_minutes=99),
        "display": False,
    }
    return Run(
        folder=folder,
        topology=ranks,
        suite=suite,
        chunk_size=CHUNK,
        budget=Budget(updates=updates, **budget),
        algorithm="small",
        **(given | (run or {})),
    )


def arguments(objective: partial, *, group_size: int = 1, **changes: Any) -> dict[str, Any]:
    """Return what the loop takes besides the run; ``group_size`` > 1 has no value to train."""
    value_lr = 1e-3 if objective is PPO else None
    given = {
        "make_policy": POLICY,
        "objective": objective,
        "actors": ActorSettings(1, 4, 3, 30.0, group_size),
        "updates": UpdateSettings(
            minibatch_size=8, epochs=2, lr=1e-3, max_grad_norm=1.0, value_lr=value_lr
        ),
        "seed": 0,
        "gamma": 1.0,
        "max_lag": 0,
        "resume": False,
    }
    return given | changes
