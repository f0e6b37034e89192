"""Decisions held back until their trajectory, and its group, is whole.

A round ends for all simulators at once, their episodes do not: an estimator that judges a whole
trajectory has to wait for its end, and one that compares a group for the last of the group. This
room keeps the beginnings, hands over what is complete, and hands over nothing twice.

How much can be held: every open group has an episode that runs in one of the rank's ``N``
simulators, so at most ``N`` groups of ``group_size`` episodes, each as long as the suite's limit.

Legend: ``N`` envs, ``T`` decisions, ``M`` decisions handed over.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_vla import schema
from torchrl_vla.objectives.credit import COUNTED, VALID
from torchrl_vla.objectives.groups import has_contrast, one_per_trajectory, trajectory_return


def void_episodes(rows: TensorDictBase) -> Tensor:
    """Mark decisions of episodes that a diverged simulation made void, ``[*, 1]`` bool."""
    bad = rows[schema.EPISODE_ID][rows[schema.SIM_ERROR]]
    return torch.isin(rows[schema.EPISODE_ID], bad)


class Trajectories:
    """Collects rounds ``[N, T]`` into whole trajectories of whole groups.

    Args:
        group_size: episodes that start from one state (``actors.group_size``); 1 for no groups.
        max_lag: versions; a group whose decisions are all older is given up.
        contrast_only: drop complete groups whose trajectories all have the same return.
    """

    def __init__(self, group_size: int, max_lag: int, *, contrast_only: bool = False) -> None:
        self.group_size, self.max_lag, self.contrast_only = group_size, max_lag, contrast_only
        self._open: TensorDictBase | None = None
        self._ready: list[TensorDictBase] = []
        self.num_ready = 0
        """Complete groups that :meth:`take` would hand over."""
        self.void = self.given_up = 0
        """Decisions dropped so far: of diverged simulations; in groups that never became whole."""
        self.groups = self.without_contrast = 0
        """Groups completed so far, and how many of them teach nothing."""

    @property
    def held(self) -> int:
        """Decisions that are held back now."""
        rows = [*self._ready, *([] if self._open is None else [self._open])]
        return sum(len(part) for part in rows)

    def add(self, rollout: TensorDictBase, version: int) -> None:
        """Take in a round.

        Args:
            rollout: ``[N, T]`` with the schema's keys; what is kept is copied.
            version: the learner's, which the age of a decision is counted from.

        Raises:
            ValueError: a group has more finished episodes than ``group_size``, or a decision of a
                finished episode is missing (the rounds do not follow each other).
        """
        rows = rollout.reshape(-1)
        if self._open is not None:
            rows = torch.cat([self._open.select(*rows.keys(True, True)), rows])
        _, group = torch.unique(rows[schema.GROUP_ID].squeeze(-1), return_inverse=True)
        finished = torch.zeros(int(group.max()) + 1, dtype=torch.int64)
        finished.index_add_(0, group, rows[schema.DONE].squeeze(-1).long())
        if int(finished.max()) > self.group_size:
            raise ValueError(
                f"a group has {int(finished.max())} finished episodes, group_size is "
                f"{self.group_size}; actors and objective must agree on actors.group_size"
            )
        whole = (finished == self.group_size)[group]
        if bool(whole.any()):
            self._complete(rows[whole])
        rows, group = rows[~whole], group[~whole]
        young = version - rows[schema.POLICY_VERSION].squeeze(-1) <= self.max_lag
        alive = torch.zeros_like(finished, dtype=torch.bool)
        alive[group[young]] = True
        hopeless = ~alive[group]
        self.given_up += int(hopeless.sum())
        self._open = rows[~hopeless]

    def take(self) -> TensorDictBase | None:
        """Hand over the decisions of all complete groups, once.

        Returns:
            ``[M]``, episode after episode, oldest decision first; ``None`` if there is no group.
        """
        ready, self._ready, self.num_ready = self._ready, [], 0
        return torch.cat(ready) if ready else None

    def _complete(self, rows: TensorDictBase) -> None:
        """Sort, check and keep decisions of complete groups; ids grow with time."""
        order = torch.argsort(rows[schema.DECISION].squeeze(-1), stable=True)
        episodes = rows[schema.EPISODE_ID].squeeze(-1)[order]
        rows = rows[order[torch.argsort(episodes, stable=True)]]
        _check_complete(rows)
        void = void_episodes(rows)
        self.void += int(void.sum())
        rows = rows[~void.squeeze(-1)]
        if not len(rows):
            return
        ids = rows[schema.GROUP_ID]
        all_rows = torch.ones_like(ids, dtype=torch.bool)
        returns = trajectory_return(rows[schema.REWARD], rows[schema.EPISODE_ID], all_rows)
        contrast = has_contrast(returns, ids, one_per_trajectory(rows[schema.EPISODE_ID], all_rows))
        number, useful = ids.unique().numel(), ids[contrast].unique().numel()
        self.groups += number
        self.without_contrast += number - useful
        if self.contrast_only:
            rows, number = rows[contrast.squeeze(-1)], useful
        if number:
            self._ready.append(rows)
            self.num_ready += number


def _check_complete(rows: TensorDictBase) -> None:
    """Raise unless every episode of the sorted ``rows`` has its decisions 0, 1, ... to the end."""
    decision, done = rows[schema.DECISION].squeeze(-1), rows[schema.DONE].squeeze(-1)
    expected = torch.zeros_like(decision)
    expected[1:] = torch.where(done[:-1], 0, decision[:-1] + 1)
    wrong = decision != expected
    if bool(wrong.any()) or not bool(done[-1]):
        first = rows[wrong][0] if bool(wrong.any()) else rows[-1]
        raise ValueError(
            f"episode {int(first[schema.EPISODE_ID])} lacks decisions before number "
            f"{int(first[schema.DECISION])}; rounds must follow each other without a gap"
        )


def padded(rows: TensorDictBase | None, spare: TensorDictBase, number: int) -> TensorDict:
    """Return ``number`` rows: ``rows`` and, behind them, copies that are marked as no data.

    Ranks share every backward pass, so they need equally many rows; trajectories come as they come.

    Args:
        rows: ``[M]`` with bool ``[M, 1]`` marks ``counted`` and ``valid``, or ``None``.
        spare: ``[1]``, one row to copy when there is no other.
        number: at least ``M``.
    """
    missing = number - (0 if rows is None else len(rows))
    if not missing:
        return rows
    filler = (spare if rows is None else rows[:1]).expand(missing).clone()
    for mark in (COUNTED, VALID):
        filler[mark] = torch.zeros(missing, 1, dtype=torch.bool)
    if rows is None:
        return filler
    return torch.cat([rows, filler.select(*rows.keys(True, True))])
