"""From per-step flags to what counts: executed steps, valid decisions, transitions.

Simulators that keep stepping after an episode has ended (a fixed horizon, a success flag that may
flicker) leave steps that are not data. These functions say which ones, and cut trajectories into
transitions without losing the last decision or the reward that ended it.

Legend: ``*`` batch dims, ``B`` trajectories, ``T`` decisions, ``H`` steps per chunk, ``A`` action
dims, ``M`` transitions.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_vla.objectives.reduction import check_mask, check_same_shape
from torchrl_vla.schema import (
    DONE,
    EXECUTED_MASK,
    NUM_EXECUTED,
    REWARD,
    TERMINATED,
    TRUNCATED,
)


def executed_steps(complete: Tensor) -> Tensor:
    """Steps that belong to the episode: up to and including the first completing one.

    Args:
        complete: ``[*, T, H]`` bool, per control step: the episode ended here (or had ended).

    Returns:
        ``[*, T, H]`` bool (``executed_mask`` of the schema). Everything after the first set flag
        is excluded, also when the flag is cleared again later.

    Raises:
        TypeError: ``complete`` is not bool.
        ValueError: fewer than 2 dims.
    """
    check_mask(complete, "complete")
    if complete.ndim < 2:
        raise ValueError(f"complete has shape {tuple(complete.shape)}, expected [*, T, H]")
    flat = complete.flatten(-2)
    ended_before = (flat.cumsum(-1) - flat.long()) > 0
    return (~ended_before).unflatten(-1, complete.shape[-2:])


def response_mask(complete: Tensor, action_dim: int) -> Tensor:
    """:func:`executed_steps`, repeated over the numbers of a step.

    Args:
        complete: ``[*, T, H]`` bool.
        action_dim: ``A``.

    Returns:
        ``[*, T, H, A]`` bool; ``flatten(-2)`` gives verl's ``[*, T, H * A]``.

    Source: verl, experimental VLA trainer (first completing step included).
    """
    return action_mask(executed_steps(complete), action_dim)


def action_mask(executed_mask: Tensor, action_dim: int) -> Tensor:
    """Repeat a step mask over the numbers of a step.

    Args:
        executed_mask: ``[*, H]`` bool.
        action_dim: ``A``, at least 1.

    Returns:
        ``[*, H, A]`` bool (a view).

    Raises:
        TypeError: the mask is not bool.
        ValueError: ``action_dim`` below 1.
    """
    check_mask(executed_mask, "executed_mask")
    if action_dim < 1:
        raise ValueError(f"action_dim is {action_dim}; a step has at least 1 number")
    return executed_mask.unsqueeze(-1).expand(*executed_mask.shape, action_dim)


def valid_decisions(executed_mask: Tensor) -> Tensor:
    """Whether a decision is data at all: at least one of its steps was executed.

    A decision whose FIRST step completes the episode is valid: it carries the reward.

    Args:
        executed_mask: ``[*, H]`` bool.

    Returns:
        ``[*, 1]`` bool.

    Raises:
        TypeError: the mask is not bool.
    """
    check_mask(executed_mask, "executed_mask")
    return executed_mask.any(-1, keepdim=True)


def decision_discount(num_executed: Tensor, gamma: float) -> Tensor:
    """Discount over one decision: ``gamma ** num_executed``.

    Args:
        num_executed: ``[*, 1]`` int64, control steps that ran.
        gamma: discount per control step, in [0, 1].

    Returns:
        ``[*, 1]`` float32.

    Raises:
        ValueError: ``gamma`` outside [0, 1].
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}; a discount per control step lies in [0, 1]")
    return torch.pow(gamma, num_executed.double()).float()


