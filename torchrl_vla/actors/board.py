"""The board: what every worker has done so far and when it last gave a sign of life.

One line per worker in shared memory. It outlives the worker, is read without asking, and a worker
that replaces another goes on with its line.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from torchrl_vla.actors.memory import SharedMemory
from torchrl_vla.envs.chunked import ChunkedEnv

_LINE = np.dtype(
    [
        ("pid", "i8"),
        ("beat", "f8"),  # monotonic seconds; 0 before the first decision
        ("decisions", "i8"),
        ("env_steps", "i8"),
        ("episodes", "i8"),
        ("successes", "i8"),
        ("sim_errors", "i8"),
        ("position", "i8"),  # episodes that the initial-state stream handed out
        ("idle", "f8"),  # seconds, minus the moment at which a wait began while one lasts
    ]
)


@dataclass(frozen=True)
class ActorCounts:
    """Totals over this rank's workers since they started."""

    decisions: int
    env_steps: int
    episodes: int
    successes: int
    sim_errors: int


def make_board(num_workers: int) -> SharedMemory:
    """Return memory for the lines of ``num_workers`` workers."""
    return SharedMemory("board", num_workers * _LINE.itemsize)


def lines_of(board: SharedMemory) -> np.ndarray:
    """Return the lines, structured ``[W]``; writing to them writes the board."""
    return board.bytes().view(_LINE)


def idle_seconds(lines: np.ndarray, now: float) -> float:
    """Return how long the workers of ``lines`` had nothing to do, up to ``now`` (monotonic).

    A wait that lasts is included. One number per worker says both, so that it can be read while it
    is written.
    """
    idle = lines["idle"]
    return float(np.where(idle < 0, idle + now, idle).sum())


def end_wait(line: np.ndarray) -> None:
    """Count the wait of the worker of ``line`` up to now, if it waits."""
    if line["idle"][0] < 0:
        line["idle"] += time.monotonic()


class Heartbeat:
    """Writes a worker's counters to its line after every decision.

    Args:
        board: see :func:`make_board`.
        worker: whose line.
    """

    def __init__(self, board: SharedMemory, worker: int) -> None:
        self.line = lines_of(board)[worker : worker + 1]
        self.line["pid"] = os.getpid()
        self._before = self.line.copy()  # of the workers that this one replaces

    def __call__(self, env: ChunkedEnv, env_steps: int) -> None:
        """Record that ``env`` just finished a step of ``env_steps`` control steps."""
        line, before = self.line, self._before
        line["decisions"] += env.batch_size[0]
        line["env_steps"] += env_steps
        line["episodes"] = before["episodes"] + env.num_episodes
        line["successes"] = before["successes"] + env.num_successes
        line["sim_errors"] = before["sim_errors"] + env.num_sim_errors
        line["position"] = env.init_states.position
        line["beat"] = time.monotonic()

    def begin_wait(self) -> None:
        """Record that the worker has nothing to do from now on; :func:`end_wait` ends that."""
        self.line["idle"] -= time.monotonic()
