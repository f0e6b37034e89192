"""One number from many: metrics of all ranks, and the interval of a success rate."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from torchrl_vla.metrics.log import as_number


def reduce_metrics(
    values: Mapping[str, float | Tensor],
    all_reduce_sum: Callable[[Tensor], Tensor],
    world_size: int,
    rank: int | None = None,
) -> dict[str, float]:
    """Combine metrics of all ranks; every rank must call it with the same names.

    Ratios are best sent as a ``_sum`` and a ``_count`` and divided after: a mean of per-rank means
    weighs a rank with one episode like a rank with fifty. A NaN on one rank makes that metric NaN.

    Args:
        values: numbers of this rank by name.
        all_reduce_sum: returns the sum over ranks of a float64 CPU tensor ``[n]``.
        world_size: number of ranks, at least 1.
        rank: 0..world_size-1; needed for ``_max`` names only, which travel one slot per rank.

    Returns:
        The same names: ``_sum`` and ``_count`` added, ``_max`` the largest, the rest averaged.

    Raises:
        ValueError: ``world_size`` below 1, names that differ between ranks (raised on every rank,
            so none is left waiting), or a ``_max`` name without a ``rank`` in range.
        TypeError: a value is not a number.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    names = sorted(values)
    plain = {name: float(as_number(name, values[name])) for name in names}
    if world_size == 1:
        return plain
    maxima = [name for name in names if name.endswith("_max")]
    if maxima and (rank is None or not 0 <= rank < world_size):
        raise ValueError(f"{maxima} need rank=0..{world_size - 1}, got rank={rank}")
    _check_names(names, all_reduce_sum, world_size)
    added = [name for name in names if name not in maxima]
    slots = torch.zeros(world_size, len(maxima), dtype=torch.float64)
    if maxima:
        slots[rank] = torch.tensor([plain[name] for name in maxima], dtype=torch.float64)
    sums = torch.tensor([plain[name] for name in added], dtype=torch.float64)
    total = all_reduce_sum(torch.cat([sums, slots.flatten()]))
    out = dict(zip(added, total[: len(added)].tolist(), strict=True))
    for name in added:
        if not name.endswith(("_sum", "_count")):
            out[name] /= world_size
    if maxima:
        largest = total[len(added) :].view(world_size, -1).amax(0)
        out |= zip(maxima, largest.tolist(), strict=True)
    return {name: out[name] for name in names}


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a success probability.

    With ``p = successes / n`` and ``z`` the normal quantile of ``(1 + confidence) / 2``::

        (p + z^2/2n  -+  z * sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2/n)

    Unlike the usual ``p -+ z * sqrt(p (1 - p) / n)`` it does not collapse at 0/n and n/n.
    It assumes independent trials.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    JASA 22 (1927) 209-212; without continuity correction.

    Args:
        successes: 0..n.
        n: number of trials, at least 1.
        confidence: in (0, 1).

    Returns:
        ``(low, high)`` in [0, 1]; ``low`` is exactly 0 at 0/n, ``high`` exactly 1 at n/n.

    Raises:
        ValueError: an argument outside its range.
    """
    if n < 1:
        raise ValueError(f"n={n}: an interval needs at least 1 trial; evaluate first")
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} must lie in 0..n={n}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence={confidence} must lie in (0, 1), for example 0.95")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == n else (centre + half) / scale
    return low, high


def _check_names(
    names: Sequence[str], all_reduce_sum: Callable[[Tensor], Tensor], world_size: int
) -> None:
    """Collectives match by position: differing names would mix metrics without a word."""
    own = zlib.crc32("\n".join(names).encode()) % 2**16
    sent = torch.tensor([own, own * own], dtype=torch.float64)
    total, squares = all_reduce_sum(sent).tolist()
    # Equal on every rank if and only if the spread is zero (exact in float64 to 1,448 ranks), so
    # every rank comes to the same answer and none is left in the next collective.
    if world_size * squares != total * total:
        raise ValueError(f"ranks disagree on the metric names; this one has {list(names)}")
