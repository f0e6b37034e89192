"""Memory for large results, used again when nobody looks at it any more."""

from __future__ import annotations

import mmap
import sys
import threading

import numpy as np
import torch
from torch import Tensor

from torchrl_vla.storage.layout import Column


def _aligned(nbytes: int) -> np.ndarray:
    """Return memory at the start of a page: rows copy up to four times slower to an odd address."""
    memory = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    start = -memory.ctypes.data % mmap.PAGESIZE
    return memory[start : start + nbytes]


class Outputs:
    """Hands out tensors whose memory is reused once no tensor refers to it.

    Fresh memory of hundreds of megabytes costs more page faults than the copy itself. A tensor made
    from a NumPy array keeps the array alive, and so does every view of it: the array's reference
    count tells whether the memory is free.
    """

    _KEPT = 4

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, Column], list[np.ndarray]] = {}
        self._lock = threading.Lock()  # prefetching threads take from here too

    def take(self, rows: int, column: Column) -> Tensor:
        """Return uninitialised ``[rows, *shape]`` that nobody else holds."""
        with self._lock:
            array = self._free(rows, column)
            return torch.from_numpy(array).view(column.dtype).view(rows, *column.shape)

    def _free(self, rows: int, column: Column) -> np.ndarray:
        arrays = self._arrays.setdefault((rows, column), [])
        for array in arrays:
            if sys.getrefcount(array) == 3:  # the list, this loop, the question itself
                return array
        array = _aligned(rows * column.nbytes)
        if len(arrays) < self._KEPT:
            arrays.append(array)
        while len(self._arrays) > 2 * self._KEPT:
            del self._arrays[next(iter(self._arrays))]
        return array
