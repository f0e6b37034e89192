"""What a loop measures of itself: rates, waits, means, memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import psutil

from torchrl_vla.metrics.names import WAIT_ACTORS, WAIT_LEARNER


class Rate:
    """Events per second over a sliding window of wall time.

    Args:
        window: seconds the rate looks back. A single longer gap between two events still counts.
        clock: seconds, never going back.

    Raises:
        ValueError: ``window`` is not positive.
    """

    def __init__(self, window: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        if not window > 0:
            raise ValueError(f"window={window} s must be positive")
        self.total: float = 0
        self._window = window
        self._clock = clock
        self._marks: deque[tuple[float, float]] = deque([(clock(), 0.0)])

    def add(self, count: float) -> None:
        """Count ``count`` more events, now."""
        self.total += count
        self._marks.append((self._clock(), self.total))

    def per_second(self) -> float:
        """Events per second lately; 0 while no time has passed or nothing happened."""
        now = self._clock()
        while len(self._marks) > 1 and self._marks[1][0] <= now - self._window:
            self._marks.popleft()
        since, before = self._marks[0]
        return (self.total - before) / (now - since) if now > since else 0.0


class Stopwatch:
    """Adds up named waits and gives them as shares of wall time.

    Not for use from several threads.

    Args:
        names: waits that are reported even when they never happened, as 0.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        names: Sequence[str] = (WAIT_ACTORS, WAIT_LEARNER),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._since = clock()
        self._spent: dict[str, float] = dict.fromkeys(names, 0.0)
        self._running: dict[str, float] = {}

    @contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """Time the body and add it to ``name``, also when the body raises.

        Raises:
            RuntimeError: ``name`` is already being timed, so its time would count twice.
        """
        if name in self._running:
            raise RuntimeError(f"{name!r} is already being timed; use another name inside it")
        self._running[name] = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - self._running.pop(name)
            self._spent[name] = self._spent.get(name, 0.0) + spent

    def pop_shares(self) -> dict[str, float]:
        """Share of the wall time since the last pop spent in each wait, in [0, 1]; starts anew.

        A wait that is still running counts up to now, and its rest in the next pop.
        """
        now = self._clock()
        for name, began in self._running.items():
            self._spent[name] = self._spent.get(name, 0.0) + now - began
            self._running[name] = now
        elapsed = now - self._since
        shares = {name: s / elapsed if elapsed > 0 else 0.0 for name, s in self._spent.items()}
        self._since = now
        self._spent = dict.fromkeys(self._spent, 0.0)
        return shares


class Means:
    """Means of named numbers over several reports, each name over the reports that have it."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, report: Mapping[str, float]) -> None:
        """Take in one report."""
        for name, value in report.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1

    def pop(self) -> dict[str, float]:
        """Return the means since the last pop, in the order in which names came; starts anew."""
        means = {name: value / self._counts[name] for name, value in self._sums.items()}
        self._sums, self._counts = {}, {}
        return means


def rss_gib() -> float:
    """Resident memory of this process and all its children, GiB.

    Pages shared between them count once per process, so this is an upper bound.
    """
    this = psutil.Process()
    total = 0
    for process in (this, *this.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # ended between the listing and the look: it holds no memory any more
    return total / 2**30
