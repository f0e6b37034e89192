"""Memory that a rank and its workers map together, without a name and so without leftovers.

A file in /dev/shm, a semaphore or a socket of a killed process stays behind. A memfd lives as long
as a process has it open: the kernel frees it when the last one is gone, however it went.

:class:`Tensors` says how a TensorDict lies in such memory, so that the other side can map it
without a copy.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

_ALIGN = 64
Key = tuple[str, ...]


class SharedMemory:
    """Zeroed bytes that grow; give it to a child process as an argument (spawn).

    Args:
        name: shown in ``/proc/PID/fd``.
        size: bytes at first.
    """

    def __init__(self, name: str, size: int = 0) -> None:
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self._bytes = np.zeros(0, np.uint8)
        self.reserve(size)

    def reserve(self, size: int) -> None:
        """Grow to at least ``size`` bytes; what is there stays."""
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)

    def bytes(self) -> np.ndarray:
        """Return everything as writable uint8 ``[size]``; views of it stay valid."""
        size = os.fstat(self._descriptor).st_size
        if size != len(self._bytes):
            self._bytes = np.frombuffer(mmap.mmap(self._descriptor, size), np.uint8)
        return self._bytes

    def close(self) -> None:
        """Give up this process's descriptor; views stay valid."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __getstate__(self) -> dict[str, Any]:
        return {"descriptor": reduction.DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._descriptor = state["descriptor"].detach()
        self._bytes = np.zeros(0, np.uint8)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)


@dataclass(frozen=True)
class Tensors:
    """How the leaves of a TensorDict lie one behind the other."""

    batch_size: tuple[int, ...]
    leaves: tuple[tuple[Key, torch.dtype, tuple[int, ...], int], ...]
    """Key, dtype, shape and offset in bytes of each leaf."""
    size: int
    """Bytes in all."""

    @classmethod
    def of(cls, tensordict: TensorDictBase) -> Tensors:
        """Describe the leaves of ``tensordict``."""
        leaves, offset = [], 0
        for key, leaf in sorted_leaves(tensordict):
            leaves.append((key, leaf.dtype, tuple(leaf.shape), offset))
            offset += -(-leaf.numel() * leaf.element_size() // _ALIGN) * _ALIGN
        return cls(tuple(tensordict.batch_size), tuple(leaves), offset)

    def views(self, memory: np.ndarray, start: int = 0) -> TensorDict:
        """Return the leaves as views of ``memory`` from byte ``start`` on."""
        out = TensorDict({}, batch_size=self.batch_size)
        for key, dtype, shape, offset in self.leaves:
            size = math.prod(shape) * dtype.itemsize
            raw = torch.from_numpy(memory[start + offset : start + offset + size])
            out.set(key, raw.view(dtype).view(shape))
        return out


def sorted_leaves(tensordict: TensorDictBase) -> Sequence[tuple[Key, torch.Tensor]]:
    """Return the leaves with their keys as tuples, in the keys' order."""
    found = [
        (key if isinstance(key, tuple) else (key,), leaf)
        for key, leaf in tensordict.items(True, True)
    ]
    return sorted(found, key=lambda pair: pair[0])
