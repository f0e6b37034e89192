"""Critic-free baselines: compare a trajectory with the others that began in the same state.

Groups and trajectories are named by integer ids and must lie whole on one rank (transitions never
cross ranks). The functions do not look at time: they take trajectories, or decisions that each
carry their trajectory's return.

Legend: ``*`` batch dims, ``A`` action dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_vla.objectives.advantages import EPS
from torchrl_vla.objectives.reduction import check_mask, check_same_shape


def group_relative(
    returns: Tensor, group_id: Tensor, counted: Tensor, *, divide_by_std: bool
) -> Tensor:
    """Return minus the mean return of its group (GRPO).

    Works on trajectories, or on decisions that each carry their trajectory's return: ``counted``
    then marks one decision per trajectory (:func:`one_per_trajectory`), so that long trajectories
    do not weigh more in the baseline.

    Args:
        returns: ``[*, 1]`` float32.
        group_id: ``[*, 1]`` int64, any values.
        counted: ``[*, 1]`` bool, entries that enter mean and standard deviation.
        divide_by_std: divide by the group's standard deviation (GRPO) or not (Dr. GRPO).

    Returns:
        ``[*, 1]`` float32 for every entry, counted or not; 0 in a group without counted entries
        and in one whose returns are all equal.

    Raises:
        ValueError: shapes differ.
        TypeError: ``counted`` is not bool, or ``group_id`` not integer.

    Source: Shao et al., arXiv:2402.03300, eq. in 4.1.2; Liu et al., arXiv:2503.20783.
    Differs: population standard deviation.
    """
    x, index, number = _groups(returns, group_id, counted)
    mean = _sum_by(torch.where(counted, x, 0), index) / number.clamp_min(1)
    deviation = torch.where(number[index] > 0, x - mean[index], 0)
    if not divide_by_std:
        return deviation.float()
    squares = _sum_by(torch.where(counted, deviation.square(), 0), index)
    return (deviation / ((squares / number.clamp_min(1)).sqrt()[index] + EPS)).float()


def leave_one_out(returns: Tensor, group_id: Tensor, counted: Tensor) -> Tensor:
    """Return minus the mean return of the OTHER trajectories of its group (RLOO).

    Args:
        returns: ``[*, 1]`` float32.
        group_id: ``[*, 1]`` int64.
        counted: ``[*, 1]`` bool, one entry per trajectory (see :func:`group_relative`).

    Returns:
        ``[*, 1]`` float32 for every entry; 0 in a group of fewer than two trajectories, which has
        no baseline.

    Raises:
        ValueError: shapes differ.
        TypeError: ``counted`` is not bool, or ``group_id`` not integer.

    Source: Ahmadian et al., arXiv:2402.14740, eq. 8.
    """
    x, index, number = _groups(returns, group_id, counted)
    total = _sum_by(torch.where(counted, x, 0), index)
    baseline = (total[index] - x) / (number[index] - 1).clamp_min(1)
    return torch.where(number[index] > 1, x - baseline, 0).float()


def has_contrast(returns: Tensor, group_id: Tensor, counted: Tensor) -> Tensor:
    """Whether the group of an entry holds two different returns; others teach nothing.

    Args:
        returns: ``[*, 1]`` float32.
        group_id: ``[*, 1]`` int64.
        counted: ``[*, 1]`` bool, one entry per trajectory.

    Returns:
        ``[*, 1]`` bool.

    Raises:
        ValueError: shapes differ.
        TypeError: ``counted`` is not bool, or ``group_id`` not integer.
    """
    x, index, number = _groups(returns, group_id, counted)
    flat, inside = index.flatten(), counted.flatten()
    low = x.new_full(number.shape, torch.inf).scatter_reduce(
        0, flat[inside], x.flatten()[inside], "amin"
    )
    high = x.new_full(number.shape, -torch.inf).scatter_reduce(
        0, flat[inside], x.flatten()[inside], "amax"
    )
    return (high > low)[index]


def one_per_trajectory(episode_id: Tensor, valid: Tensor) -> Tensor:
    """Mark one valid decision of each trajectory: what group statistics count.

    Args:
        episode_id: ``[*, 1]`` int64.
        valid: ``[*, 1]`` bool.

    Returns:
        ``[*, 1]`` bool: the first valid decision in memory order; none for a trajectory without.

    Raises:
        ValueError: shapes differ.
        TypeError: ``valid`` is not bool, or ``episode_id`` not integer.
    """
    _, index, number = _groups(valid.double(), episode_id, valid)
    position = torch.arange(valid.numel(), device=valid.device).view(valid.shape)
    first = position.new_full(number.shape, valid.numel()).scatter_reduce(
        0, index[valid], position[valid], "amin"
    )
    return position == first[index]


def trajectory_return(reward: Tensor, episode_id: Tensor, valid: Tensor) -> Tensor:
    """Sum of the rewards of the trajectory that a decision belongs to, given to all its decisions.

    Args:
        reward: ``[*, 1]`` float32.
        episode_id: ``[*, 1]`` int64.
        valid: ``[*, 1]`` bool.

    Returns:
        ``[*, 1]`` float32, undiscounted over decisions.

    Raises:
        ValueError: shapes differ.
        TypeError: ``valid`` is not bool, or ``episode_id`` not integer.
    """
    x, index, _ = _groups(reward, episode_id, valid)
    return _sum_by(torch.where(valid, x, 0), index)[index].float()


def trajectory_weight(episode_id: Tensor, valid: Tensor, size: Tensor | None = None) -> Tensor:
    """One over the length of the trajectory, so that every trajectory counts once in the loss.

    Multiply the loss by it and divide by the global number of trajectories
    (``global_count(one_per_trajectory(...))``).

    Args:
        episode_id: ``[*, 1]`` int64.
        valid: ``[*, 1]`` bool.
        size: ``[*, 1]`` loss terms of each decision (``num_executed * A`` for a loss per number);
            ``None``: 1 each.

    Returns:
        ``[*, 1]`` float32; 0 where invalid, and in a trajectory of size 0.

    Raises:
        ValueError: shapes differ.
        TypeError: ``valid`` is not bool, or ``episode_id`` not integer.
    """
    size = torch.ones_like(valid, dtype=torch.float64) if size is None else size
    x, index, _ = _groups(size, episode_id, valid)
    length = _sum_by(torch.where(valid, x, 0), index)[index]
    return torch.where(valid & (length > 0), 1 / length.clamp_min(EPS), 0).float()


def _groups(x: Tensor, ids: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` in float64, the dense group index of each entry, and counted entries per group."""
    check_same_shape(values=x, ids=ids, counted=counted)
    check_mask(counted, "counted")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"ids have dtype {ids.dtype}; groups are named by integers")
    _, index = torch.unique(ids, return_inverse=True)
    return x.detach().double(), index, _sum_by(counted.double(), index)


def _sum_by(x: Tensor, index: Tensor) -> Tensor:
    """Sum of ``x`` per dense group index, ``[groups]``."""
    groups = int(index.max()) + 1 if index.numel() else 0
    return x.new_zeros(groups).index_add(0, index.flatten(), x.flatten())
