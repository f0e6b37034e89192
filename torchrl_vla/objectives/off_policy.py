"""What Q-learning over action chunks needs beside TorchRL's losses.

One decision is one step: its discount is ``gamma ** num_executed`` and its action is the chunk with
the never-executed steps zeroed, so that they cannot reach a Q value.

Legend: ``*`` batch dims, ``N`` envs, ``T`` decisions, ``H`` steps per chunk, ``A`` action dims,
``E`` ensemble members, ``S`` sampled actions.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrl_vla.objectives.masks import action_mask
from torchrl_vla.objectives.reduction import check_mask, check_same_shape


def td_target(
    reward: Tensor,
    next_q: Tensor,
    terminated: Tensor,
    discount: Tensor,
    next_log_prob: Tensor | None = None,
    alpha: Tensor | float | None = None,
    bounds: tuple[float, float] | None = None,
) -> Tensor:
    """``r + discount (1 - terminated) (Q' - alpha log pi')``.

    A truncated decision is bootstrapped (its next observation is the final one of the episode), a
    terminated one never; done is not asked for, so it cannot be used by mistake.

    Args:
        reward: ``[*, 1]``.
        next_q: ``[*, 1]``, reduced over the target ensemble.
        terminated: ``[*, 1]`` bool.
        discount: ``[*, 1]``, :func:`~torchrl_vla.objectives.masks.decision_discount`.
        next_log_prob: ``[*, 1]`` of the chunk sampled at the next observation; together with
            ``alpha`` it switches the entropy term on, ``None`` leaves it out of the backup.
        alpha: scalar, not negative.
        bounds: known range of the return; the target is clamped to it. ``None``: unbounded.

    Returns:
        ``[*, 1]`` without gradient; a terminated decision's ``next_q`` may be NaN.

    Raises:
        ValueError: shapes differ, only one of ``next_log_prob`` and ``alpha`` given, or empty
            bounds.
        TypeError: ``terminated`` is not bool.

    Source: Haarnoja et al., arXiv:1812.05905, eq. 2-3.
    """
    check_same_shape(reward=reward, next_q=next_q, terminated=terminated, discount=discount)
    check_mask(terminated, "terminated")
    if (next_log_prob is None) != (alpha is None):
        raise ValueError("the entropy term needs next_log_prob and alpha; give both or neither")
    soft = next_q.detach()
    if next_log_prob is not None and alpha is not None:
        check_same_shape(next_q=next_q, next_log_prob=next_log_prob)
        alpha = alpha.detach() if isinstance(alpha, Tensor) else alpha
        soft = soft - alpha * next_log_prob.detach()
    target = reward + discount * torch.where(terminated, 0, soft)
    if bounds is None:
        return target
    if bounds[0] >= bounds[1]:
        raise ValueError(f"bounds {bounds} are empty; give (low, high) with low < high")
    return target.clamp(*bounds)


def reduce_ensemble(
    q: Tensor,
    kind: Literal["min", "mean", "subset"] = "min",
    subset: int = 2,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One value from the members of a Q ensemble.

    Args:
        q: ``[E, *, 1]``.
        kind: ``"min"`` or ``"mean"`` over all members, or ``"subset"``: the minimum over
            ``subset`` members drawn without replacement, the same for the whole batch (REDQ).
        subset: 1..E.
        generator: on the device of ``q``, for a reproducible draw.

    Returns:
        ``[*, 1]``.

    Raises:
        ValueError: unknown kind, or ``subset`` outside 1..E.

    Source: Chen et al., arXiv:2101.05982, algorithm 1.
    """
    if kind == "min":
        return q.amin(0)
    if kind == "mean":
        return q.mean(0)
    if kind != "subset":
        raise ValueError(f"kind is {kind!r}; expected 'min', 'mean' or 'subset'")
    members = q.shape[0]
    if not 1 <= subset <= members:
        raise ValueError(f"subset is {subset}; the ensemble has 1..{members} members to draw")
    drawn = torch.randperm(members, generator=generator, device=q.device)[:subset]
    return q[drawn].amin(0)


class Alpha(nn.Module):
    """The learned entropy coefficient of SAC; ``forward()`` is its value, above 0.

    Args:
        initial: the value it really starts with, above 0.
        kind: ``"exp"`` (relative steps) or ``"softplus"`` (absolute steps once it is large).

    Raises:
        ValueError: ``initial`` not positive, or unknown kind.
    """

    def __init__(self, initial: float, kind: Literal["exp", "softplus"] = "exp") -> None:
        super().__init__()
        if not initial > 0:
            raise ValueError(f"initial is {initial}; alpha must be positive")
        if kind not in ("exp", "softplus"):
            raise ValueError(f"kind is {kind!r}; expected 'exp' or 'softplus'")
        # The inverse of softplus in the form that stays exact for small and large values.
        raw = math.log(initial) if kind == "exp" else initial + math.log(-math.expm1(-initial))
        self.kind = kind
        self.raw = nn.Parameter(torch.tensor(raw, dtype=torch.float32))

    def forward(self) -> Tensor:
        """Alpha, float32 scalar with gradient."""
        return self.raw.exp() if self.kind == "exp" else F.softplus(self.raw)

    def loss(self, log_prob: Tensor, target: Tensor) -> Tensor:
        """``-alpha (log_prob + target)``: alpha grows while the entropy is below its target.

        Args:
            log_prob: ``[*, 1]`` of a sampled chunk, treated as constant.
            target: ``[*, 1]``, :func:`target_entropy`.

        Returns:
            ``[*, 1]``.

        Raises:
            ValueError: shapes differ.

        Source: Haarnoja et al., arXiv:1812.05905, eq. 18.
        """
        check_same_shape(log_prob=log_prob, target=target)
        return -self() * (log_prob + target).detach()


