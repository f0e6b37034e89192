"""Policy-gradient pieces that TorchRL's ``ClipPPOLoss`` lacks, as pure elementwise functions.

One code path serves both levels of importance ratio: per number of the chunk (``[*, H, A]``) and
per chunk (``[*, 1]``, executed numbers only). Losses come out elementwise; reducing them over the
global batch is :mod:`torchrl_vla.objectives.reduction`'s business.

Legend: ``*`` batch dims, ``N`` envs, ``T`` decisions, ``H`` steps per chunk, ``A`` action dims.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torchrl.objectives.value.functional import vtrace_advantage_estimate

from torchrl_vla.objectives.advantages import check_rollout, cut_at_invalid
from torchrl_vla.objectives.reduction import (
    check_mask,
    check_same_shape,
    count,
    global_sum,
    masked_mean,
    masked_sum,
    per_number,
)


def log_ratio(
    new: Tensor, old: Tensor, mask: Tensor, level: Literal["token", "chunk"] = "token"
) -> Tensor:
    """Log of the importance ratio of the stored action.

    Args:
        new: ``[*, H, A]`` log-prob under the policy being trained.
        old: ``[*, H, A]`` float32 log-prob under the behaviour policy.
        mask: ``[*, H, A]`` bool, executed numbers.
        level: ``"token"``: per number; ``"chunk"``: summed over the executed numbers.

    Returns:
        ``[*, H, A]`` (0 where masked) or ``[*, 1]`` float32.

    Raises:
        ValueError: shapes differ, or another level.
        TypeError: ``mask`` is not bool, or ``old`` was stored below float32 (a bfloat16 log-prob is
            off by more than a clipping range).
    """
    check_same_shape(new=new, old=old, mask=mask)
    check_mask(mask)
    if old.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"old log-probs have dtype {old.dtype}; store them in float32")
    difference = torch.where(mask, new.to(old.dtype) - old, 0)
    if level == "token":
        return difference
    if level == "chunk":
        return difference.sum((-2, -1)).unsqueeze(-1)
    raise ValueError(f"level is {level!r}; expected 'token' or 'chunk'")


def clipped_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's clipped loss, elementwise, to be minimised.

    With r = exp(log_ratio), ``-min(r A, clip(r, 1 - low, 1 + high) A)``; with ``dual_clip`` c, the
    loss of a negative advantage is at most ``-c A``. Written as a bound on log r that depends on
    the sign of A: r is bounded above for A >= 0 and below for A < 0, so a huge ratio on the
    clipped side neither overflows nor turns the gradient into NaN.

    Args:
        log_ratio: ``[*, H, A]`` or ``[*, 1]``.
        advantage: ``[*, 1]``, or the shape of ``log_ratio``.
        clip_low: in (0, 1].
        clip_high: above 0; larger than ``clip_low`` is DAPO's "clip higher".
        dual_clip: above 1, or ``None``.

    Returns:
        The shape of ``log_ratio``.

    Raises:
        ValueError: shapes do not belong together, or a bound is out of range.

    Source: Schulman et al., arXiv:1707.06347, eq. 7; dual clip: Ye et al., arXiv:1912.09729, eq. 5.
    """
    if not 0.0 < clip_low <= 1.0 or clip_high <= 0.0:
        raise ValueError(f"clip_low={clip_low} must lie in (0, 1], clip_high={clip_high} above 0")
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip is {dual_clip}; it must exceed 1, or be None")
    advantage = per_number(advantage, log_ratio)
    floor = -math.inf if clip_low == 1.0 else math.log1p(-clip_low)
    ceiling = math.inf if dual_clip is None else math.log(dual_clip)
    bounded = torch.where(
        advantage >= 0,
        log_ratio.clamp(max=math.log1p(clip_high)),
        # A NaN advantage is clipped on no side: a bound would turn its gradient into a silent zero.
        torch.where(advantage < 0, log_ratio.clamp(min=floor, max=ceiling), log_ratio),
    )
    return -advantage * bounded.exp()


