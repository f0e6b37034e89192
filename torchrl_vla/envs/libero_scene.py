"""One built LIBERO task: placing, stepping, reading and drawing it.

What robosuite would do at every reset (build the scene, make a render context) happens once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from torchrl_vla.envs.gl import import_mujoco
from torchrl_vla.envs.libero_package import LiberoTask, load
from torchrl_vla.envs.offscreen import SceneRenderer

mujoco = import_mujoco()

CONTROL_HZ = 20
SETTLE_STEPS = 10
"""Steps at the start of an episode in which the arm holds still and objects come to rest."""

_HOLD = np.array([0, 0, 0, 0, 0, 0, -1.0])
_COLLISION_GROUP = 0


@contextmanager
def _numpy_seed(seed: int | np.ndarray) -> Iterator[None]:
    """Seed NumPy's global generator, which the package draws from, and put it back."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


class Scene:
    """One built task: lent to a simulator for an episode, then used again."""

    def __init__(self, task_id: int, task: LiberoTask, numba_cache: str | None) -> None:
        package = load(numba_cache)
        self.task_id, self.task = task_id, task
        self._axis_angle = package["axis_angle"]
        self._unlucky = package["RandomizationError"]
        problem = package["problem_of"](str(task.bddl_file))["problem_name"]
        with _numpy_seed(0):  # what it draws is drawn again by every reset
            self.env = package["problems"][problem](
                str(task.bddl_file),
                robots=["Panda"],
                controller_configs=package["controller"],
                gripper_types="default",
                initialization_noise=None,
                use_camera_obs=False,
                has_offscreen_renderer=False,
                hard_reset=False,
                ignore_done=True,
                control_freq=CONTROL_HZ,
            )
        used = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
        for name in set(self.env.observation_names) - set(used):
            self.env.modify_observable(name, "enabled", False)
        self.model, self.data = self.env.sim.model._model, self.env.sim.data._data
        self.observation: dict[str, np.ndarray] = {}
        self.renderers: dict[tuple[int, bool], SceneRenderer] = {}

    def reset(self, seed: int | np.ndarray, state: np.ndarray | None) -> None:
        """Place everything anew: drawn with ``seed``, then, if given, as ``state`` says; settle."""
        with _numpy_seed(seed):
            self._place()
        # Opening and closing is by increments that the package keeps over episodes.
        self.env.robots[0].gripper.current_action = np.zeros(1)
        if state is not None:
            self.env.sim.set_state_from_flattened(state)
            self.env.sim.forward()
        self.env._post_process()
        for _ in range(SETTLE_STEPS):
            self.step(_HOLD)

    def _place(self, tries: int = 100) -> None:
        for _ in range(tries):
            try:
                self.env.reset()
            except self._unlucky:
                continue
            return
        raise RuntimeError(f"no collision-free layout of {self.task.name} in {tries} draws")

    def step(self, action: np.ndarray) -> bool:
        """Execute one control step; return whether the task is solved."""
        self.observation, _, solved, _ = self.env.step(action)
        return bool(solved)

    def state(self) -> np.ndarray:
        """Hand position, rotation vector and finger positions, float32 ``[8]``."""
        seen = self.observation
        rotation = self._axis_angle(seen["robot0_eef_quat"].copy())
        parts = (seen["robot0_eef_pos"], rotation, seen["robot0_gripper_qpos"])
        return np.concatenate(parts).astype(np.float32)

    def picture(self, camera: str, size: int, high_quality: bool = False) -> np.ndarray:
        """Draw a camera as published policies see it, uint8 RGB ``[size, size, 3]``.

        robosuite gives pictures bottom row first; turned by 180 degrees they are upright and
        mirrored, and so are ours.
        """
        renderer = self.renderers.get((size, high_quality))
        if renderer is None:
            renderer = SceneRenderer(
                self.model, size, hidden_groups=[_COLLISION_GROUP], high_quality=high_quality
            )
            self.renderers[size, high_quality] = renderer
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)
        return renderer.render(self.data, int(self.model.camera(camera).id))[:, ::-1]

    def close_renderers(self) -> None:
        for renderer in self.renderers.values():
            renderer.close()
        self.renderers.clear()

    def close(self) -> None:
        self.close_renderers()
        self.env.close()