def target_entropy(num_executed: Tensor, action_dim: int, per_number: float = -1.0) -> Tensor:
    """Target entropy of a decision: ``per_number`` for each number that its log-prob sums over.

    Args:
        num_executed: ``[*, 1]`` int64, steps counted in the log-prob (``H`` where it sums over the
            whole chunk).
        action_dim: ``A``.
        per_number: nats per number; -1 is SAC's ``-dim``.

    Returns:
        ``[*, 1]`` float32, for instance -56 for 8 steps of 7 numbers.
    """
    return num_executed.float() * (action_dim * per_number)


def n_step_return(
    reward: Tensor,
    done: Tensor,
    discount: Tensor,
    n: int,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum up to ``n`` decisions, never past the end of the episode or of the row.

    The Q target is ``ret + disc * Q(next observation of decision last)``, without the second term
    if decision ``last`` terminated: gather ``next`` at ``last`` along time.

    Args:
        reward: ``[N, T, 1]``.
        done: ``[N, T, 1]`` bool.
        discount: ``[N, T, 1]`` per decision.
        n: at least 1.
        valid: ``[N, T, 1]`` bool; ``None``: all. A sum stops before an invalid decision, and
            nothing sensible stands at an invalid one itself.

    Returns:
        ``(ret, disc, last)``, ``[N, T, 1]``: the discounted sum, the product of the discounts of
        the summed decisions, and the int64 time index of the last of them.

    Raises:
        ValueError: shapes differ, or ``n`` below 1.
    """
    check_same_shape(reward=reward, done=done, discount=discount)
    check_mask(done, "done")
    if n < 1:
        raise ValueError(f"n is {n}; an n-step return sums at least 1 decision")
    stop = done.clone()
    stop[..., -1, :] = True
    if valid is not None:
        check_same_shape(reward=reward, valid=valid)
        stop[..., :-1, :] |= ~valid[..., 1:, :]
    last = torch.arange(reward.shape[-2], device=reward.device).unsqueeze(-1).expand_as(reward)
    ret, disc, last = reward.clone(), discount.clone(), last.clone()
    for _ in range(n - 1):
        going = ~stop.gather(-2, last)
        last = last + going
        ret = ret + torch.where(going, disc * reward.gather(-2, last), 0)
        disc = torch.where(going, disc * discount.gather(-2, last), disc)
    return ret, disc, last


def mask_chunk(chunk: Tensor, executed_mask: Tensor) -> Tensor:
    """Zero the steps that were never executed, before a Q function sees the chunk.

    Args:
        chunk: ``[*, H, A]`` in [-1, 1].
        executed_mask: ``[*, H]`` bool.

    Returns:
        ``[*, H, A]``; neither value nor gradient passes at a masked step (NaN included).

    Raises:
        ValueError: shapes do not belong together.
        TypeError: the mask is not bool.
    """
    mask = action_mask(executed_mask, chunk.shape[-1])
    check_same_shape(chunk=chunk, expanded_mask=mask)
    return torch.where(mask, chunk, 0)


def cql_penalty(
    q_data: Tensor,
    q_sampled: Tensor,
    log_density: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Conservative term: soft maximum of Q over sampled actions, minus Q of the data.

    ``tau log mean_S exp(q_sampled / tau - log_density) - q_data``: with the log-density of the
    proposal that drew them the samples estimate the integral over all actions.

    Args:
        q_data: ``[*, 1]`` of the stored chunk.
        q_sampled: ``[S, *, 1]`` of sampled chunks (policy, next policy, uniform).
        log_density: ``[S, *, 1]`` of each sample under its own proposal, nats, treated as
            constant; ``None`` leaves the weights out.
        temperature: tau, above 0.

    Returns:
        ``[*, 1]``, to be multiplied by the CQL weight and added to the TD loss.

    Raises:
        ValueError: shapes do not belong together, or ``temperature`` not positive.

    Source: Kumar et al., arXiv:2006.04779, eq. 4 and appendix F.
    Differs: the mean over samples keeps the value independent of ``S``.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be positive")
    check_same_shape(q_data=q_data, one_of_q_sampled=q_sampled[0])
    scaled = q_sampled / temperature
    if log_density is not None:
        check_same_shape(q_sampled=q_sampled, log_density=log_density)
        scaled = scaled - log_density.detach()
    soft_max = temperature * (scaled.logsumexp(0) - math.log(q_sampled.shape[0]))
    return soft_max - q_data
