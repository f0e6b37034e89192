"""Statistics that LeRobot data sets carry: true ones, also where LeRobot's own are estimates.

Differs: quantiles are those of all frames (LeRobot merges episode quantiles by weighted mean), and
pictures are counted in full (LeRobot looks at a sample of frames).
"""

from __future__ import annotations

from typing import Any

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def describe(values: np.ndarray) -> dict[str, list[Any]]:
    """Statistics over frames.

    Args:
        values: ``[T]`` or ``[T, D]``.

    Returns:
        min, max, mean, std (of the population), count and quantiles, as lists of length ``D`` (1
        for ``[T]``; count has length 1). Extremes of integers stay integers.
    """
    table = values.reshape(len(values), -1)
    exact = table if np.issubdtype(table.dtype, np.integer) else table.astype(np.float64)
    reals = table.astype(np.float64)
    quantiles = np.quantile(reals, list(QUANTILES.values()), axis=0)
    return {
        "min": exact.min(axis=0).tolist(),
        "max": exact.max(axis=0).tolist(),
        "mean": reals.mean(axis=0).tolist(),
        "std": reals.std(axis=0).tolist(),
        "count": [len(values)],
    } | {name: row.tolist() for name, row in zip(QUANTILES, quantiles, strict=True)}


def histogram(images: np.ndarray) -> np.ndarray:
    """Count the values of pictures: uint8 ``[T, 3, h, w]`` to int64 ``[3, 256]``."""
    return np.stack([np.bincount(images[:, c].ravel(), minlength=256) for c in range(3)])


def describe_pixels(counts: np.ndarray, frames: int) -> dict[str, list[Any]]:
    """Statistics of pictures scaled to [0, 1], from the histogram of their values.

    Args:
        counts: int64 ``[3, 256]`` as :func:`histogram` returns it; sums of them are fine.
        frames: How many pictures were counted.

    Returns:
        As :func:`describe`, each of shape ``[3][1][1]``; count is ``[frames]``. A quantile is the
        smallest value that at least that share of the pixels does not exceed.
    """
    levels = np.arange(256) / 255
    share = counts / counts.sum(axis=1, keepdims=True)
    below = share.cumsum(axis=1)
    mean = share @ levels
    seen = counts > 0
    rows = {
        "min": levels[seen.argmax(axis=1)],
        "max": levels[255 - seen[:, ::-1].argmax(axis=1)],
        "mean": mean,
        "std": np.sqrt(np.maximum(share @ levels**2 - mean**2, 0.0)),
    }
    rows |= {name: levels[(below >= q - 1e-12).argmax(axis=1)] for name, q in QUANTILES.items()}
    return {name: row.reshape(3, 1, 1).tolist() for name, row in rows.items()} | {"count": [frames]}
