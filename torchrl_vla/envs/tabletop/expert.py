"""Scripted expert of the tabletop suite: a controller without memory.

Every call looks only at the present physics state, so the expert recovers from noise and slips:
it simply finds itself in an earlier phase again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchrl_vla.envs.tabletop.scene import BLOCK_HALF, WORKSPACE_HIGH
from torchrl_vla.envs.tabletop.tasks import REACH_HEIGHT, Task

MAX_DELTA = 0.02
"""Largest change of the tip's target position per axis and control step [m]."""
OPEN, CLOSED = 1.0, -1.0

_TRAVEL_HEIGHT = 0.11
_CLEAR_HEIGHT = 0.07
_GRASP_HEIGHT = 0.016
_PUSH_HEIGHT = 0.018
_PUSH_GAP = 0.05
_PUSH_TOUCH = 0.036


@dataclass(frozen=True)
class ExpertView:
    """What the expert may see: privileged simulator state, all in metres."""

    tip: np.ndarray
    """Gripper tip, ``[3]``."""
    target: np.ndarray
    """Position that the tip's servo is heading for, ``[3]``."""
    fingers: np.ndarray
    """Finger slide positions, ``[2]``; 0 closed."""
    block: np.ndarray
    """Centre of the block that the task names, ``[3]``."""


def expert_action(task: Task, view: ExpertView) -> np.ndarray:
    """Return the expert's next action.

    Args:
        task: The episode's task.
        view: The present state.

    Returns:
        float32 ``[4]`` in [-1, 1]: x, y, z change of the target in units of 2 cm, gripper opening.
    """
    if task.kind == "reach":
        goal, gripper = _reach(view)
    elif task.kind == "pick_up":
        goal, gripper = _pick(view)
    else:
        goal, gripper = _push(view, task.direction)
    action = np.empty(4, np.float32)
    action[:3] = (goal - view.target) / MAX_DELTA
    action[3] = gripper
    return np.clip(action, -1.0, 1.0, out=action)


def _above(view: ExpertView, x: float, y: float) -> np.ndarray:
    """Goal on the way to ``(x, y)`` that passes over every block: up first, then across."""
    if view.tip[2] < _CLEAR_HEIGHT:
        return np.array([view.tip[0], view.tip[1], _TRAVEL_HEIGHT])
    return np.array([x, y, _TRAVEL_HEIGHT])


def _reach(view: ExpertView) -> tuple[np.ndarray, float]:
    """Travel above the other blocks' reach spheres, then come down on the named one."""
    x, y, z = view.block
    if np.hypot(view.tip[0] - x, view.tip[1] - y) > 0.025:
        return np.array([x, y, _TRAVEL_HEIGHT]), CLOSED
    return np.array([x, y, z + REACH_HEIGHT]), CLOSED


def _pick(view: ExpertView) -> tuple[np.ndarray, float]:
    """Hover, descend with open fingers, close, lift."""
    x, y, z = view.block
    dx, dy, dz = view.block - view.tip
    around = abs(dx) < 0.014 and abs(dy) < 0.012
    inside = abs(dx) < 0.02 and abs(dy) < 0.018 and dz > -0.012
    opening = float(view.fingers.sum())
    if inside and opening < 2.25 * BLOCK_HALF:
        return np.array([view.tip[0], view.tip[1], WORKSPACE_HIGH[2]]), CLOSED
    if around and dz > -0.006:
        return np.array([x, y, _GRASP_HEIGHT]), CLOSED
    if around or inside or (abs(dx) < 0.014 and abs(dy) < 0.02 and view.tip[2] < z + 0.03):
        return np.array([x, y, _GRASP_HEIGHT]), OPEN
    return _above(view, x, y), OPEN


def _push(view: ExpertView, direction: float) -> tuple[np.ndarray, float]:
    """Travel beside the block, descend behind it with closed fingers, drive it."""
    x, y, _ = view.block
    behind = (x - view.tip[0]) * direction
    aside = abs(view.tip[1] - y)
    low = view.tip[2] < 0.03
    if low and aside < 0.012 and behind > 0.02:
        return np.array([view.target[0] + direction * MAX_DELTA, y, _PUSH_HEIGHT]), CLOSED
    beside_x = x - direction * _PUSH_GAP
    if behind > _PUSH_TOUCH and aside < 0.03:
        at_start = abs(behind - _PUSH_GAP) < 0.015
        height = _PUSH_HEIGHT if at_start or low else _TRAVEL_HEIGHT
        return np.array([beside_x, y, height]), CLOSED
    return _above(view, beside_x, y), CLOSED