def decision_reward(reward: Tensor, executed_mask: Tensor, gamma: float) -> Tensor:
    """Sum of ``gamma**k r_k`` over the executed steps of each decision.

    Args:
        reward: ``[*, H]`` float, per control step, undiscounted.
        executed_mask: ``[*, H]`` bool.
        gamma: discount per control step, in [0, 1].

    Returns:
        ``[*, 1]`` float32.

    Raises:
        ValueError: shapes differ, or ``gamma`` outside [0, 1].
    """
    check_same_shape(reward=reward, executed_mask=executed_mask)
    steps = torch.arange(reward.shape[-1], device=reward.device)
    discounted = reward.float() * decision_discount(steps, gamma)
    return torch.where(executed_mask, discounted, 0).sum(-1, keepdim=True)


def trajectories_to_transitions(
    observation: TensorDictBase,
    action: TensorDictBase,
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    *,
    gamma: float,
) -> TensorDict:
    """Cut fixed-horizon trajectories into the valid transitions, oldest first per trajectory.

    A trajectory ends at its first flagged step. A termination at any sub-step of a chunk ends it
    there and keeps the decision; a time-out, or reaching decision ``T``, truncates it (to be
    bootstrapped from its next observation); both flags on one step mean terminated.

    Args:
        observation: what a decision sees, batch ``[B, T + 1]``: the last entry is the observation
            after the last decision, which a truncated trajectory is bootstrapped from. Ids of the
            trajectory (``task_id``, ``episode_id``) travel here too.
        action: what a decision emits (chunk, tokens, log-probs), batch ``[B, T]``.
        reward: ``[B, T, H]`` float, per control step, undiscounted.
        terminated: ``[B, T, H]`` bool, per control step.
        truncated: ``[B, T, H]`` bool; ``None`` if only the horizon truncates.
        gamma: discount per control step, in [0, 1].

    Returns:
        Transitions, batch ``[M]``: the keys of ``observation`` and ``action`` at the root, those
        of ``observation`` one decision later under ``next``, and the schema's reward, flags,
        ``executed_mask`` and ``num_executed``.

    Raises:
        ValueError: shapes or batch sizes disagree.
        TypeError: flags are not bool.

    Differs: verl drops the last decision, treats time-outs as terminal and writes -1 over the
    reward of the last kept decision.
    """
    truncated = torch.zeros_like(terminated) if truncated is None else truncated
    _check_trajectories(observation, action, reward, terminated, truncated)
    executed = executed_steps(terminated | truncated)
    ended_terminated = (terminated & executed).any(-1, keepdim=True)
    ended_truncated = (truncated & executed).any(-1, keepdim=True)
    ended_truncated[:, -1] |= valid_decisions(executed)[:, -1]
    ended_truncated &= ~ended_terminated

    transitions = observation[:, :-1].clone(recurse=False).update(action)
    transitions.set("next", observation[:, 1:].clone(recurse=False))
    transitions.set(REWARD, decision_reward(reward, executed, gamma))
    transitions.set(TERMINATED, ended_terminated)
    transitions.set(TRUNCATED, ended_truncated)
    transitions.set(DONE, ended_terminated | ended_truncated)
    transitions.set(EXECUTED_MASK, executed)
    transitions.set(NUM_EXECUTED, executed.sum(-1, keepdim=True))
    return transitions[valid_decisions(executed).squeeze(-1)]


def _check_trajectories(
    observation: TensorDictBase,
    action: TensorDictBase,
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
) -> None:
    check_mask(terminated, "terminated")
    check_mask(truncated, "truncated")
    check_same_shape(reward=reward, terminated=terminated, truncated=truncated)
    if terminated.ndim != 3:
        raise ValueError(f"terminated has shape {tuple(terminated.shape)}, expected [B, T, H]")
    trajectories, decisions, _ = terminated.shape
    if tuple(action.batch_size) != (trajectories, decisions):
        raise ValueError(
            f"action has batch {tuple(action.batch_size)}, expected [B, T] = "
            f"{(trajectories, decisions)} from the flags"
        )
    if tuple(observation.batch_size) != (trajectories, decisions + 1):
        raise ValueError(
            f"observation has batch {tuple(observation.batch_size)}, expected [B, T + 1] = "
            f"{(trajectories, decisions + 1)}; append the observation after the last decision"
        )