def value_loss(
    value: Tensor,
    target: Tensor,
    old_value: Tensor | None = None,
    clip: float | None = None,
    kind: Literal["smooth_l1", "l2"] = "smooth_l1",
) -> Tensor:
    """Elementwise loss of a value estimate, optionally clipped around the old estimate.

    Args:
        value: ``[*, 1]``.
        target: ``[*, 1]``, treated as constant.
        old_value: ``[*, 1]`` estimate at collection time; needed with ``clip``.
        clip: above 0, in units of the return; ``None``: no clipping.
        kind: ``"smooth_l1"`` (beta 1) or ``"l2"`` (squared error, no factor 1/2, as TorchRL).

    Returns:
        ``[*, 1]``; with clipping the larger of both losses.

    Raises:
        ValueError: shapes differ, unknown kind, ``clip`` not positive, or only one of ``old_value``
            and ``clip`` given.
    """
    check_same_shape(value=value, target=target)
    if (clip is None) != (old_value is None):
        raise ValueError("value clipping needs both clip and old_value; give both or neither")
    if kind not in ("smooth_l1", "l2"):
        raise ValueError(f"kind is {kind!r}; expected 'smooth_l1' or 'l2'")
    distance = F.smooth_l1_loss if kind == "smooth_l1" else F.mse_loss
    target = target.detach()
    loss = distance(value, target, reduction="none")
    if clip is None or old_value is None:
        return loss
    if clip <= 0:
        raise ValueError(f"clip is {clip}; it must be positive, or None")
    check_same_shape(value=value, old_value=old_value)
    old_value = old_value.detach()
    near = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(loss, distance(near, target, reduction="none"))


def kl_estimate(
    log_prob: Tensor, ref_log_prob: Tensor, kind: Literal["k1", "k2", "k3"] = "k3"
) -> Tensor:
    """Elementwise estimate of KL(policy || reference) from the policy's own samples.

    With d = log_prob - ref_log_prob: k1 = d (unbiased, noisy, may be negative), k2 = d²/2 (biased,
    its gradient is the right one), k3 = exp(-d) - 1 + d (unbiased, never negative).

    Args:
        log_prob: any shape; the gradient flows through it.
        ref_log_prob: the same shape, treated as constant.
        kind: which estimator.

    Returns:
        The same shape, nats.

    Raises:
        ValueError: shapes differ, or unknown kind.

    Source: J. Schulman, "Approximating KL Divergence", 2020 (http://joschu.net/blog/kl-approx.html).
    """
    check_same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob)
    d = log_prob - ref_log_prob.detach()
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"kind is {kind!r}; expected 'k1', 'k2' or 'k3'")


def truncated_importance_weight(log_ratio: Tensor, cap: float) -> Tensor:
    """``min(exp(log_ratio), cap)`` without gradient: a weight for the loss of stale data.

    Args:
        log_ratio: any shape, log of (wanted policy / behaviour policy).
        cap: above 0.

    Returns:
        The same shape, in (0, cap].

    Raises:
        ValueError: ``cap`` not positive.

    Source: Ionides, "Truncated importance sampling", JCGS 2008.
    """
    if cap <= 0:
        raise ValueError(f"cap is {cap}; it must be positive")
    return log_ratio.detach().clamp(max=math.log(cap)).exp()


