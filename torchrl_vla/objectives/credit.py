"""Advantage estimators: the part of a policy-gradient algorithm that says how good a decision was.

Each is a small callable over the keys of a round, chosen in YAML by ``_target_``; the formulas are
the pure functions of :mod:`~torchrl_vla.objectives.advantages`, :mod:`~torchrl_vla.objectives.ppo`
and :mod:`~torchrl_vla.objectives.groups`. Two kinds exist:

- along time (``Gae``, ``VTrace``): read a round ``[N, T]`` as it was collected, bootstrap with a
  value where an episode goes on;
- over whole trajectories (``GroupRelative``, ``LeaveOneOut``, ``ReinforcePlusPlus``, and ``Gae`` if
  asked): read decisions ``[1, M]`` of finished trajectories, which :mod:`.trajectories` holds
  together.

Legend: ``N`` envs, ``T`` decisions, ``M`` decisions of whole trajectories, ``H`` steps per chunk,
``A`` action dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_vla import schema
from torchrl_vla.objectives.advantages import gae, normalise, reinforce_plus_plus
from torchrl_vla.objectives.groups import (
    group_relative,
    leave_one_out,
    one_per_trajectory,
    trajectory_return,
)
from torchrl_vla.objectives.masks import action_mask, decision_discount
from torchrl_vla.objectives.ppo import vtrace

VALUE, NEXT_VALUE = "state_value", "next_state_value"
VALID = "valid"
"""``[*, 1]`` bool: the decision enters the loss."""
COUNTED = "counted"
"""``[*, 1]`` bool: the decision's reward is data (a stale decision's still is, padding's never)."""
PROXIMAL = "proximal_log_probs"
"""``[*, H, A]`` float32: log-probs of the stored action under the version that the round starts
from."""


class Estimator(Protocol):
    """What :class:`~torchrl_vla.objectives.policy_gradient.PolicyGradient` asks of an estimator."""

    uses_value: ClassVar[bool]
    """Reads ``state_value`` and ``next_state_value`` and returns a target for the value."""
    whole_trajectories: bool
    """Reads ``[1, M]`` decisions of finished trajectories instead of ``[N, T]``."""
    compares_groups: ClassVar[bool]
    """Compares trajectories of one initial state."""
    corrects_behaviour: ClassVar[bool]
    """Its advantages carry the weight (start of the round / behaviour) already."""

    def __call__(self, rows: TensorDictBase, gamma: float) -> tuple[Tensor, Tensor | None]:
        """Return advantage and value target (``None`` without a value), ``[*, 1]`` each."""


@dataclass(frozen=True)
class Gae:
    """Generalised advantage estimate on decisions, normalised over the valid ones of all ranks.

    Args:
        lmbda: in [0, 1], per decision.
        whole_trajectories: wait for the ends of episodes, so that no return is cut off by the end
            of a round and only truncated episodes are bootstrapped. The value of a decision that
            waited is the one that its behaviour policy gave it.

    Source: Schulman et al., arXiv:1506.02438, eq. 16.
    """

    lmbda: float = 0.95
    whole_trajectories: bool = False
    uses_value: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = False
    corrects_behaviour: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.lmbda <= 1:
            raise ValueError(f"Gae's lmbda is {self.lmbda}; it lies in [0, 1]")

    def __call__(self, rows: TensorDictBase, gamma: float) -> tuple[Tensor, Tensor]:
        """Estimate along time; collective."""
        # A decision that waited too long for its trajectory leaves the loss, not the return.
        valid = rows[COUNTED] if self.whole_trajectories else rows[VALID]
        advantage, target = gae(
            rows[schema.REWARD],
            rows[VALUE],
            rows[NEXT_VALUE],
            rows[schema.DONE],
            rows[schema.TERMINATED],
            decision_discount(rows[schema.NUM_EXECUTED], gamma),
            self.lmbda,
            valid,
        )
        return normalise(advantage, rows[VALID]), target


