"""Sums and means over the masked entries of the GLOBAL batch.

A mean of micro-batch means weighs an entry by the company it keeps. Here a loss is always a sum
over the counted entries divided by their number over all micro-batches and all ranks, so that
splitting the batch differently, or over more ranks, changes nothing but rounding.

Nothing broadcasts here: shapes must be equal. The one documented broadcast in this room is
:func:`per_number`, which spreads a decision scalar over the numbers of its chunk.

Legend: ``*`` batch dims, ``H`` steps per chunk, ``A`` action dims.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def check_same_shape(**tensors: Tensor) -> None:
    """Refuse tensors that would only combine by broadcasting.

    Args:
        tensors: by the name that the message shall use.

    Raises:
        ValueError: two shapes differ (``[B]`` beside ``[B, 1]`` would make a ``[B, B]`` matrix).
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(
            f"shapes differ: {shapes}; nothing broadcasts here, so unsqueeze or squeeze the odd "
            "one (decision scalars are [*, 1]; spread them over a chunk with per_number)"
        )


def check_mask(mask: Tensor, name: str = "mask") -> None:
    """Refuse a mask that is not boolean.

    Raises:
        TypeError: the dtype is not bool (0/1 integers would index instead of mask).
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} has dtype {mask.dtype}, not torch.bool; compare it first (x > 0)")


def per_number(scalar: Tensor, like: Tensor) -> Tensor:
    """Spread one number per decision over the numbers of its chunk: the only broadcast here.

    Args:
        scalar: ``[*, 1]``, for instance an advantage.
        like: ``[*, H, A]`` (per number) or ``[*, 1]`` (per chunk; returned unchanged).

    Returns:
        ``scalar`` expanded (a view) to the shape of ``like``.

    Raises:
        ValueError: the batch dims differ, or ``scalar`` does not end in 1.
    """
    if scalar.shape == like.shape:
        return scalar
    if scalar.ndim and scalar.shape == (*like.shape[:-2], 1):
        return scalar.unsqueeze(-1).expand_as(like)
    raise ValueError(
        f"a decision scalar of shape {tuple(scalar.shape)} does not belong to numbers of shape "
        f"{tuple(like.shape)}; expected {(*like.shape[:-2], 1)} or the same shape"
    )


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``x`` where ``mask`` is set.

    Args:
        x: any shape; half precision is summed in float32.
        mask: bool, the same shape.

    Returns:
        Scalar. A masked entry adds nothing even if it is NaN, and gets gradient 0. (A NaN that
        arose *before* ``x`` still poisons its own backward: mask the inputs of a log or a ratio.)

    Raises:
        ValueError: shapes differ.
        TypeError: ``mask`` is not bool.
    """
    check_same_shape(x=x, mask=mask)
    check_mask(mask)
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return torch.where(mask, x, 0).sum()


def count(mask: Tensor) -> Tensor:
    """Number of set entries of a bool mask, int64 scalar on the mask's device.

    Raises:
        TypeError: ``mask`` is not bool.
    """
    check_mask(mask)
    return mask.sum()


def masked_mean(x: Tensor, mask: Tensor, total: Tensor | float | None = None) -> Tensor:
    """Share of this micro-batch in the mean over the global batch.

    ``masked_sum(x, mask) / total``: the shares of all micro-batches and ranks ADD UP to the mean.
    FSDP and DDP average gradients over ranks, so a learner on ``W`` ranks multiplies by ``W``.

    Args:
        x: any shape.
        mask: bool, the same shape.
        total: number of counted entries of the global batch (:func:`global_count`), scalar;
            ``None`` takes this mask as the whole batch.

    Returns:
        Scalar; 0 with zero gradient if nothing is counted. ``total = 0`` beside counted entries
        is the caller's error and gives inf rather than a plausible number.

    Raises:
        ValueError: shapes differ.
        TypeError: ``mask`` is not bool.
    """
    local = count(mask)
    total = local if total is None else torch.as_tensor(total, device=local.device)
    return masked_sum(x, mask) / torch.where(local > 0, total, total.clamp_min(1))


def global_sum(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum of ``x`` over the ranks of ``group``, elementwise; ``x`` itself in a single process.

    No gradient flows through it. Every rank of the group must call it.

    Args:
        x: any shape and dtype, equal on all ranks.
        group: process group, ``None`` for the default one.
    """
    if not dist.is_initialized():
        return x.detach()
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def global_max(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Largest ``x`` over the ranks of ``group``, elementwise; ``x`` itself in a single process.

    Every rank of the group must call it.

    Args:
        x: any shape and dtype, equal on all ranks.
        group: process group, ``None`` for the default one.
    """
    if not dist.is_initialized():
        return x.detach()
    largest = x.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def global_count(mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Number of set entries over all ranks, int64 scalar. Every rank of the group must call it.

    Raises:
        TypeError: ``mask`` is not bool.
    """
    return global_sum(count(mask), group)
