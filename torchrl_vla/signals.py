"""Asked to stop from outside: the first signal is a request, the second one is the end.

Schedulers announce the end of a job with SIGUSR1 or SIGTERM. A training run that gets one finishes
what it is at, saves, and exits with :data:`RESUME_ME`; which update that is, all ranks agree on
(``loops.run.Run.finished``). A second signal exits at once, also while the main thread waits in a
collective for a rank that is gone: signals are read by a thread, from the descriptor that Python's
C handler writes to.

torchrun passes a signal on to its ranks, so with a scheduler that tells every process a rank gets
the same one twice in a moment. That counts as one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

RESUME_ME = 75
"""Exit code of a run that was asked to stop and has saved (EX_TEMPFAIL): start it again with
``resume=auto``."""
STOPPING = (signal.SIGTERM, signal.SIGUSR1)
ECHO_SECONDS = 2.0
"""A signal that follows another one so soon is the same one, told twice."""


class StopSignals:
    """Watches for :data:`STOPPING` while it is entered (in the main thread).

    Args:
        graceful: whether somebody looks at :meth:`asked`; otherwise the first signal is the end.
    """

    def __init__(self, graceful: bool = True) -> None:
        self.graceful = graceful
        self.received: signal.Signals | None = None
        """The signal that asked to stop."""

    def asked(self) -> bool:
        """Whether this process was asked to stop."""
        return self.received is not None

    def __enter__(self) -> StopSignals:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _ignore) for number in STOPPING}
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _watch(self) -> None:
        since = 0.0
        while numbers := os.read(self._reader, 64):
            for number in numbers:
                if number not in STOPPING:
                    continue
                if self.graceful and self.received is None:
                    self.received, since = signal.Signals(number), time.monotonic()
                elif time.monotonic() - since > ECHO_SECONDS:
                    os._exit(128 + number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Let the signal have no effect but the byte that Python writes for it."""