@dataclass(frozen=True)
class VTrace:
    """V-trace on decisions: corrects for behaviour policies older than the one being trained.

    Values and log-probs are those of the version that the round starts from, of the STORED action,
    summed over its executed numbers. The advantages hold the truncated weight of that version over
    the behaviour policy, so the surrogate's ratio starts at 1.

    Args:
        rho_clip: cap of the weight of a temporal difference.
        c_clip: cap of the weight that carries corrections back in time.

    Source: Espeholt et al., arXiv:1802.01561, eq. 1 and section 4.2.
    Differs: advantages are normalised over the valid decisions of all ranks.
    """

    rho_clip: float = 1.0
    c_clip: float = 1.0
    uses_value: ClassVar[bool] = True
    whole_trajectories: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = False
    corrects_behaviour: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rho_clip <= 0 or self.c_clip <= 0:
            raise ValueError(
                f"VTrace's rho_clip={self.rho_clip} and c_clip={self.c_clip} must be above 0"
            )

    def __call__(self, rows: TensorDictBase, gamma: float) -> tuple[Tensor, Tensor]:
        """Estimate along time; collective."""
        executed = action_mask(rows[schema.EXECUTED_MASK], rows[PROXIMAL].shape[-1])
        start, behaviour = (
            torch.where(executed, rows[key], 0).sum((-2, -1)).unsqueeze(-1)
            for key in (PROXIMAL, schema.LOG_PROBS)
        )
        advantage, target = vtrace(
            start,
            behaviour,
            rows[schema.REWARD],
            rows[VALUE],
            rows[NEXT_VALUE],
            rows[schema.DONE],
            rows[schema.TERMINATED],
            decision_discount(rows[schema.NUM_EXECUTED], gamma),
            self.rho_clip,
            self.c_clip,
            rows[VALID],
        )
        return normalise(advantage, rows[VALID]), target


class _Grouped:
    """What the two group baselines share: the undiscounted return, once per trajectory."""

    uses_value: ClassVar[bool] = False
    whole_trajectories: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True
    corrects_behaviour: ClassVar[bool] = False

    def _returns(self, rows: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        counted = rows[COUNTED]
        returns = trajectory_return(rows[schema.REWARD], rows[schema.EPISODE_ID], counted)
        one = one_per_trajectory(rows[schema.EPISODE_ID], counted)
        return returns, rows[schema.GROUP_ID], one


@dataclass(frozen=True)
class GroupRelative(_Grouped):
    """GRPO: a trajectory's return minus the mean return of its group.

    Args:
        divide_by_std: divide by the group's standard deviation (GRPO) or not (Dr. GRPO).

    Source: Shao et al., arXiv:2402.03300, section 4.1.2; Liu et al., arXiv:2503.20783.
    """

    divide_by_std: bool

    def __call__(self, rows: TensorDictBase, gamma: float) -> tuple[Tensor, None]:
        """Give every decision its trajectory's advantage."""
        returns = self._returns(rows)
        return group_relative(*returns, divide_by_std=self.divide_by_std), None


@dataclass(frozen=True)
class LeaveOneOut(_Grouped):
    """RLOO: a trajectory's return minus the mean return of the others of its group.

    Source: Ahmadian et al., arXiv:2402.14740, eq. 8.
    """

    def __call__(self, rows: TensorDictBase, gamma: float) -> tuple[Tensor, None]:
        """Give every decision its trajectory's advantage."""
        return leave_one_out(*self._returns(rows)), None


@dataclass(frozen=True)
class ReinforcePlusPlus:
    """REINFORCE++: discounted return-to-go, whitened over the decisions of all ranks.

    Source: Hu et al., arXiv:2501.03262, section 3.
    """

    uses_value: ClassVar[bool] = False
    whole_trajectories: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = False
    corrects_behaviour: ClassVar[bool] = False

    def __call__(self, rows: TensorDictBase, gamma: float) -> tuple[Tensor, None]:
        """Estimate along the trajectories, which stand one behind the other; collective."""
        return (
            reinforce_plus_plus(
                rows[schema.REWARD],
                rows[schema.DONE],
                rows[COUNTED],
                decision_discount(rows[schema.NUM_EXECUTED], gamma),
            ),
            None,
        )
