"""The arm: seven revolute joints behind the table, driven by changes of the gripper's pose.

Action as in LIBERO and robosuite's ``OSC_POSE``: change of position, change of orientation as an
axis-angle vector in world axes, gripper (-1 open, 1 closed), all in [-1, 1]. Differs: 1 is 2 cm and
0.1 rad per control step (robosuite: 5 cm and 0.5 rad, of which its soft controller reaches a part),
and the change moves the *target* pose, not the measured one, so that errors do not add up.

The target pose becomes joint set-points by damped least squares (Nakamura and Hanafusa 1986; Buss
2004, "Introduction to inverse kinematics", section on damped least squares) with a pull towards the
start posture in the one direction that does not move the gripper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrl_vla.envs.gl import import_mujoco
from torchrl_vla.envs.tabletop import scene
from torchrl_vla.envs.tabletop.expert import MAX_DELTA, ExpertView, expert_action
from torchrl_vla.envs.tabletop.tasks import Task

mujoco = import_mujoco()

STATE_NAMES = (
    "ee_x [m]",
    "ee_y [m]",
    "ee_z [m]",
    "ee_rx [rad], axis-angle from pointing straight down",
    "ee_ry [rad]",
    "ee_rz [rad]",
    "finger_left [m]",
    "finger_right [m]",
)
ACTION_NAMES = (
    "dx of the target, 1 = 2 cm to the right",
    "dy of the target, 1 = 2 cm away from the camera",
    "dz of the target, 1 = 2 cm up",
    "drx of the target, 1 = 0.1 rad about world x",
    "dry of the target, 1 = 0.1 rad about world y",
    "drz of the target, 1 = 0.1 rad about world z",
    "gripper, -1 open, 1 closed",
)
MAX_TURN = 0.1
"""Largest turn of the target about each axis and control step [rad]."""
MAX_TILT = 0.4
"""Largest turn of the target away from its start: straight down, fingers along x [rad]."""

_JOINTS = scene.N_ARM_JOINTS
_DAMPING = 0.01
_ITERATIONS = 2
_POSTURE_GAIN = 0.05
_MAX_JOINT_STEP = 0.3


class Arm:
    """N arms (see ``Embodiment``).

    Args:
        model: The scene's ``MjModel``.
        data: One ``MjData`` per simulator.
    """

    def __init__(self, model: Any, data: Sequence[Any]) -> None:
        self._model, self._data = model, data
        self._qpos = [d.qpos for d in data]
        self._ctrl = [d.ctrl for d in data]
        self._site = model.site("tip").id
        self._range = model.jnt_range[:_JOINTS].T.copy()
        self._scratch = mujoco.MjData(model)
        self._jacobian = np.zeros((6, model.nv))
        self._position = np.zeros((len(data), 3))
        self._turn = np.zeros((len(data), 4))

    def reset(self, index: int) -> None:
        """Put the arm into its start posture, the tip over the table's middle."""
        qpos, ctrl = self._qpos[index], self._ctrl[index]
        qpos[:_JOINTS] = ctrl[:_JOINTS] = scene.ARM_HOME
        qpos[_JOINTS : _JOINTS + 2] = ctrl[_JOINTS:] = 0.5 * scene.FINGER_OPEN
        self._position[index] = scene.HOME
        self._turn[index] = (1.0, 0.0, 0.0, 0.0)

    def act(self, index: int, action: np.ndarray) -> None:
        """Move the target pose inside its limits and set the joints for it; action ``[7]``.

        The position stays in the workspace, the orientation within :data:`MAX_TILT`.
        """
        position = self._position[index]
        position[:] = np.clip(
            position + MAX_DELTA * action[:3], scene.WORKSPACE_LOW, scene.WORKSPACE_HIGH
        )
        turn = _multiply(_quaternion(MAX_TURN * action[3:6]), self._turn[index])
        tilt = _rotation_vector(turn)
        angle = np.sqrt(tilt @ tilt)
        self._turn[index] = turn if angle <= MAX_TILT else _quaternion(tilt * (MAX_TILT / angle))
        ctrl = self._ctrl[index]
        ctrl[:_JOINTS] = self._joints_for(position, self._turn[index], ctrl[:_JOINTS])
        ctrl[_JOINTS:] = 0.5 * (1.0 - action[6]) * scene.FINGER_OPEN

    def _joints_for(self, position: np.ndarray, turn: np.ndarray, joints: np.ndarray) -> np.ndarray:
        """Joint angles that bring the tip to a pose, ``[7]``, searched from ``joints``."""
        data, jacobian = self._scratch, self._jacobian
        joints = joints.copy()
        error = np.empty(6)
        for _ in range(_ITERATIONS):
            data.qpos[:_JOINTS] = joints
            mujoco.mj_kinematics(self._model, data)
            mujoco.mj_comPos(self._model, data)
            error[:3] = position - data.site_xpos[self._site]
            error[3:] = _rotation_vector(_multiply(turn, _conjugate(self._orientation(data))))
            mujoco.mj_jacSite(self._model, data, jacobian[:3], jacobian[3:], self._site)
            j = jacobian[:, :_JOINTS]
            inverse = j.T @ np.linalg.inv(j @ j.T + _DAMPING**2 * np.eye(6))
            pull = _POSTURE_GAIN * (scene.ARM_HOME - joints)
            step = inverse @ error + pull - inverse @ (j @ pull)
            joints = np.clip(
                joints + np.clip(step, -_MAX_JOINT_STEP, _MAX_JOINT_STEP), *self._range
            )
        return joints

    def _orientation(self, data: Any) -> np.ndarray:
        out = np.empty(4)
        mujoco.mju_mat2Quat(out, data.site_xmat[self._site])
        return out

    def _fresh(self, index: int) -> Any:
        """Bring the tip's pose up to date with ``qpos`` (a step leaves it one behind)."""
        data = self._data[index]
        mujoco.mj_kinematics(self._model, data)
        return data

    def tip(self, index: int) -> np.ndarray:
        """Gripper tip, float64 ``[3]`` [m]."""
        return self._fresh(index).site_xpos[self._site]

    def state(self, index: int) -> np.ndarray:
        """Tip position [m], axis-angle from straight down [rad], fingers [m]; float64 ``[8]``."""
        data = self._fresh(index)
        turn = _rotation_vector(self._orientation(data))
        fingers = self._qpos[index][_JOINTS : _JOINTS + 2]
        return np.concatenate([data.site_xpos[self._site], turn, fingers])

    def expert_action(self, index: int, task: Task, block: np.ndarray) -> np.ndarray:
        """Return the expert's action, float32 ``[7]``: the gantry's, held upright."""
        fingers = self._qpos[index][_JOINTS : _JOINTS + 2]
        view = ExpertView(self.tip(index), self._position[index], fingers, block)
        slides = expert_action(task, view)
        action = np.empty(7, np.float32)
        action[:3] = slides[:3]
        action[3:6] = np.clip(-_rotation_vector(self._turn[index]) / MAX_TURN, -1.0, 1.0)
        action[6] = -slides[3]
        return action


def _quaternion(vector: np.ndarray) -> np.ndarray:
    """Turn an axis-angle vector ``[3]`` into a unit quaternion ``[4]``, w first."""
    angle = float(np.sqrt(vector @ vector))
    axis = vector / angle if angle > 1e-12 else np.array([1.0, 0.0, 0.0])
    out = np.empty(4)
    mujoco.mju_axisAngle2Quat(out, axis, angle)
    return out


def _rotation_vector(quaternion: np.ndarray) -> np.ndarray:
    """Turn a unit quaternion into the shortest axis-angle vector ``[3]``."""
    out = np.empty(3)
    mujoco.mju_quat2Vel(out, quaternion, 1.0)
    return out


def _multiply(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    out = np.empty(4)
    mujoco.mju_mulQuat(out, left, right)
    return out


def _conjugate(quaternion: np.ndarray) -> np.ndarray:
    return quaternion * np.array([1.0, -1.0, -1.0, -1.0])
