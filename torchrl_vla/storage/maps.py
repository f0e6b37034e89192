"""The files of a replay as memory that all processes share."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from torchrl_vla.storage.layout import HEADER, Layout, Sizes


def map_files(folder: Path, layout: Layout, sizes: Sizes) -> dict[str, Tensor]:
    """Return every file of a replay as a tensor shared with all other processes that map it."""
    shapes = {c.name: ((sizes.places, *c.shape), c.dtype) for c in layout.stored}
    shapes["header"] = ((sizes.lanes, len(HEADER)), torch.int64)
    if layout.packed:
        shapes["pack"] = ((sizes.lanes, layout.packed_bytes(sizes.slots)), torch.uint8)
    return {
        name: torch.from_file(
            str(folder / f"{name}.bin"), shared=True, size=math.prod(shape), dtype=dtype
        ).view(shape)
        for name, (shape, dtype) in shapes.items()
    }


def unmap_pages(mapped: Tensor) -> None:
    """Give back the memory that this process has touched of a mapped file; the file keeps it.

    Resident memory counts such pages once per process, so without it the processes of a run seem to
    grow by everything they ever wrote or read.

    Args:
        mapped: all of a tensor of :func:`map_files`.

    Raises:
        OSError: ``madvise`` refused.
    """
    dont_need = 4  # MADV_DONTNEED; of a shared mapping only the mapping goes
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes)
    if libc.madvise(address, size, dont_need):
        raise OSError(ctypes.get_errno(), "madvise failed on a mapped file of the replay")
