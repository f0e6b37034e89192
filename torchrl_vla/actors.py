"""Actors of a rank: collectors in child processes, fed with weights, watched, never waited on.

What the room is for: building TorchRL's multi-process collectors around a chunked environment and a
copy of the policy, publishing weights to them, pulling batches, and turning a dead, hung or failing
worker into one clear error. What it does not do: decide when to collect or what to do with the data
(loops), or write the replay (the collectors do that themselves).

    loop ──request()──▶ puller thread ──next()──▶ TorchRL collector ──▶ W workers × N simulators
    loop ◀─receive()──   (batch, or "rows committed" when the workers write the shared replay)
    loop ──publish()──▶ weight-sync scheme ──▶ every worker's policy, between two decisions
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import TensorDictReplayBuffer
from torchrl.weight_update import MultiProcessWeightSyncScheme
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from torchrl_vla import schema
from torchrl_vla.envs.chunked import ChunkedEnv, InitStateStream
from torchrl_vla.envs.simulator import Suite

FOREVER = 2**40
"""Batches after which a collector would stop by itself."""
PATIENCE = 120.0
"""Seconds that a first decision (imports, rendering) or a publish (large weights) may take."""
_BOARD = np.dtype(
    [
        ("pid", "i8"),
        ("beat", "f8"),
        ("decisions", "i8"),
        ("env_steps", "i8"),
        ("episodes", "i8"),
        ("successes", "i8"),
        ("sim_errors", "i8"),
        ("position", "i8"),
        ("idle", "f8"),
    ]
)


class WorkerError(RuntimeError):
    """An actor process died, hung or raised; the message names it."""


class Behaviour(TensorDictModuleBase):
    """A policy copy that chooses actions: stamps ``policy_version``, never mixes two versions.

    The lock makes a forward pass and an arriving publish exclude each other, so every decision was
    made by exactly one version, the one it is stamped with.
    """

    def __init__(self, policy: TensorDictModuleBase) -> None:
        super().__init__()
        self.policy = policy
        self.register_buffer("policy_version", torch.zeros(1, dtype=torch.int64))
        self.lock = threading.Lock()
        self.in_keys = policy.in_keys
        self.out_keys = [*policy.out_keys, schema.POLICY_VERSION]

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Let the policy act and stamp the decision."""
        with self.lock:
            tensordict = self.policy(tensordict)
            version = self.policy_version.clone()
        tensordict.set(schema.POLICY_VERSION, version.expand(*tensordict.batch_size, 1))
        return tensordict


class _BetweenDecisions(WeightStrategy):
    """Applies published weights while no forward pass runs."""

    def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
        if isinstance(destination, Behaviour):
            with destination.lock:
                super().apply_weights(destination, weights, inplace=inplace)
        else:
            super().apply_weights(destination, weights, inplace=inplace)


class _AsyncCollector(MultiAsyncCollector):
    """Has room for every worker's announcement.

    TorchRL's queue holds one: another worker's announcement fails after a second, and that worker
    then collects again although nobody asked, so actors would run away from a waiting learner.
    """

    @property
    def _queue_len(self) -> int:
        return self.num_workers


class Heartbeat:
    """Writes a worker's counters to its line of the board after every decision.

    The board is a small memory-mapped file: it outlives the worker and can be read without asking.
    """

    def __init__(self, path: Path, worker: int, num_workers: int, steps_per_batch: int) -> None:
        self.path, self.worker, self.num_workers = path, worker, num_workers
        self.steps_per_batch = steps_per_batch
        self._line: np.ndarray | None = None
        self._steps, self._usual_gap = 0, 0.0

    def __call__(self, env: ChunkedEnv, env_steps: int) -> None:
        """Record that ``env`` just finished a step of ``env_steps`` control steps."""
        if self._line is None:
            self._line = open_board(self.path, self.num_workers)[self.worker : self.worker + 1]
            self._line["pid"] = os.getpid()
        line, now = self._line, time.monotonic()
        gap = now - float(line["beat"][0]) if self._steps else 0.0
        if self._steps % self.steps_per_batch:
            self._usual_gap += 0.1 * (gap - self._usual_gap)
        else:  # the first step of a batch also waited until the batch was asked for
            line["idle"] += max(0.0, gap - self._usual_gap)
        self._steps += 1
        line["decisions"] += env.batch_size[0]
        line["env_steps"] += env_steps
        line["episodes"] = env.num_episodes
        line["successes"] = env.num_successes
        line["sim_errors"] = env.num_sim_errors
        line["position"] = env.init_states.position
        line["beat"] = now


