"""Forks actor processes from one that has imported everything, but has no thread and no socket.

A fork of the test process itself would inherit the learner's listening socket and keep its port,
and locks that a thread of an earlier test held.
"""

import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
from remote_actor import run
from steer import wait_until_gone


class Nursery:
    """The process that forks: spawned, so that it has nothing of this one."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_fork_on_demand, args=(theirs,), daemon=False)
        self._process.start()
        theirs.close()

    def actor(self, address, secret: bytes, name: str, report: Path) -> "Born":
        """Fork an actor that leaves its report in ``report``."""
        return self.start(run, (address, secret, name, report), report)

    def start(self, target: Callable[..., None], arguments: tuple, report: Path) -> "Born":
        """Fork a process that calls ``target(*arguments)``, and so leaves ``report``."""
        self._pipe.send((target, arguments))
        return Born(self._pipe.recv(), report)

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


class Born:
    """A process and the file that it leaves."""

    def __init__(self, pid: int, report: Path) -> None:
        self.process, self._report = psutil.Process(pid), report

    def alive(self) -> bool:
        return self.process.is_running()

    def kill(self) -> None:
        if self.alive():
            self.process.kill()
            assert not wait_until_gone({self.process.pid}, 200)

    def ask_to_leave(self) -> dict:
        """Return the report of an actor once it has taken leave."""
        self.process.terminate()
        return self.report()

    def report(self) -> dict:
        """Return the report of a process that ends by itself."""
        assert not wait_until_gone({self.process.pid}, 200)
        return json.loads(self._report.read_text())


def _fork_on_demand(pipe) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        try:
            target, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        child = os.fork()
        if child == 0:
            pipe.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                target(*arguments)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        pipe.send(child)
