"""What the suite asks of a robot body: the gantry and the arm answer it, each in its own file.

A body owns the leading entries of ``qpos`` and all of ``ctrl``; blocks, tasks, time and rendering
are the suite's business. Bodies carry N robots, one per simulator, like the suite.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from torchrl_vla.envs.tabletop.tasks import Task

EmbodimentName = Literal["gantry", "arm"]


class Embodiment(Protocol):
    """N robots of one kind in N simulators that share a model."""

    def reset(self, index: int) -> None:
        """Put robot ``index`` into its start pose (``mj_forward`` follows)."""

    def act(self, index: int, action: np.ndarray) -> None:
        """Turn an action, float64 ``[A]`` in [-1, 1], into set-points of the actuators."""

    def tip(self, index: int) -> np.ndarray:
        """Gripper tip after the last step, float64 ``[3]`` [m]."""

    def state(self, index: int) -> np.ndarray:
        """Proprioception after the last step, ``[S - 1]``; the suite appends the clock."""

    def expert_action(self, index: int, task: Task, block: np.ndarray) -> np.ndarray:
        """Return the expert's action, float32 ``[A]``; ``block`` is the named one's centre [m]."""