def open_board(path: Path, num_workers: int) -> np.ndarray:
    """Open (or create) the workers' board at ``path``."""
    mode = "r+" if path.exists() else "w+"
    return np.memmap(path, dtype=_BOARD, mode=mode, shape=(num_workers,))


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ``parent`` dies, however it dies.

    Raises:
        SystemExit: the parent is gone already.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    if os.getppid() != parent:
        raise SystemExit(f"parent process {parent} is gone")


def _make_env(make: Callable[..., ChunkedEnv], parent: int, seed: int, **kwargs: Any) -> ChunkedEnv:
    die_with_parent(parent)
    torch.manual_seed(seed)
    return make(**kwargs)


def make_actor_env(
    suite: Suite,
    *,
    num_envs: int,
    chunk_size: int,
    gamma: float,
    streams: Sequence[int],
    positions: Sequence[int] | None = None,
    group_size: int = 1,
    worker: int,
    on_step: Callable[[ChunkedEnv, int], None],
) -> ChunkedEnv:
    """Build worker ``worker``'s environment on training states.

    Args:
        suite: picklable description of the suite.
        num_envs: simulators in this worker.
        chunk_size: ``H``.
        gamma: discount per control step.
        streams: initial-state stream of every worker.
        positions: where each stream goes on (resume); from the start if ``None``.
        group_size: episodes per initial state.
        worker: which worker this is.
        on_step: heartbeat.
    """
    # What a checkpoint cut inside a group never becomes a whole group: go on with the next one.
    start = 0 if positions is None else -(-positions[worker] // group_size) * group_size
    init_states = InitStateStream(suite.splits["train"], streams[worker], group_size, start)
    return ChunkedEnv(
        suite.simulators(num_envs),
        init_states,
        chunk_size=chunk_size,
        gamma=gamma,
        on_step=on_step,
    )


def actor_streams(seed: int, rank: int, num_workers: int) -> list[int]:
    """Return the initial-state stream of each worker: distinct over seeds, ranks and workers.

    Raises:
        ValueError: a number is outside its range.
    """
    limits = {"seed": (seed, 200_000), "rank": (rank, 63), "num_workers": (num_workers, 64)}
    for name, (value, limit) in limits.items():
        if not 0 <= value <= limit:
            raise ValueError(f"{name} is {value}; it must be in 0..{limit}")
    return [(seed * 64 + rank) * 64 + worker for worker in range(num_workers)]


def _make_behaviour(make: Callable[[], TensorDictModuleBase]) -> Behaviour:
    return Behaviour(make())


def to_transitions(batch: TensorDictBase) -> TensorDictBase:
    """Flatten a collected batch ``[N, T]`` to replay rows and leave out diverged simulations.

    Root copies of the previous decision's outcome and the collector's bookkeeping are dropped.
    """
    keep = [f.key for f in schema.SCHEMA if batch.get(f.key, None) is not None]
    keep += [("next", "observation")]
    flat = batch.select(*keep).flatten()
    return flat[~flat[schema.SIM_ERROR].squeeze(-1)]


@dataclass(frozen=True)
class ActorCounts:
    """Totals over this rank's workers since they started."""

    decisions: int
    env_steps: int
    episodes: int
    successes: int
    sim_errors: int


class Actors:
    """W worker processes × N simulators, as one source of batches.

    Args:
        make_env: picklable; called in worker ``w`` as ``make_env(worker=w, on_step=...)``.
        make_policy: picklable; builds the policy in the worker.
        num_workers: ``W``.
        decisions: decisions per batch and worker, over all its simulators.
        steps_per_batch: the same per simulator.
        folder: where the board lives (on local disk).
        replay: if given, workers write transitions into it and a batch is only an announcement;
            otherwise :meth:`receive` returns the batches themselves, all workers together.
        seed: seed of the workers' action sampling; worker ``w`` uses ``64 * seed + w``.
        timeout: seconds without a sign of life after which a worker counts as hung.

    Raises:
        WorkerError: see :meth:`receive`.
    """

    def __init__(
        self,
        make_env: Callable[..., ChunkedEnv],
        make_policy: Callable[[], TensorDictModuleBase],
        *,
        num_workers: int,
        decisions: int,
        steps_per_batch: int,
        folder: Path,
        replay: TensorDictReplayBuffer | None = None,
        seed: int = 0,
        timeout: float = 30.0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        board = folder / "board.bin"
        board.unlink(missing_ok=True)
        self.board = open_board(board, num_workers)
        self._started = time.monotonic()
        self.num_workers, self.timeout, self.asynchronous = num_workers, timeout, replay is not None
        env_fns = [
            partial(
                _make_env,
                make_env,
                os.getpid(),
                seed * 64 + worker,
                worker=worker,
                on_step=Heartbeat(board, worker, num_workers, steps_per_batch),
            )
            for worker in range(num_workers)
        ]
        scheme = MultiProcessWeightSyncScheme(strategy="tensordict", sync=True)
        scheme.strategy = _BetweenDecisions()
        kind = _AsyncCollector if self.asynchronous else MultiSyncCollector
        extra = {} if self.asynchronous else {"cat_results": 0}
        frames = decisions if self.asynchronous else decisions * num_workers
        self.collector = kind(
            env_fns,
            policy_factory=partial(_make_behaviour, make_policy),
            frames_per_batch=frames,
            total_frames=frames * FOREVER,
            replay_buffer=replay,
            postproc=to_transitions if self.asynchronous else None,
            weight_sync_schemes={"policy": scheme},
            num_threads=torch.get_num_threads(),  # of this process, which TorchRL would change
            num_sub_threads=1,
            **extra,
        )
        for process in self.collector.procs:
            # TorchRL closes every handle when one worker fails, and exit codes would go with them.
            process.close = lambda: None
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.pending = 0
        """Requests that no :meth:`receive` has answered yet."""
        self._seen = np.zeros(num_workers)  # the beat that _turns counts from
        self._turns = np.zeros(num_workers, dtype=np.int64)
        self._owing = np.full(num_workers, np.inf)
        self._puller = threading.Thread(target=self._pull, name="puller", daemon=True)
        self._puller.start()

    def _pull(self) -> None:
        batches = iter(self.collector)
        while self._requests.get():
            try:
                self._results.put(("batch", next(batches)))
            except BaseException as error:  # handed to the loop, which raises it
                self._results.put(("error", error))
                return

    def request(self) -> None:
        """Ask for one more batch; returns at once."""
        self.pending += 1
        self._requests.put(True)

    def receive(self, wait: bool = True) -> TensorDictBase | bool | None:
        """Return the next requested batch.

        Args:
            wait: block until it is there; otherwise return ``None`` if it is not.

        Returns:
            The batch ``[W * N, T]``, or ``True`` when the workers wrote it into the replay.

        Raises:
            WorkerError: a worker died, hung (no sign of life for ``timeout`` seconds) or raised.
        """
        asked = time.monotonic()
        while True:
            try:
                kind, value = self._results.get(block=wait, timeout=0.5)
                break
            except queue.Empty:
                if not wait:
                    return None
                self._check(asked)
        self.pending -= 1
        if kind == "error":
            raise WorkerError(f"{self._describe()}; the collector said: {value}") from value
        self._note_turn()
        return True if value is None else value

    def collect(self) -> TensorDictBase | bool:
        """Request a batch and wait for it."""
        if not self.pending:
            self.request()
        return self.receive()

    def publish(self, weights: TensorDict, version: int) -> None:
        """Give every worker new weights; returns when all have them.

        Args:
            weights: the policy's whole weights, nested like ``TensorDict.from_module(policy)``.
            version: stamped on every decision they make from now on.

        Raises:
            WorkerError: a worker is not alive to receive them, or does not take them.
        """
        self._check(time.monotonic())
        stamped = TensorDict({"policy": weights, "policy_version": torch.tensor([version])})
        outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def send() -> None:
            try:
                self.collector.update_policy_weights_(stamped)
                outcome.put(None)
            except BaseException as error:  # handed to the caller, which raises it
                outcome.put(error)

        # TorchRL waits for each worker's answer without an end, also when that worker has died.
        threading.Thread(target=send, name="publisher", daemon=True).start()
        self._await(outcome, version)

    def _await(self, outcome: queue.SimpleQueue[BaseException | None], version: int) -> None:
        limit = max(self.timeout, PATIENCE)
        asked = time.monotonic()
        while True:
            try:
                error = outcome.get(timeout=0.5)
                break
            except queue.Empty:
                self._check(time.monotonic())
                if time.monotonic() - asked > limit:
                    raise WorkerError(
                        f"not every actor worker took version {version} within {limit:.0f} s; "
                        "look for an error of theirs above"
                    ) from None
        if error is not None:
            raise WorkerError(f"publishing version {version} failed: {error}") from error

    def __enter__(self) -> Actors:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def positions(self) -> dict[str, list[int]]:
        """Return where every worker's initial-state stream stands, for a checkpoint."""
        return {"positions": self.board["position"].tolist()}

    def idle_share(self) -> float:
        """Return the share of the time since the start that workers waited to be asked."""
        elapsed = time.monotonic() - self._started
        return float(self.board["idle"].sum()) / (elapsed * self.num_workers)

    def counts(self) -> ActorCounts:
        """Return totals over the workers."""
        names = ActorCounts.__dataclass_fields__
        return ActorCounts(**{name: int(self.board[name].sum()) for name in names})

    def _check(self, waiting_since: float) -> None:
        dead = [p for p in self.collector.procs if not p.is_alive()]
        if dead and self._results.empty():
            time.sleep(0.2)  # let the puller report what the worker said, if it said anything
            if self._results.empty():
                raise WorkerError(self._describe())
        now = time.monotonic()
        for worker, beat in enumerate(self.board["beat"]):
            owing = self._owing[worker]
            started = max(float(beat), min(waiting_since, owing) if beat < owing else waiting_since)
            limit = self.timeout if beat else max(self.timeout, PATIENCE)  # the first needs imports
            if now - started > limit and self._results.empty():
                process = self.collector.procs[worker]
                raise WorkerError(
                    f"actor worker {worker} (pid {process.pid}) hangs: no sign of life for "
                    f"{now - started:.0f} s, limit {limit:.0f} s; physics or rendering is stuck"
                )

    def _note_turn(self) -> None:
        """Raise if a worker missed its turns for too long while others delivered.

        Announcements are first in, first out: once everybody could have had two turns since a
        worker's last sign of life, its own batch was taken and it was told to go on.
        """
        enough = 2 * self.num_workers
        beats = np.array(self.board["beat"])
        self._turns[beats != self._seen] = 0
        self._seen = beats
        self._turns += 1
        self._owing[self._turns < enough] = np.inf
        self._owing[self._turns == enough] = time.monotonic()
        self._check(time.monotonic())

    def _describe(self) -> str:
        said = [
            f"actor worker {i} (pid {p.pid}) ended with exit code {p.exitcode}"
            for i, p in enumerate(self.collector.procs)
            if not p.is_alive()
        ]
        return "; ".join(said) or "an actor worker failed"

    def close(self) -> None:
        """End all workers; nothing is left behind. Idempotent."""
        self._requests.put(False)
        processes = list(self.collector.procs)
        if all(p.is_alive() for p in processes) and not self.pending:
            self._puller.join(timeout=2.0)
            self.collector.shutdown(timeout=5.0, raise_on_error=False)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(timeout=5.0)


@dataclass(frozen=True)
class ActorSettings:
    """How many actor processes a rank has and what each does."""

    num_workers: int
    """``W``, processes."""
    envs_per_worker: int
    """``N``, simulators in each."""
    decisions_per_env: int
    """``T``, decisions per simulator and batch."""
    timeout: float = 30.0
    """Seconds without a sign of life after which a worker counts as hung."""
    group_size: int = 1
    """Episodes per initial state."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"actors.{name} is {value}; it must be above 0")


def start_actors(
    suite: Suite,
    make_policy: Callable[[], TensorDictModuleBase],
    settings: ActorSettings,
    *,
    chunk_size: int,
    gamma: float,
    seed: int,
    rank: int,
    folder: Path,
    positions: Sequence[int] | None = None,
    attempt: int = 0,
    replay: TensorDictReplayBuffer | None = None,
) -> Actors:
    """Start this rank's actors on training states.

    Args:
        suite: picklable description of the suite.
        make_policy: picklable; builds the policy in a worker.
        settings: processes, simulators, batch.
        chunk_size: ``H``.
        gamma: discount per control step.
        seed: the run's seed.
        rank: this rank.
        folder: for the workers' board.
        positions: where the initial-state streams go on (resume).
        attempt: changes the action noise when a run goes on.
        replay: see :class:`Actors`.
    """
    make_env = partial(
        make_actor_env,
        suite,
        num_envs=settings.envs_per_worker,
        chunk_size=chunk_size,
        gamma=gamma,
        streams=actor_streams(seed, rank, settings.num_workers),
        positions=positions,
        group_size=settings.group_size,
    )
    return Actors(
        make_env,
        make_policy,
        num_workers=settings.num_workers,
        decisions=settings.envs_per_worker * settings.decisions_per_env,
        steps_per_batch=settings.decisions_per_env,
        folder=folder,
        replay=replay,
        seed=(seed * 64 + rank) * 1000 + attempt,
        timeout=settings.timeout,
    )


def behaviour_copy(
    make_policy: Callable[[], TensorDictModuleBase], weights: TensorDict
) -> nn.Module:
    """Return an unsharded policy with ``weights``, for evaluation beside the sharded one."""
    policy = make_policy()
    load_full_weights(policy, weights)
    return policy


def load_full_weights(policy: nn.Module, weights: TensorDict, share: float = 1.0) -> None:
    """Move an unsharded policy towards whole ``weights`` (see ``policies.shard.full_weights``).

    Args:
        policy: changed in place.
        weights: nested like ``TensorDict.from_module(policy)``.
        share: 1 copies; below 1 keeps an exponential moving average (integers are copied).
    """
    own = TensorDict.from_module(policy).data
    with torch.no_grad():
        if share < 1.0:
            weights = own.apply(
                lambda a, b: torch.lerp(a, b, share) if a.is_floating_point() else b, weights
            )
        own.update_(weights)
