"""The gantry: three slides that carry the gripper, so that joint positions are the tip's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrl_vla.envs.tabletop import scene
from torchrl_vla.envs.tabletop.expert import MAX_DELTA, ExpertView, expert_action
from torchrl_vla.envs.tabletop.tasks import Task

STATE_NAMES = ("ee_x [m]", "ee_y [m]", "ee_z [m]", "finger_left [m]", "finger_right [m]")
ACTION_NAMES = (
    "dx of the target, 1 = 2 cm to the right",
    "dy of the target, 1 = 2 cm away from the camera",
    "dz of the target, 1 = 2 cm up",
    "gripper opening, -1 closed, 1 open",
)
_N = scene.N_GRIPPER_QPOS


class Gantry:
    """N gantries (see ``Embodiment``).

    Args:
        model: The scene's ``MjModel``.
        data: One ``MjData`` per simulator.
    """

    def __init__(self, model: Any, data: Sequence[Any]) -> None:
        self._qpos = [d.qpos for d in data]
        self._ctrl = [d.ctrl for d in data]

    def reset(self, index: int) -> None:
        """Put the tip at ``HOME`` with half-open fingers."""
        qpos, ctrl = self._qpos[index], self._ctrl[index]
        qpos[:3] = ctrl[:3] = scene.HOME
        qpos[3:_N] = ctrl[3:] = 0.5 * scene.FINGER_OPEN

    def act(self, index: int, action: np.ndarray) -> None:
        """Move the tip's target inside the workspace and set the opening; action ``[4]``."""
        ctrl = self._ctrl[index]
        ctrl[:3] = np.clip(
            ctrl[:3] + MAX_DELTA * action[:3], scene.WORKSPACE_LOW, scene.WORKSPACE_HIGH
        )
        ctrl[3:] = 0.5 * (action[3] + 1.0) * scene.FINGER_OPEN

    def tip(self, index: int) -> np.ndarray:
        """Gripper tip, float64 ``[3]`` [m]."""
        return self._qpos[index][:3]

    def state(self, index: int) -> np.ndarray:
        """Tip and finger positions, float64 ``[5]`` [m]."""
        return self._qpos[index][:_N]

    def expert_action(self, index: int, task: Task, block: np.ndarray) -> np.ndarray:
        """Return the expert's action, float32 ``[4]``."""
        qpos = self._qpos[index]
        view = ExpertView(qpos[:3], self._ctrl[index][:3], qpos[3:_N], block)
        return expert_action(task, view)
