"""Tasks of the tabletop suite: instructions, initial states, success and failure.

Everything is a pure function of plain numbers; nothing here touches MuJoCo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from torchrl_vla.envs.tabletop.scene import BLOCK_HALF, COLOURS

TaskKind = Literal["reach", "push_left", "push_right", "pick_up"]

TASK_KINDS: tuple[TaskKind, ...] = ("reach", "push_left", "push_right", "pick_up")
"""Task kinds; task id = index of the kind * 3 + index of the colour."""
_SENTENCES = {
    "reach": "reach the {} block",
    "push_left": "push the {} block to the left",
    "push_right": "push the {} block to the right",
    "pick_up": "pick up the {} block",
}

REACH_HEIGHT = 0.035
"""Height of the point to reach above the block's centre [m]."""
REACH_RADIUS = 0.03
"""Distance to that point that counts as reached [m]."""
PUSH_DISTANCE = 0.06
"""How far a block must be pushed in the asked direction [m]."""
PUSH_SIDEWAYS_LIMIT = 0.06
"""How far a pushed block may stray across the asked direction [m]."""
WRONG_MOVE_LIMIT = 0.03
"""How far any other block, or the pushed block the wrong way, may move [m]."""
LIFT_HEIGHT = 0.06
"""Height that a picked block's centre must exceed [m] (a lift of 4 cm)."""

_X_RANGE = 0.09
_Y_RANGE = 0.10
_Y_GAP = 0.06
_YAW_RANGE = 0.2
_SPLIT_SIZE = 10**15

SPLITS: dict[str, range] = {
    name: range(i * _SPLIT_SIZE, (i + 1) * _SPLIT_SIZE)
    for i, name in enumerate(("train", "eval", "ground", "demo"))
}
"""Initial-state ids by purpose; no id is in two splits."""


@dataclass(frozen=True)
class Task:
    """One instruction: what to do with which block."""

    kind: TaskKind
    """One of :data:`TASK_KINDS`."""
    colour: int
    """Index of the named block in ``COLOURS``."""

    @property
    def instruction(self) -> str:
        """The instruction in lower-case words."""
        return _SENTENCES[self.kind].format(COLOURS[self.colour])

    @property
    def direction(self) -> float:
        """Sign of x in which to push: -1 left, +1 right, 0 for the other kinds."""
        return {"push_left": -1.0, "push_right": 1.0}.get(self.kind, 0.0)


TASKS: tuple[Task, ...] = tuple(Task(kind, c) for kind in TASK_KINDS for c in range(len(COLOURS)))
"""All 12 tasks by task id."""
INSTRUCTIONS: tuple[str, ...] = tuple(task.instruction for task in TASKS)
"""Instruction in words by task id."""


@dataclass(frozen=True)
class InitialState:
    """What an initial-state id stands for."""

    task_id: int
    """Index into :data:`TASKS`, 0..11."""
    positions: np.ndarray
    """Block centres, float64 ``[3, 3]`` [m], rows red, green, blue."""
    yaw: np.ndarray
    """Rotation of the blocks about z, float64 ``[3]`` [rad], in [-0.2, 0.2]."""


def initial_state(init_state_id: int) -> InitialState:
    """Draw the initial state that an id names; equal ids give equal states in any process.

    The kind is uniform over reach, push and pick (push is split evenly into left and right) and
    the colour over the three blocks. The layout does not depend on the task, so the image alone
    does not tell what is asked: blocks lie at least 6 cm apart in y, in random colour order, which
    leaves a free lane along x beside every block.

    Raises:
        ValueError: a negative id.
    """
    if init_state_id < 0:
        raise ValueError(
            f"init_state_id is {init_state_id}, must be >= 0: take ids from init_state_ids()"
        )
    rng = np.random.default_rng(int(init_state_id))
    group, side, colour = (int(rng.integers(n)) for n in (3, 2, 3))
    kind = (0, 1 + side, 3)[group]
    slack = 2 * (_Y_RANGE - _Y_GAP)
    lanes = -_Y_RANGE + np.sort(rng.uniform(0.0, slack, 3)) + _Y_GAP * np.arange(3)
    positions = np.empty((3, 3))
    positions[:, 0] = rng.uniform(-_X_RANGE, _X_RANGE, 3)
    positions[:, 1] = rng.permutation(lanes)
    positions[:, 2] = BLOCK_HALF
    yaw = rng.uniform(-_YAW_RANGE, _YAW_RANGE, 3)
    return InitialState(kind * len(COLOURS) + colour, positions, yaw)


def init_state_ids(split: str, start: int, count: int) -> range:
    """Return ``count`` consecutive initial-state ids of a split, from its ``start``-th on.

    Args:
        split: Key of :data:`SPLITS`.
        start: Offset inside the split, >= 0.
        count: How many ids, >= 1.

    Raises:
        ValueError: unknown split, or the ids would leave the split.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, must be one of {sorted(SPLITS)}: correct the name")
    ids = SPLITS[split]
    if start < 0:
        raise ValueError(f"start is {start}, must be >= 0: count from the split's beginning")
    if count < 1:
        raise ValueError(f"count is {count}, must be >= 1: ask for at least one id")
    if start + count > len(ids):
        raise ValueError(
            f"start + count is {start + count}, split {split!r} holds {len(ids)} ids: lower one "
            "of them"
        )
    return ids[start : start + count]


def evaluate(
    task: Task, tip: np.ndarray, blocks: np.ndarray, start: np.ndarray
) -> tuple[bool, bool]:
    """Judge a state.

    Args:
        task: The episode's task.
        tip: Gripper tip, ``[3]`` [m].
        blocks: Block centres now, ``[3, 3]`` [m].
        start: Block centres at the start of the episode, ``[3, 3]`` [m].

    Returns:
        ``(success, failure)``; at most one is true (failure wins).
    """
    c = task.colour
    moved = blocks - start
    squared = (moved * moved).sum(axis=1)
    failure = bool(max(squared[c - 1], squared[c - 2]) > WRONG_MOVE_LIMIT**2)
    if task.kind == "reach":
        offset = blocks - tip
        offset[:, 2] += REACH_HEIGHT
        reached = (offset * offset).sum(axis=1) < REACH_RADIUS**2
        failure = failure or bool(reached.sum() > reached[c])
        return bool(reached[c]) and not failure, failure
    if task.kind == "pick_up":
        return bool(blocks[c, 2] > LIFT_HEIGHT) and not failure, failure
    along = float(moved[c, 0]) * task.direction
    failure = failure or along < -WRONG_MOVE_LIMIT or abs(moved[c, 1]) > PUSH_SIDEWAYS_LIMIT
    return along > PUSH_DISTANCE and not failure, bool(failure)