def vtrace(
    log_prob: Tensor,
    behaviour_log_prob: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    done: Tensor,
    terminated: Tensor,
    discount: Tensor | float,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """V-trace advantages and value targets from the log-probs of the STORED actions.

    Args:
        log_prob: ``[N, T, 1]``, policy being trained, of the stored action (executed numbers).
        behaviour_log_prob: ``[N, T, 1]``, stored with the action.
        reward: ``[N, T, 1]``.
        value: ``[N, T, 1]``.
        next_value: ``[N, T, 1]``, of the final observation where done.
        done: ``[N, T, 1]`` bool.
        terminated: ``[N, T, 1]`` bool.
        discount: ``[N, T, 1]`` per decision, or one number.
        rho_clip: cap of the weight of the temporal difference.
        c_clip: cap of the weight that carries corrections back in time.
        valid: ``[N, T, 1]`` bool; ``None``: all. Results are 0 elsewhere.

    Returns:
        ``(advantage, value_target)``, ``[N, T, 1]``, without gradient.

    Raises:
        ValueError: shapes differ, caps not positive, or terminated without done.

    Source: Espeholt et al., arXiv:1802.01561, eq. 1 and section 4.2.
    """
    check_same_shape(log_prob=log_prob, behaviour_log_prob=behaviour_log_prob, reward=reward)
    check_rollout(reward, value, next_value, done, terminated, discount, valid)
    if rho_clip <= 0 or c_clip <= 0:
        raise ValueError(f"rho_clip={rho_clip} and c_clip={c_clip} must be positive")
    tensors = (log_prob, behaviour_log_prob, reward, value, next_value)
    with torch.no_grad():
        if valid is not None:
            tensors = tuple(torch.where(valid, x, 0) for x in tensors)
            done = cut_at_invalid(done, valid)
        log_prob, behaviour_log_prob, reward, value, next_value = tensors
        advantage, target = vtrace_advantage_estimate(
            discount, log_prob, behaviour_log_prob, value, next_value, reward, done, terminated,
            rho_clip, c_clip,
        )  # fmt: skip
        if valid is not None:
            advantage, target = (torch.where(valid, x, 0) for x in (advantage, target))
    return advantage, target


def explained_variance(value: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """``1 - Var(target - value) / Var(target)`` over the valid entries of all ranks; collective.

    Args:
        value: ``[*, 1]``.
        target: ``[*, 1]``.
        valid: ``[*, 1]`` bool.

    Returns:
        Float64 scalar without gradient, at most 1; NaN (undefined) if the target does not vary.

    Raises:
        ValueError: shapes differ.
    """
    check_same_shape(value=value, target=target, valid=valid)
    target, error = (x.detach().double() for x in (target, target - value))
    spread = _variance(target, valid)
    return torch.where(spread > 0, 1 - _variance(error, valid) / spread, torch.nan)


def clip_fraction(
    log_ratio: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    total: Tensor | float | None = None,
) -> Tensor:
    """Share of the counted ratios outside ``[1 - clip_low, 1 + clip_high]``, scalar in [0, 1].

    Args:
        log_ratio: any shape.
        mask: bool, the same shape.
        clip_low: in (0, 1]; 1 leaves out that side.
        clip_high: above 0; infinite leaves out that side.
        total: see :func:`~torchrl_vla.objectives.reduction.masked_mean`.

    Raises:
        ValueError: shapes differ.
    """
    ratio = log_ratio.detach().exp()
    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    return masked_mean(outside.float(), mask, total)


def approx_kl(log_ratio: Tensor, mask: Tensor, total: Tensor | float | None = None) -> Tensor:
    """KL(behaviour || policy) from the behaviour's samples: mean of ``r - 1 - log r``, in nats.

    Args:
        log_ratio: any shape, log of (policy / behaviour).
        mask: bool, the same shape.
        total: see :func:`~torchrl_vla.objectives.reduction.masked_mean`.

    Returns:
        Scalar without gradient, never negative; 0 if nothing is counted.

    Raises:
        ValueError: shapes differ.
    """
    d = log_ratio.detach()
    return masked_mean(torch.expm1(d) - d, mask, total)


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """``(sum w)² / (n sum w²)`` of the weights w = exp(log_ratio), as a share of the n counted.

    Args:
        log_ratio: any shape.
        mask: bool, the same shape.

    Returns:
        Scalar without gradient in (0, 1]; 1: all weights equal; NaN (undefined) if nothing counts.

    Raises:
        ValueError: shapes differ.
    """
    check_same_shape(log_ratio=log_ratio, mask=mask)
    d = torch.where(mask, log_ratio.detach(), -torch.inf).flatten()
    return (2 * d.logsumexp(0) - (2 * d).logsumexp(0)).exp() / count(mask)


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    total, number = global_sum(torch.stack([masked_sum(x, mask), mask.sum().double()]))
    number = number.clamp_min(1)
    return global_sum(masked_sum((x - total / number).square(), mask)) / number
