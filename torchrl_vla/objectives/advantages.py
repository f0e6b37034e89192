"""Advantages along time: GAE with a discount per decision, return-to-go, global whitening.

Rollouts are ``[N, T]`` with decision scalars ``[N, T, 1]``. Baselines from a group of trajectories
are in :mod:`torchrl_vla.objectives.groups`.

Legend: ``*`` batch dims, ``N`` envs, ``T`` decisions.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate

from torchrl_vla.objectives.reduction import check_mask, check_same_shape, global_sum, masked_sum

EPS = 1e-8
"""Added to a standard deviation before dividing; constant data then gives 0."""


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    discount: Tensor | float,
    lmbda: float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimate over decisions.

    A truncated decision is bootstrapped with its own ``next_value``, a terminated one never; done
    stops the lambda recursion, so episodes that share a row do not leak into each other.

    Args:
        reward: ``[N, T, 1]`` float32, ``sum_k gamma^k r_k`` over the executed steps.
        value: ``[N, T, 1]`` V(observation).
        next_value: ``[N, T, 1]`` V(next observation), of the final observation where done (never
            of the one after the reset).
        done: ``[N, T, 1]`` bool, terminated or truncated.
        terminated: ``[N, T, 1]`` bool.
        discount: ``[N, T, 1]`` from :func:`~torchrl_vla.objectives.masks.decision_discount`, or one
            number for all.
        lmbda: in [0, 1], per decision.
        valid: ``[N, T, 1]`` bool, decisions that are data; ``None``: all. Advantage and target are
            0 elsewhere, and the recursion stops before such a decision as at a truncation.

    Returns:
        ``(advantage, value_target)``, both ``[N, T, 1]``, without gradient.

    Raises:
        ValueError: shapes differ, ``lmbda`` outside [0, 1], or terminated without done.
        TypeError: flags are not bool.

    Source: Schulman et al., arXiv:1506.02438, eq. 16.
    """
    check_rollout(reward, value, next_value, done, terminated, discount, valid)
    if not 0.0 <= lmbda <= 1.0:
        raise ValueError(f"lmbda is {lmbda}; it lies in [0, 1]")
    with torch.no_grad():
        if valid is not None:
            reward, value, next_value = (
                torch.where(valid, x, 0) for x in (reward, value, next_value)
            )
            done = cut_at_invalid(done, valid)
        advantage, target = generalized_advantage_estimate(
            discount, lmbda, value, next_value, reward, done, terminated
        )
        if valid is not None:
            advantage, target = (torch.where(valid, x, 0) for x in (advantage, target))
    return advantage, target


def cut_at_invalid(done: Tensor, valid: Tensor) -> Tensor:
    """Mark decisions as boundaries that are invalid or are followed by an invalid one.

    Args:
        done: ``[*, T, 1]`` bool.
        valid: ``[*, T, 1]`` bool.

    Returns:
        ``[*, T, 1]`` bool.
    """
    cut = done | ~valid
    cut[..., :-1, :] |= ~valid[..., 1:, :]
    return cut


def check_rollout(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    discount: Tensor | float,
    valid: Tensor | None,
) -> None:
    """Check what every time-wise estimator takes.

    Raises:
        ValueError: shapes differ, the last dim is not 1, or a decision is terminated but not done.
        TypeError: flags are not bool.
    """
    named = {"reward": reward, "value": value, "next_value": next_value}
    named |= {"done": done, "terminated": terminated}
    if isinstance(discount, Tensor):
        named["discount"] = discount
    check_mask(done, "done")
    check_mask(terminated, "terminated")
    if valid is not None:
        check_mask(valid, "valid")
        named["valid"] = valid
    check_same_shape(**named)
    if reward.ndim < 2 or reward.shape[-1] != 1:
        raise ValueError(f"reward has shape {tuple(reward.shape)}, expected [*, T, 1]")
    stray = terminated & ~done
    if bool(stray.any()):
        raise ValueError(
            f"{int(stray.sum())} decisions are terminated but not done; done must be "
            "terminated | truncated"
        )


def return_to_go(
    reward: Tensor, done: Tensor, discount: Tensor | float, valid: Tensor | None = None
) -> Tensor:
    """Discounted sum of the rewards from each decision to the end of its trajectory.

    Args:
        reward: ``[N, T, 1]`` float32.
        done: ``[N, T, 1]`` bool.
        discount: ``[N, T, 1]``, or one number for all.
        valid: ``[N, T, 1]`` bool; ``None``: all. 0 elsewhere.

    Returns:
        ``[N, T, 1]``. There is no value function, so nothing is bootstrapped: a truncated
        trajectory, or one that the rollout cuts, counts what was seen.

    Raises:
        ValueError: shapes differ.
    """
    zero = torch.zeros_like(reward)
    return gae(reward, zero, zero, done, done, discount, 1.0, valid)[0]


def normalise(advantage: Tensor, valid: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Zero mean and unit standard deviation over the valid entries of all ranks.

    Args:
        advantage: any shape.
        valid: bool, the same shape.
        group: process group, ``None`` for the default one. Every rank of it must call.

    Returns:
        The shape of ``advantage``, float32; 0 where invalid, and everywhere 0 if all valid entries
        are equal.

    Raises:
        ValueError: shapes differ.
        TypeError: ``valid`` is not bool.

    Differs: population standard deviation (divides by n), so one entry is 0 and not NaN.
    """
    check_same_shape(advantage=advantage, valid=valid)
    x = advantage.detach().double()
    total, number = global_sum(torch.stack([masked_sum(x, valid), valid.sum().double()]), group)
    number = number.clamp_min(1)
    deviation = x - total / number
    variance = global_sum(masked_sum(deviation.square(), valid), group) / number
    return torch.where(valid, deviation / (variance.sqrt() + EPS), 0).float()


def reinforce_plus_plus(
    reward: Tensor,
    done: Tensor,
    valid: Tensor,
    discount: Tensor | float,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return-to-go, whitened over the valid decisions of the global batch.

    Args:
        reward: ``[N, T, 1]`` float32.
        done: ``[N, T, 1]`` bool.
        valid: ``[N, T, 1]`` bool.
        discount: ``[N, T, 1]``, or one number for all.
        group: process group, ``None`` for the default one. Every rank of it must call.

    Returns:
        ``[N, T, 1]`` float32; 0 where invalid.

    Raises:
        ValueError: shapes differ.

    Source: Hu et al., arXiv:2501.03262, section 3.
    Differs: the return runs over the decisions of a trajectory (verl: over the tokens of one
    chunk); the KL term is a separate loss.
    """
    return normalise(return_to_go(reward, done, discount, valid), valid, group)
