"""One worker as the learner sees it: its process, its pipe, what it owes, how often it failed.

A worker fails by dying, by raising, or by giving no sign of life within its deadline. It is then
killed and another process takes its number.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tensordict.nn import TensorDictModuleBase

from torchrl_vla.actors.batches import RoundMemory
from torchrl_vla.actors.board import end_wait
from torchrl_vla.actors.worker import STACK_SIGNAL, Job, run_worker

PATIENCE = 300.0
"""Seconds that a start (imports) or a first decision (rendering) may take."""
_END_SECONDS = 5.0
"""How long a process that is ending may take before it is killed."""
_STACK_SECONDS = 0.3
_SPAWN = multiprocessing.get_context("spawn")


class WorkerError(RuntimeError):
    """Actor workers fail for good; the message names the last one and why."""


class RestartLimit:
    """Counts restarts and says when there were too many.

    Args:
        number: most restarts within ``minutes``; 0 allows none.
        minutes: length of the window.
    """

    def __init__(self, number: int, minutes: float) -> None:
        self.number, self.minutes = number, minutes
        self.total = 0
        """Restarts since the start."""
        self._times: deque[float] = deque()

    def admit(self, reason: str) -> None:
        """Count one more restart because of ``reason``.

        Raises:
            WorkerError: that is one too many.
        """
        now = time.monotonic()
        while self._times and now - self._times[0] > 60 * self.minutes:
            self._times.popleft()
        if len(self._times) >= self.number:
            raise WorkerError(
                f"{reason}\n{len(self._times)} actor workers were replaced in the last "
                f"{self.minutes:g} minutes and actors.max_restarts is {self.number}: remove the "
                "cause, or raise actors.max_restarts"
            )
        self._times.append(now)
        self.total += 1


class Supervised:
    """One worker process and its successors.

    Args:
        job: what the worker does; ``position`` and ``seed`` of the first process.
        timeout: seconds without a sign of life after which the worker counts as hung.
        line: the worker's line of the board, structured ``[1]``.
    """

    def __init__(self, job: Job, timeout: float, line: Any) -> None:
        self.job, self.timeout, self.line = job, timeout, line
        self.rounds = RoundMemory(job.rounds)
        self.owed: deque[int] = deque()
        """Slots that were asked for and not delivered."""
        self.delivered: deque[tuple[int, Any]] = deque()
        """Slots with their content, for the learner to take."""
        self.said = ""
        """Traceback of the process, if it raised."""
        self.start()

    @property
    def number(self) -> int:
        """Index among the rank's workers."""
        return self.job.worker

    def start(self) -> None:
        """Start a process; it is asked again for what its predecessor owed."""
        self.pipe, theirs = _SPAWN.Pipe()
        self.line["beat"] = 0.0
        end_wait(self.line)  # of a predecessor that died waiting
        self.process = _SPAWN.Process(
            target=run_worker, args=(self.job, theirs), name=f"actor-{self.number}", daemon=True
        )
        self.process.start()
        theirs.close()
        self.ready, self.closed, self.said, self.since = False, False, "", time.monotonic()
        for slot in self.owed:
            self._send(slot)

    def ask(self) -> None:
        """Ask for one more batch."""
        if not self.owed:
            self.since = time.monotonic()
        self.owed.append(self.rounds.lend())
        self._send(self.owed[-1])

    def listen(self) -> None:
        """Take in what the process has said so far."""
        try:
            while self.pipe.poll():
                kind, content = self.pipe.recv()
                self.since = time.monotonic()
                if kind == "ready":
                    self.ready = True
                elif kind == "batch":
                    self.delivered.append((self.owed.popleft(), content))
                else:
                    self.said = content
        except (EOFError, ConnectionResetError):
            self.closed = True

    def failure(self) -> str | None:
        """Return what is wrong with the process, if anything, after :meth:`listen`."""
        name = f"actor worker {self.number} (pid {self.process.pid})"
        if self.said or self.closed:
            self.process.join(_END_SECONDS)
        if self.said:
            return f"{name} raised, exit code {self.process.exitcode}:\n{self.said.rstrip()}"
        if self.closed or not self.process.is_alive():
            return f"{name} ended with exit code {self.process.exitcode}"
        if self.ready and not self.owed:
            return None
        beat = float(self.line["beat"][0])
        silence = time.monotonic() - max(self.since, beat)
        limit = self.timeout if beat else max(self.timeout, PATIENCE)
        if silence <= limit:
            return None
        return (
            f"{name} hangs: no sign of life for {silence:.0f} s, limit {limit:.0f} s; physics or "
            f"rendering is stuck (MUJOCO_GL={os.environ.get('MUJOCO_GL', 'unset')}){self._stacks()}"
        )

    def restart(self, seed: int, make_behaviour: Callable[[], TensorDictModuleBase]) -> None:
        """Replace the process; the stream of initial states goes on behind the last one used.

        Args:
            seed: of the new process's action noise.
            make_behaviour: builds what chooses its actions.
        """
        self.kill()
        position = int(self.line["position"][0])
        self.job = replace(self.job, position=position, seed=seed, make_behaviour=make_behaviour)
        self.start()

    def end(self) -> None:
        """Tell an idle process to end; a busy one is killed by :meth:`kill`."""
        if self.ready and not self.owed:
            self._send(None)
            self.process.join(_END_SECONDS)

    def kill(self) -> None:
        """End the process now and let go of it. Idempotent."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join(_END_SECONDS)
        self.pipe.close()

    def _send(self, order: int | None) -> None:
        try:
            self.pipe.send(order)
        except OSError:
            return  # it is dead; that is seen when it is listened to, and it is asked again then

    def _stacks(self) -> str:
        if not self.ready:
            return ""
        os.kill(self.process.pid, STACK_SIGNAL)
        time.sleep(_STACK_SECONDS)
        written = self.job.stacks.read_text()
        return f"; it is here:\n{written.rstrip()}" if written else ""
