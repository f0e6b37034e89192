"""The embedded language-conditioned tabletop suite: N MuJoCo simulators in one process."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import numpy as np

from torchrl_vla.envs.gl import OffscreenRenderer, import_mujoco
from torchrl_vla.envs.simulator import SimulationError, StepOutcome, SuiteMeta
from torchrl_vla.envs.tabletop import arm, gantry, scene
from torchrl_vla.envs.tabletop.embodiment import Embodiment, EmbodimentName
from torchrl_vla.envs.tabletop.tasks import (
    INSTRUCTIONS,
    SPLITS,
    TASKS,
    evaluate,
    initial_state,
)

mujoco = import_mujoco()

MAX_STEPS = 48
"""Control steps to solve a task in: running out is a failure, and the state has a clock.

A limit that the state shows is part of the task (Pardo et al. 2018, arXiv:1712.00378), so the last
step is terminal; an environment that cuts earlier truncates, as always.
"""
BODIES = {"gantry": (gantry, gantry.Gantry), "arm": (arm, arm.Arm)}
"""Per embodiment, the file with the names of its numbers and the class."""
_BLOCK_QPOS = 7 * len(scene.COLOURS)
_BAD = [
    int(w)
    for w in (
        mujoco.mjtWarning.mjWARN_BADQPOS,
        mujoco.mjtWarning.mjWARN_BADQVEL,
        mujoco.mjtWarning.mjWARN_BADQACC,
        mujoco.mjtWarning.mjWARN_BADCTRL,
    )
]


def suite_meta(
    image_size: int = 64, second_camera: bool = False, embodiment: EmbodimentName = "gantry"
) -> SuiteMeta:
    """Describe the suite without building it."""
    names = BODIES[embodiment][0]
    return SuiteMeta(
        name="tabletop" if embodiment == "gantry" else f"tabletop_{embodiment}",
        instructions=INSTRUCTIONS,
        task_names=tuple(task.kind for task in TASKS),
        cameras=scene.CAMERA_NAMES if second_camera else scene.CAMERA_NAMES[:1],
        image_size=image_size,
        state_names=(*names.STATE_NAMES, "time used [fraction of the limit]"),
        action_names=names.ACTION_NAMES,
        max_steps=MAX_STEPS,
        control_hz=scene.CONTROL_HZ,
    )


def _check_choices(image_size: int, render_quality: str, embodiment: str) -> None:
    if image_size not in scene.IMAGE_SIZES:
        raise ValueError(
            f"image_size is {image_size}, must be one of {scene.IMAGE_SIZES}: choose one"
        )
    if render_quality not in ("fast", "high"):
        raise ValueError(
            f"render_quality is {render_quality!r}, must be 'fast' or 'high': choose one"
        )
    if embodiment not in BODIES:
        raise ValueError(f"embodiment is {embodiment!r}, must be one of {tuple(BODIES)}: choose")


class Tabletop:
    """N tabletop simulators that share one model and one renderer (see ``Simulators``).

    The renderer is built by the first call that renders, in the process that makes it; physics
    alone needs no OpenGL. Pickling keeps the configuration only: a copy starts without episodes.

    Args:
        num_envs: Number of simulators, >= 1.
        image_size: Image height and width [px], one of 64, 96, 128, 224.
        second_camera: Add a camera on the gripper, looking down.
        render_quality: ``"fast"`` for observations, ``"high"`` adds shadows and anti-aliasing
            (about 80 times slower on a CPU).
        embodiment: ``"gantry"`` (4 action numbers) or ``"arm"`` (7; see ``arm.py``).

    Raises:
        ValueError: an argument outside its limits.
    """

    def __init__(
        self,
        num_envs: int,
        image_size: int = 64,
        second_camera: bool = False,
        render_quality: Literal["fast", "high"] = "fast",
        embodiment: EmbodimentName = "gantry",
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}, must be >= 1: ask for at least one")
        _check_choices(image_size, render_quality, embodiment)
        self.meta = suite_meta(image_size, second_camera, embodiment)
        self.named_block = tuple(task.colour for task in TASKS)
        """Block that each task id names (privileged labels of ``algo=ground``)."""
        self.asked_motion = tuple((task.direction, float(task.kind == "pick_up")) for task in TASKS)
        """Sideways and upward motion that each task id asks for (privileged labels)."""
        self.num_envs = num_envs
        self._config = (num_envs, image_size, second_camera, render_quality, embodiment)
        self._high_quality = render_quality == "high"
        mjcf = scene.build_mjcf(second_camera, embodiment)
        self._model = mujoco.MjModel.from_xml_string(mjcf)
        self._data = [mujoco.MjData(self._model) for _ in range(num_envs)]
        self._robots: Embodiment = BODIES[embodiment][1](self._model, self._data)
        self._block_qpos = [data.qpos[-_BLOCK_QPOS:].reshape(3, 7) for data in self._data]
        self._blocks = [qpos[:, :3] for qpos in self._block_qpos]
        self._start = np.zeros((num_envs, 3, 3))
        self._task_ids = [-1] * num_envs
        self._steps = [0] * num_envs
        self._renderer: OffscreenRenderer | None = None
        self._film: tuple[int, OffscreenRenderer] | None = None

    def __reduce__(self) -> tuple[type[Tabletop], tuple[int, int, bool, str, str]]:
        """Pickle the configuration, never the simulators or the renderer."""
        return type(self), self._config

    def reset(self, index: int, init_state_id: int) -> None:
        """Start the episode that ``init_state_id`` names in simulator ``index``.

        Raises:
            ValueError: a negative ``init_state_id``.
        """
        initial = initial_state(init_state_id)
        data, blocks = self._data[index], self._block_qpos[index]
        mujoco.mj_resetData(self._model, data)
        self._robots.reset(index)
        blocks[:, :3] = initial.positions
        blocks[:, 3] = np.cos(0.5 * initial.yaw)
        blocks[:, 4:6] = 0.0
        blocks[:, 6] = np.sin(0.5 * initial.yaw)
        mujoco.mj_forward(self._model, data)
        data.qacc_warmstart[:] = 0.0
        self._start[index] = initial.positions
        self._task_ids[index] = initial.task_id
        self._steps[index] = 0

    def task_id(self, index: int) -> int:
        """Index into ``meta.instructions`` of the running episode, 0..11.

        Raises:
            RuntimeError: the simulator was never reset.
        """
        task_id = self._task_ids[index]
        if task_id < 0:
            raise RuntimeError(f"simulator {index} has no episode: call reset({index}, id) first")
        return task_id

    def step(self, index: int, action: np.ndarray) -> StepOutcome:
        """Execute one control step (50 ms).

        Args:
            index: Simulator, 0..num_envs-1.
            action: float32 ``[A]`` in [-1, 1] (values outside are clipped), as
                ``meta.action_names`` says.

        Returns:
            Reward 1 on success, else 0.

        Raises:
            ValueError: ``action`` has another shape or is not finite.
            SimulationError: the physics state is not finite; reset before the next step.
            RuntimeError: the simulator was never reset.
        """
        task = TASKS[self.task_id(index)]
        action = np.asarray(action, np.float64)
        size = self.meta.action_dim
        if action.shape != (size,) or not np.isfinite(action).all():
            raise ValueError(f"action is {action}, must be {size} finite numbers: check the policy")
        self._robots.act(index, np.clip(action, -1.0, 1.0))
        mujoco.mj_step(self._model, self._data[index], nstep=scene.SUBSTEPS)
        self._check_finite(index)
        success, failure = evaluate(
            task, self._robots.tip(index), self._blocks[index], self._start[index]
        )
        self._steps[index] += 1
        out_of_time = self._steps[index] >= MAX_STEPS
        return StepOutcome(float(success), success or failure or out_of_time, success)

    def _check_finite(self, index: int) -> None:
        """Raise ``SimulationError`` if the physics of a simulator diverged; void the episode."""
        data = self._data[index]
        finite = np.isfinite(data.qpos).all() and np.isfinite(data.qvel).all()
        if finite and not data.warning.number[_BAD].any():
            return
        self._task_ids[index] = -1
        raise SimulationError(
            f"physics of simulator {index} diverged at {data.time:.2f} s: discard the episode "
            "and reset"
        )

    def state(self, index: int) -> np.ndarray:
        """Proprioception, float32 ``[S]``: ``meta.state_names`` says what; the clock is last."""
        state = np.empty(self.meta.state_dim, np.float32)
        state[:-1] = self._robots.state(index)
        state[-1] = self._steps[index] / MAX_STEPS
        return state

    def expert_action(self, index: int) -> np.ndarray:
        """The scripted expert's next action, float32 ``[A]`` in [-1, 1]."""
        task = TASKS[self.task_id(index)]
        return self._robots.expert_action(index, task, self._blocks[index][task.colour])

    def block_positions(self, index: int) -> np.ndarray:
        """Centres of the red, green and blue block, float32 ``[3, 3]`` [m] (privileged)."""
        return self._blocks[index].astype(np.float32)

    def target_position(self, index: int) -> np.ndarray:
        """Centre of the block that the instruction names, float32 ``[3]`` [m] (privileged)."""
        return self.block_positions(index)[TASKS[self.task_id(index)].colour]

    def render(self, index: int) -> np.ndarray:
        """Return new uint8 RGB images ``[K, 3, h, w]``, one per camera of ``meta.cameras``.

        Raises:
            RuntimeError: no usable OpenGL backend, or a renderer inherited by ``fork``.
        """
        if self._renderer is None:
            self._renderer = OffscreenRenderer(
                self._model, self.meta.image_size, high_quality=self._high_quality
            )
        size, data = self.meta.image_size, self._pose_geometry(index)
        images = np.empty((len(self.meta.cameras), 3, size, size), np.uint8)
        for camera in range(len(images)):
            images[camera] = self._renderer.render(data, camera).transpose(2, 0, 1)
        return images

    def render_frame(self, index: int, size: int = 480) -> np.ndarray:
        """Return a high-quality uint8 RGB frame ``[size, size, 3]`` of the front camera.

        For videos: shadows and anti-aliasing whatever ``render_quality`` is. Uses a renderer of
        its own, kept until ``size`` changes.

        Raises:
            ValueError: ``size`` is not in 16..2048.
            RuntimeError: as :meth:`render`.
        """
        if not 16 <= size <= 2048:
            raise ValueError(f"size is {size}, must be in 16..2048: choose a smaller video")
        if self._film is None or self._film[0] != size:
            if self._film is not None:
                self._film[1].close()
            self._film = size, OffscreenRenderer(self._model, size, high_quality=True)
        return self._film[1].render(self._pose_geometry(index), 0).copy()

    def _pose_geometry(self, index: int) -> Any:
        """Bring body and camera poses up to date with ``qpos`` (a step leaves them one behind)."""
        data = self._data[index]
        mujoco.mj_kinematics(self._model, data)
        mujoco.mj_camlight(self._model, data)
        return data

    def close(self) -> None:
        """Free render contexts. Idempotent; a later render builds a new one."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        if self._film is not None:
            self._film[1].close()
            self._film = None


class TabletopSuite:
    """The suite as a picklable description (see ``Suite``); arguments as :class:`Tabletop`."""

    splits = SPLITS

    def __init__(
        self,
        image_size: int = 64,
        second_camera: bool = False,
        render_quality: Literal["fast", "high"] = "fast",
        embodiment: EmbodimentName = "gantry",
    ) -> None:
        _check_choices(image_size, render_quality, embodiment)
        self.meta = suite_meta(image_size, second_camera, embodiment)
        self._config = (image_size, second_camera, render_quality, embodiment)

    def assets_sha256(self) -> str:
        """Return the hash of the scene's MJCF text."""
        _, second_camera, _, embodiment = self._config
        return hashlib.sha256(scene.build_mjcf(second_camera, embodiment).encode()).hexdigest()

    def simulators(self, num_envs: int) -> Tabletop:
        """Build ``num_envs`` simulators in this process."""
        return Tabletop(num_envs, *self._config)
