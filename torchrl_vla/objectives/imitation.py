"""Losses that imitate demonstrated chunks.

The losses are elementwise over the numbers of a chunk; :func:`chunk_mean` is the only way to reduce
them, because a chunk that reaches past the end of its demonstration holds padding, which must be
missing from the numerator AND the denominator.

Legend: ``*`` batch dims, ``H`` steps per chunk, ``A`` action dims, ``V`` bins.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_vla.objectives.action_log_prob import window_log_probs
from torchrl_vla.objectives.masks import action_mask
from torchrl_vla.objectives.reduction import check_same_shape, masked_mean


def chunk_mean(loss: Tensor, real: Tensor | None, total: Tensor | float | None = None) -> Tensor:
    """Mean over the numbers of the steps that are real, in the global batch.

    Args:
        loss: ``[*, H, A]``.
        real: ``[*, H]`` bool, steps that are not padding; may be ``None`` only if ``H`` is 1.
        total: real numbers (steps times ``A``) of the global batch; ``None``: of this one. See
            :func:`~torchrl_vla.objectives.reduction.masked_mean`.

    Returns:
        Scalar; 0 with zero gradient if all is padding.

    Raises:
        ValueError: the mask is missing while ``H`` > 1, or shapes do not belong together.
        TypeError: the mask is not bool.
    """
    horizon, action_dim = loss.shape[-2:]
    if real is None:
        if horizon > 1:
            raise ValueError(
                f"the batch has chunks of {horizon} steps but no mask of the real ones; without "
                "it the padding after the last step of a demonstration is imitated too. Pass "
                "executed_mask, or ~action_is_pad"
            )
        real = torch.ones(loss.shape[:-1], dtype=torch.bool, device=loss.device)
    return masked_mean(loss, action_mask(real, action_dim), total)


def token_cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of the demonstrated bins.

    Args:
        logits: ``[*, H, A, V]`` of the action window.
        tokens: ``[*, H, A]`` int64, 0..V-1.

    Returns:
        ``[*, H, A]`` float32, nats.

    Raises:
        ValueError: shapes do not belong together, or a token is outside the window.
        TypeError: ``tokens`` is not int64.
    """
    return -window_log_probs(logits, tokens)[0]


def soft_labels(action: Tensor, centres: Tensor, sigma: float) -> Tensor:
    """Spread a number over its neighbouring bins, as a Gaussian over the bin centres.

    Args:
        action: ``[*, H, A]`` in [-1, 1].
        centres: ``[V]`` bin centres, in action units.
        sigma: width in action units, above 0; small values approach the nearest bin alone.

    Returns:
        ``[*, H, A, V]`` float32, sums to 1 over ``V``.

    Raises:
        ValueError: ``sigma`` not positive, or ``centres`` not one-dimensional.
    """
    if sigma <= 0:
        raise ValueError(f"sigma is {sigma}; it must be positive (hard labels: cross-entropy)")
    if centres.ndim != 1:
        raise ValueError(f"centres have shape {tuple(centres.shape)}, expected [V]")
    distance = (action.float().unsqueeze(-1) - centres.float()) / sigma
    return torch.softmax(-distance.square() / 2, dim=-1)


def soft_token_cross_entropy(
    logits: Tensor, action: Tensor, centres: Tensor, sigma: float
) -> Tensor:
    """Cross-entropy against :func:`soft_labels`: a near miss costs less than a far one.

    Args:
        logits: ``[*, H, A, V]`` of the action window.
        action: ``[*, H, A]`` in [-1, 1].
        centres: ``[V]``, in action units, in the order of the logits.
        sigma: in action units, above 0.

    Returns:
        ``[*, H, A]`` float32, nats; its minimum is the entropy of the labels, not 0.

    Raises:
        ValueError: shapes do not belong together, or ``sigma`` not positive.
    """
    labels = soft_labels(action, centres, sigma)
    check_same_shape(logits=logits, labels=labels)
    return -(labels * torch.log_softmax(logits.float(), dim=-1)).sum(-1)


def gaussian_nll(action: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Negative log-density of a diagonal Gaussian, constants included.

    Args:
        action: ``[*, H, A]``.
        mean: ``[*, H, A]``.
        std: ``[*, H, A]``, above 0 (the head's business to bound).

    Returns:
        ``[*, H, A]``, nats.

    Raises:
        ValueError: shapes differ.
    """
    check_same_shape(action=action, mean=mean, std=std)
    return ((action - mean) / std).square() / 2 + std.log() + math.log(2 * math.pi) / 2


def l1(action: Tensor, prediction: Tensor) -> Tensor:
    """Absolute error.

    Args:
        action: ``[*, H, A]``.
        prediction: ``[*, H, A]``.

    Returns:
        ``[*, H, A]``, action units.

    Raises:
        ValueError: shapes differ.
    """
    check_same_shape(action=action, prediction=prediction)
    return (action - prediction).abs()
