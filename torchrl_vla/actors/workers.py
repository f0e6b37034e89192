"""The workers of a rank as one source of batches.

    loop ──request()──▶ pipe of each worker ──▶ W processes × N simulators
    loop ◀─receive()──  round in shared memory, or "rows committed" when they write the replay
    loop ──publish()──▶ shared memory ──▶ every worker's policy, between two decisions

With a policy server workers have no policy of their own: they ask the server, which takes the
weights in their place (:mod:`torchrl_vla.actors.server`).

A worker that fails is replaced while the others go on; see :mod:`torchrl_vla.actors.supervision`.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_vla.actors.behaviour import make_behaviour
from torchrl_vla.actors.board import ActorCounts, idle_seconds, lines_of, make_board
from torchrl_vla.actors.memory import SharedMemory
from torchrl_vla.actors.server import RankServer
from torchrl_vla.actors.supervision import RestartLimit, Supervised, WorkerError
from torchrl_vla.actors.weights import Publisher
from torchrl_vla.actors.worker import Job
from torchrl_vla.envs.chunked import ChunkedEnv
from torchrl_vla.storage.buffer import JournalReplayBuffer

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
"""How often hung workers are looked for while the learner waits."""


class Actors:
    """W worker processes × N simulators, as one source of batches.

    Args:
        make_env: picklable; called in worker ``w`` as
            ``make_env(worker=w, position=..., on_step=...)``.
        make_policy: picklable; builds the policy in the worker, or in the server.
        num_workers: ``W``.
        steps_per_batch: ``T``, decisions per simulator and batch.
        folder: where workers write what they are doing when they hang.
        positions: episodes that each worker's initial-state stream handed out before, or ``None``.
        replay: if given, workers write transitions into it and a batch is only an announcement;
            otherwise :meth:`receive` returns the rounds themselves, all workers together.
        seed: numbers that fix the noise of the workers' actions.
        timeout: seconds without a sign of life after which a worker counts as hung.
        limit: how often workers may be replaced.
        background: publish in a thread; see :class:`~torchrl_vla.actors.weights.Publisher`.
        server: makes the policy server that workers ask, see :class:`RankServer`; without it every
            worker has its own copy of the policy.

    Raises:
        WorkerError: a worker cannot start.
        PolicyServerError: the policy server cannot start.
    """

    def __init__(
        self,
        make_env: Callable[..., ChunkedEnv],
        make_policy: Callable[[], TensorDictModuleBase],
        *,
        num_workers: int,
        steps_per_batch: int,
        folder: Path,
        positions: Sequence[int] | None = None,
        replay: JournalReplayBuffer | None = None,
        seed: Sequence[int] = (0,),
        timeout: float = 30.0,
        limit: RestartLimit | None = None,
        background: bool = False,
        server: Callable[..., RankServer] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.num_workers, self.asynchronous = num_workers, replay is not None
        self.limit = RestartLimit(5, 10.0) if limit is None else limit
        self._seed = tuple(seed)
        board, weights = make_board(num_workers), SharedMemory("weights")
        self.board = lines_of(board)
        self.board["position"] = 0 if positions is None else positions
        self._publisher = Publisher(weights, background=background)
        self._own_copy = partial(make_behaviour, make_policy, weights)
        self.server: RankServer | None = None
        """Acts for the workers if they have no copies of the policy."""
        if server is not None:
            spare, noise = self.limit.number, self._noise(num_workers)
            self.server = server(self._own_copy, clients=num_workers, spare=spare, seed=noise)
        self.pending = 0
        """Requests that no :meth:`receive` has answered yet."""
        self._workers: list[Supervised] = []
        # An exit without close() would wait for them: they leave SIGTERM to the learner.
        self._kill_all = weakref.finalize(self, _kill, self._workers)
        try:
            for number in range(num_workers):
                job = Job(
                    worker=number,
                    parent=os.getpid(),
                    make_env=make_env,
                    make_behaviour=self._behaviour(number),
                    position=int(self.board["position"][number]),
                    seed=self._noise(number),
                    steps_per_batch=steps_per_batch,
                    board=board,
                    rounds=SharedMemory(f"rounds-{number}"),
                    replay=None if replay is None else replay.for_lane(number),
                    stacks=folder / f"worker-{number}.stacks",
                )
                line = self.board[number : number + 1]
                self._workers.append(Supervised(job, timeout, line))
            if self.server is not None:
                self.server.start()  # while the workers start, too
            while not all(worker.ready for worker in self._workers):
                self._look(wait=True)
            self._idle_mark = time.monotonic(), 0.0
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    @property
    def restarts(self) -> int:
        """Workers replaced since the start."""
        return self.limit.total

    def request(self) -> None:
        """Ask for one more batch; returns at once.

        With a replay that is a batch of one worker, the one that owes fewest, then the one that
        has done least; otherwise a round of all workers, every decision of which has at least the
        newest version published before.
        """
        self.pending += 1
        if self.asynchronous:
            min(self._workers, key=lambda w: (len(w.owed), int(w.line["decisions"][0]))).ask()
            return
        self._publisher.wait()
        for worker in self._workers:
            worker.ask()

    def receive(self, wait: bool = True) -> TensorDictBase | bool | None:
        """Return the next requested batch, and replace workers that failed.

        Args:
            wait: block until it is there; otherwise return ``None`` if it is not.

        Returns:
            The round ``[W * N, T]``, or ``True`` when a worker wrote its batch into the replay.

        Raises:
            WorkerError: workers failed more often than allowed, or one cannot start.
            PolicyServerError: the policy server is gone or hangs.
        """
        self._look(wait=False)
        while (batch := self._next_batch()) is None:
            if not wait:
                return None
            self._look(wait=True)
        self.pending -= 1
        return batch

    def collect(self) -> TensorDictBase | bool:
        """Request a batch and wait for it."""
        if not self.pending:
            self.request()
        return self.receive()

    def publish(self, weights: TensorDict, version: int) -> None:
        """Give every worker new weights, for all decisions it begins from now on.

        Args:
            weights: nested like ``TensorDict.from_module(policy)``: the policy's whole weights the
                first time, later the same part of them each time (what is trained).
            version: stamped on every decision they make from now on.

        Raises:
            ValueError: the part differs from that of the publishes before.
        """
        self._publisher.publish(weights, version)

    def __enter__(self) -> Actors:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def positions(self) -> dict[str, list[int]]:
        """Return where every worker's initial-state stream stands, for a checkpoint."""
        return {"positions": self.board["position"].tolist()}

    def idle_share(self) -> float:
        """Return the share of the time since the last call that workers waited to be asked.

        In [0, 1]; the first call counts from the start.
        """
        (since, before), now = self._idle_mark, time.monotonic()
        idle = idle_seconds(self.board, now)
        self._idle_mark = now, idle
        share = (idle - before) / ((now - since) * self.num_workers)
        return min(1.0, max(0.0, share))  # a wait may begin or end while this counts

    def counts(self) -> ActorCounts:
        """Return totals over the workers."""
        names = ActorCounts.__dataclass_fields__
        return ActorCounts(**{name: int(self.board[name].sum()) for name in names})

    def close(self) -> None:
        """End all workers; nothing is left behind. Idempotent."""
        if self._kill_all.alive:
            for worker in self._workers:
                worker.end()
        self._kill_all()
        if self.server is not None:
            self.server.close()
        self._publisher.close()

    def _noise(self, worker: int) -> int:
        numbers = (*self._seed, worker, self.limit.total)
        return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])

    def _behaviour(self, worker: int) -> Callable[[], TensorDictModuleBase]:
        return self._own_copy if self.server is None else self.server.behaviour(worker)

    def _look(self, wait: bool) -> None:
        """Take in what workers say and replace those that failed."""
        if wait:
            wait_for_any([worker.pipe for worker in self._workers], _LOOK_SECONDS)
        for worker in self._workers:
            worker.listen()
        if self.server is not None:
            self.server.check()  # before its clients: they fail with it
        for worker in self._workers:
            reason = worker.failure()
            if reason is not None:
                self._replace(worker, reason)

    def _replace(self, worker: Supervised, reason: str) -> None:
        if worker.said and not worker.line["decisions"][0]:
            raise WorkerError(f"{reason}\nIt raised before its first decision: not tried again")
        if self.server is not None:
            self.server.check(ask=True)
        self.limit.admit(reason)
        worker.restart(self._noise(worker.number), self._behaviour(worker.number))
        _LOG.warning(
            "%s\nIt is replaced by pid %d (restart %d); its unfinished batch is discarded",
            reason,
            worker.process.pid,
            self.limit.total,
        )

    def _next_batch(self) -> TensorDictBase | bool | None:
        if self.asynchronous:
            return self._next_announcement()
        if not all(worker.delivered for worker in self._workers):
            return None
        taken = [(worker, *worker.delivered.popleft()) for worker in self._workers]
        batch = torch.cat([worker.rounds.look(tensors, slot) for worker, slot, tensors in taken])
        for worker, slot, _ in taken:
            worker.rounds.give_back(slot)
        return batch

    def _next_announcement(self) -> bool | None:
        for worker in self._workers:
            if worker.delivered:
                worker.rounds.give_back(worker.delivered.popleft()[0])
                return True
        return None


def _kill(workers: list[Supervised]) -> None:
    for worker in workers:
        worker.kill()
