"""What runs in an actor process: a TorchRL collector that is asked for one batch at a time.

It obeys one pipe. A number on it asks for a batch (into that slot of the round memory), ``None``
ends the process. What it says is ``("ready", None)``, ``("batch", ...)`` or, last,
``("error", traceback)``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import Collector

from torchrl_vla.actors.batches import RoundMemory
from torchrl_vla.actors.behaviour import Behaviour
from torchrl_vla.actors.board import Heartbeat, end_wait
from torchrl_vla.actors.environment import check_finite, to_transitions
from torchrl_vla.actors.memory import SharedMemory
from torchrl_vla.envs.chunked import ChunkedEnv
from torchrl_vla.storage.buffer import JournalReplayBuffer

_LONGEST = 8_000
"""Characters of a traceback: what a pipe takes at once, so that no half of it can arrive."""
STACK_SIGNAL = signal.SIGUSR2
"""Makes a worker write where each of its threads is."""


@dataclass(frozen=True)
class Job:
    """Everything a worker needs to begin, or to go on where another one died."""

    worker: int
    parent: int
    """Process id of the learner."""
    make_env: Callable[..., ChunkedEnv]
    make_behaviour: Callable[[], TensorDictModuleBase]
    """Builds what chooses actions and stamps them with the version of its weights."""
    position: int
    """Episodes that the worker's initial-state stream handed out before."""
    seed: int
    """Of the action noise."""
    steps_per_batch: int
    """``T``, decisions per simulator and batch."""
    board: SharedMemory
    rounds: SharedMemory
    replay: JournalReplayBuffer | None
    """Where transitions go; ``None`` hands rounds to the learner."""
    stacks: Path
    """File for :data:`STACK_SIGNAL`."""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ``parent`` dies, however it dies.

    Raises:
        SystemExit: the parent is gone already.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    if os.getppid() != parent:
        raise SystemExit(f"parent process {parent} is gone")


def belong_to(learner: int) -> None:
    """Die with process ``learner`` and leave signals to the whole job to it.

    Raises:
        SystemExit: the learner is gone already.
    """
    die_with_parent(learner)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def run_worker(job: Job, pipe: Connection) -> None:
    """Serve until told to end; the process's main function."""
    belong_to(job.parent)
    with job.stacks.open("w") as stacks:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        try:
            _serve(job, pipe)
        except (EOFError, BrokenPipeError):
            pass  # the learner closed the pipe: the end
        except BaseException:
            pipe.send(("error", traceback.format_exc()[-_LONGEST:]))
            os._exit(1)  # at once: the learner waits for the exit code
        finally:
            faulthandler.unregister(STACK_SIGNAL)


def make_collector(env: ChunkedEnv, behaviour: Behaviour, steps_per_batch: int) -> Collector:
    """Return a collector in this process that yields batches ``[N, T]`` for ever, one at a time.

    Args:
        env: of ``N`` simulators.
        behaviour: chooses the actions.
        steps_per_batch: ``T``.
    """
    return Collector(
        env,
        behaviour,
        frames_per_batch=env.batch_size[0] * steps_per_batch,
        total_frames=-1,
        return_same_td=True,
        auto_register_policy_transforms=False,
    )


def _serve(job: Job, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    heartbeat = Heartbeat(job.board, job.worker)
    env = job.make_env(worker=job.worker, position=job.position, on_step=heartbeat)
    collector = make_collector(env, job.make_behaviour(), job.steps_per_batch)
    batches, rounds = iter(collector), RoundMemory(job.rounds)
    pipe.send(("ready", None))
    while (slot := pipe.recv()) is not None:  # before the first order it starts up, not waits
        end_wait(heartbeat.line)
        pipe.send(("batch", _hand_over(next(batches), job.replay, rounds, slot)))
        heartbeat.begin_wait()
    collector.shutdown()


def _hand_over(
    batch: Any, replay: JournalReplayBuffer | None, rounds: RoundMemory, slot: int
) -> Any:
    check_finite(batch)
    if replay is None:
        return rounds.put(batch, slot)
    rows = to_transitions(batch)
    if len(rows):
        replay.extend(rows)
    return None
