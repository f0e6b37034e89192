"""Events, semaphores and locks that a killed process cannot keep.

multiprocessing's own count sleepers and owners: whoever sets an event waits until every sleeper has
woken up, and a lock stays locked, also when the other process was killed meanwhile. An actor worker
spends most of its life waiting for the policy server, so its death would stop the server. Here the
kernel keeps the count (``eventfd``) and gives up the locks of a dead process (``lockf``).
"""

from __future__ import annotations

import fcntl
import os
import select
import time
from multiprocessing import reduction
from multiprocessing.context import SpawnContext
from typing import Any


class _Descriptor:
    """A file descriptor without a name; give it to a child process as an argument (spawn)."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {"descriptor": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fd = state["descriptor"].detach()

    def __del__(self) -> None:
        os.close(self._fd)

    def _readable(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(None if timeout is None else max(0.0, 1e3 * timeout)))


class Event(_Descriptor):
    """Like ``multiprocessing.Event``."""

    def __init__(self) -> None:
        super().__init__(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def set(self) -> None:
        """Let everyone pass who waits."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Let everyone wait from now on."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return  # it was not set

    def is_set(self) -> bool:
        """Whether nobody has to wait."""
        return self._readable(0.0)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds; returns whether it is."""
        return self._readable(timeout)


class Semaphore(_Descriptor):
    """Like ``multiprocessing.Semaphore``."""

    def __init__(self, value: int = 1) -> None:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE
        super().__init__(os.eventfd(value, flags))

    def release(self) -> None:
        """Count up."""
        os.eventfd_write(self._fd, 1)

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Count down; waits while it is 0, at most ``timeout`` seconds. Returns whether it did."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                left = None if deadline is None else deadline - time.monotonic()
                if not block or (left is not None and left <= 0):
                    return False
                self._readable(left)
            else:
                return True


class Lock(_Descriptor):
    """Excludes other processes (not other threads of this one); a context manager."""

    def __init__(self) -> None:
        super().__init__(os.memfd_create("lock", os.MFD_CLOEXEC))

    def __enter__(self) -> Lock:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        return self

    def __exit__(self, *exception: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)


class KillSafeContext(SpawnContext):
    """multiprocessing's spawn context, with the classes of this module."""

    def Event(self) -> Event:
        return Event()

    def Semaphore(self, value: int = 1) -> Semaphore:
        return Semaphore(value)

    def Lock(self) -> Lock:
        return Lock()
