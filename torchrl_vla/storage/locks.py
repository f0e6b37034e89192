"""Who may write a lane: one process at a time, until it ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrl_vla.storage.lane import PID, Rings
from torchrl_vla.storage.layout import lock_path

DYING_SECONDS = 10.0
"""How long a writer that was killed may still hold its lock: until its memory is given back."""


def claim(folder: Path, rings: Rings, wanted: int | None = None) -> tuple[int, int]:
    """Take a lane that no living process writes; returns it and the descriptor of its lock.

    The kernel gives the lock back when the process ends, however it ends.

    Args:
        folder: of the replay.
        rings: its files.
        wanted: this lane and no other; any free one if ``None``.

    Raises:
        RuntimeError: every lane (or the wanted one) has a living writer.
    """
    for lane in range(rings.sizes.lanes) if wanted is None else (wanted,):
        lock = os.open(lock_path(folder, lane), os.O_RDWR)
        if not _locked(lock):
            os.close(lock)
            continue
        rings.header[lane, PID] = os.getpid()
        return lane, lock
    if wanted is not None:
        raise RuntimeError(
            f"lane {wanted} of {folder} is written by process {int(rings.header[wanted, PID])}, "
            "which is alive; end it first"
        )
    raise RuntimeError(
        f"all {rings.sizes.lanes} lanes of {folder} have a living writer (pids "
        f"{rings.header[:, PID].tolist()}); make the replay with one lane per writing process"
    )


@contextmanager
def nobody_writing(folder: Path, rings: Rings) -> Iterator[None]:
    """Hold the locks of all lanes meanwhile.

    Raises:
        RuntimeError: a living process writes one of them.
    """
    locks: list[int] = []
    until = time.monotonic() + DYING_SECONDS
    try:
        for lane in range(rings.sizes.lanes):
            locks.append(os.open(lock_path(folder, lane), os.O_RDWR))
            while not _locked(locks[-1]):
                if time.monotonic() > until:
                    raise RuntimeError(
                        f"lane {lane} of {folder} is being written by process "
                        f"{int(rings.header[lane, PID])}; end it before this replay is opened"
                    )
                time.sleep(0.05)
        yield
    finally:
        for lock in locks:
            os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
