"""The random states of a process, as plain JSON and tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_state() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Random states of this process: (plain JSON of python and numpy, uint8 tensors of torch).

    Save them as ``"rank_json"`` and ``"rank_tensors"`` entries.
    """
    version, words, gauss = random.getstate()
    _, keys, pos, has_gauss, cached = np.random.get_state()
    plain = {
        "python": [version, list(words), gauss],
        "numpy": [keys.tolist(), int(pos), int(has_gauss), float(cached)],
    }
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return plain, tensors


def set_rng_state(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Put back what :func:`rng_state` returned.

    Raises:
        RuntimeError: a GPU's state was saved and this process has none.
    """
    if "cuda" in tensors and not torch.cuda.is_available():
        raise RuntimeError(
            "the random state of a GPU was saved and torch sees no GPU: drop its 'cuda' entry to "
            "go on with a CPU whose random numbers differ"
        )
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    keys, pos, has_gauss, cached = plain["numpy"]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), pos, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
