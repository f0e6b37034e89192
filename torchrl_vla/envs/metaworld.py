"""Meta-World's 50 manipulation tasks as one of our suites, with our renderer and sentences.

What the room takes from the package: scenes, rewards, success and the scripted experts (Yu et al.
2019, arXiv:1910.10897). What it adds: instructions, a proprioceptive state without the positions of
objects and goal (a policy must see those), initial states by id, and rendering without shadows and
multi-sampling (``benchmarks/environments.py`` measures what that buys).

Importing this module imports no ``metaworld``; building simulators does.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from torchrl_vla.envs.assets import hash_folder
from torchrl_vla.envs.divergence import diverged
from torchrl_vla.envs.extras import require
from torchrl_vla.envs.gl import OffscreenRenderer, import_mujoco
from torchrl_vla.envs.metaworld_tasks import SENTENCES, choose_tasks
from torchrl_vla.envs.simulator import SimulationError, StepOutcome, SuiteMeta
from torchrl_vla.envs.splits import SPLITS, position_in_split

mujoco = import_mujoco()

CAMERAS = ("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV")
"""Cameras of the package's scenes. The corner ones hang upside down; their images are turned."""
PATH_LIMIT = 500
"""Control steps after which the package itself refuses to go on."""
CONTROL_HZ = 80.0
"""Control steps per simulated second: 5 physics steps of 2.5 ms each."""
FINGER_SPAN = 0.1
"""Distance between the fingers that the package's observation calls 1 [m]."""


def suite_meta(
    tasks: tuple[str, ...],
    cameras: tuple[str, ...] = ("corner4",),
    image_size: int = 128,
    max_steps: int = PATH_LIMIT,
) -> SuiteMeta:
    """Describe the suite without building it; needs no ``metaworld``."""
    return SuiteMeta(
        name="metaworld",
        instructions=tuple(SENTENCES[task] for task in tasks),
        task_names=tasks,
        cameras=cameras,
        image_size=image_size,
        state_names=("hand_x [m]", "hand_y [m]", "hand_z [m]", "distance between the fingers [m]"),
        action_names=(
            "dx of the hand's target, 1 = 1 cm",
            "dy of the hand's target, 1 = 1 cm",
            "dz of the hand's target, 1 = 1 cm",
            "gripper force, -1 opens, 1 closes",
        ),
        max_steps=max_steps,
        control_hz=CONTROL_HZ,
    )


def _check(cameras: Sequence[str], image_size: int, reward: str, max_steps: int) -> None:
    unknown = [name for name in cameras if name not in CAMERAS]
    if unknown or not cameras:
        raise ValueError(f"cameras is {list(cameras)}; choose at least one of {CAMERAS}")
    if not 32 <= image_size <= 1024:
        raise ValueError(f"image_size is {image_size}, must be in 32..1024; 128 and 224 are usual")
    if reward not in ("sparse", "dense"):
        raise ValueError(f"reward is {reward!r}, must be 'sparse' or 'dense': choose one")
    if not 1 <= max_steps <= PATH_LIMIT:
        raise ValueError(
            f"max_steps is {max_steps}, must be in 1..{PATH_LIMIT}: the package stops there"
        )


@dataclass
class _Arena:
    """One environment of the package: lent to a simulator for an episode, then used again."""

    task_id: int
    env: Any
    expert: Any
    observation: np.ndarray
    """The package's observation, float64 ``[39]``; privileged, for the expert only."""


def _build_arena(task_id: int, task: str) -> _Arena:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.policies import ENV_POLICY_MAP

    env = ALL_V3_ENVIRONMENTS[task]()
    # What the package's multi-task benchmarks set through a pickled task: the expert sees the goal.
    env._set_task_called, env._partially_observable = True, False
    env.__dict__.pop("sawyer_observation_space", None)
    env.seeded_rand_vec = True
    return _Arena(task_id, env, ENV_POLICY_MAP[task](), np.zeros(39))


class MetaWorld:
    """N Meta-World simulators in one process (see ``Simulators``); any mix of tasks.

    Environments are built when a task first comes up and shared over time; there is one renderer
    per task, built by the first call that renders. Pickling keeps the configuration only.

    Differs: the package never ends an episode early; here the first success does (``terminated``).
    Running out of steps is a truncation, since nothing in the state shows the time.

    Args:
        num_envs: number of simulators, >= 1.
        task: a task name, ``"mt10"``, ``"mt50"`` or a list of task names.
        cameras: cameras of the package, in the order of the image tensor.
        image_size: image height and width [px], 32..1024.
        reward: ``"sparse"`` is 1 on success, else 0; ``"dense"`` the package's shaped reward in
            [0, 10] per control step.
        max_steps: control steps until truncation, 1..500.

    Raises:
        ValueError: an argument outside its limits.
        ModuleNotFoundError: ``metaworld`` is not installed.
    """

    def __init__(
        self,
        num_envs: int,
        task: str | Sequence[str] = "drawer-open-v3",
        cameras: Sequence[str] = ("corner4",),
        image_size: int = 128,
        reward: Literal["sparse", "dense"] = "sparse",
        max_steps: int = PATH_LIMIT,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}, must be >= 1: ask for at least one")
        _check(cameras, image_size, reward, max_steps)
        require("metaworld", "metaworld")
        self._tasks = choose_tasks(task)
        self.meta = suite_meta(self._tasks, tuple(cameras), image_size, max_steps)
        self.num_envs = num_envs
        self._config = (num_envs, self._tasks, tuple(cameras), image_size, reward, max_steps)
        self._dense = reward == "dense"
        self._arenas: list[_Arena | None] = [None] * num_envs
        self._idle: dict[int, list[_Arena]] = {i: [] for i in range(len(self._tasks))}
        self._renderers: dict[int, OffscreenRenderer] = {}
        self._film: tuple[int, int, OffscreenRenderer] | None = None

    def __reduce__(self) -> tuple[type[MetaWorld], tuple[Any, ...]]:
        """Pickle the configuration, never the simulators or the renderers."""
        return type(self), self._config

    def reset(self, index: int, init_state_id: int) -> None:
        """Start the episode that ``init_state_id`` names in simulator ``index``.

        Tasks take turns over consecutive ids of a split; object and goal positions are drawn, by
        the package's own rules, from a generator seeded with the id.

        Raises:
            ValueError: ``init_state_id`` is in no split.
        """
        task_id = position_in_split(init_state_id) % len(self._tasks)
        arena = self._lend(index, task_id)
        env = arena.env
        env.np_random = np.random.default_rng(init_state_id)
        # The package's reset runs its layout twice, so that nothing of the last episode is left in
        # the second. It needs the same draw in both, but some tasks draw again until objects are
        # apart and would never end with a frozen draw that is too close.
        env._freeze_rand_vec = False
        env.reset_model()
        env._freeze_rand_vec = True
        arena.observation = env.reset()[0]

    def _lend(self, index: int, task_id: int) -> _Arena:
        """Give simulator ``index`` an arena of a task; its last one becomes free."""
        old = self._arenas[index]
        if old is not None:
            self._idle[old.task_id].append(old)
            self._arenas[index] = None
        idle = self._idle[task_id]
        arena = idle.pop() if idle else _build_arena(task_id, self._tasks[task_id])
        self._arenas[index] = arena
        return arena

    def _arena(self, index: int) -> _Arena:
        arena = self._arenas[index]
        if arena is None:
            raise RuntimeError(f"simulator {index} has no episode: call reset({index}, id) first")
        return arena

    def task_id(self, index: int) -> int:
        """Index into ``meta.instructions`` of the running episode.

        Raises:
            RuntimeError: the simulator was never reset.
        """
        return self._arena(index).task_id

    def step(self, index: int, action: np.ndarray) -> StepOutcome:
        """Execute one control step (12.5 ms); ``action`` is float32 ``[4]`` in [-1, 1].

        Raises:
            SimulationError: the physics state is not finite; reset before the next step.
            RuntimeError: the simulator was never reset.
        """
        arena = self._arena(index)
        arena.observation, reward, _, _, info = arena.env.step(action)
        if diverged(arena.env.data):
            self._idle[arena.task_id].append(arena)
            self._arenas[index] = None
            raise SimulationError(
                f"physics of simulator {index} ({self._tasks[arena.task_id]}) diverged: discard "
                "the episode and reset"
            )
        success = bool(info["success"])
        return StepOutcome(float(reward) if self._dense else float(success), success, success)

    def state(self, index: int) -> np.ndarray:
        """Proprioception, float32 ``[4]``: hand x, y, z and distance between the fingers [m]."""
        state = self._arena(index).observation[:4].astype(np.float32)
        state[3] *= FINGER_SPAN
        return state

    def expert_action(self, index: int) -> np.ndarray:
        """The package's scripted expert, float32 ``[4]``, clipped to [-1, 1] as its steps do."""
        arena = self._arena(index)
        with warnings.catch_warnings():
            # Experts ask for more than 1 on purpose and warn about it at every step.
            warnings.filterwarnings("ignore", message="Constant")
            action = arena.expert.get_action(arena.observation)
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def render(self, index: int) -> np.ndarray:
        """Return new uint8 RGB images ``[K, 3, h, w]``, one per camera of ``meta.cameras``.

        Raises:
            RuntimeError: no usable OpenGL backend, or a renderer inherited by ``fork``.
        """
        arena, size = self._arena(index), self.meta.image_size
        renderer = self._renderers.get(arena.task_id)
        if renderer is None:
            renderer = OffscreenRenderer(arena.env.model, size)
            self._renderers[arena.task_id] = renderer
        images = np.empty((len(self.meta.cameras), 3, size, size), np.uint8)
        for image, camera in zip(images, self.meta.cameras, strict=True):
            image[:] = self._picture(renderer, arena, camera).transpose(2, 0, 1)
        return images

    def render_frame(self, index: int, size: int = 480) -> np.ndarray:
        """Return a uint8 RGB frame ``[size, size, 3]`` of the first camera, with shadows.

        Raises:
            ValueError: ``size`` outside 16..2048.
            RuntimeError: as :meth:`render`.
        """
        if not 16 <= size <= 2048:
            raise ValueError(f"size is {size}, must be in 16..2048: choose a smaller video")
        arena = self._arena(index)
        if self._film is None or self._film[:2] != (arena.task_id, size):
            if self._film is not None:
                self._film[2].close()
            film = OffscreenRenderer(arena.env.model, size, high_quality=True)
            self._film = arena.task_id, size, film
        return self._picture(self._film[2], arena, self.meta.cameras[0]).copy()

    @staticmethod
    def _picture(renderer: OffscreenRenderer, arena: _Arena, camera: str) -> np.ndarray:
        """Draw an arena upright. The renderer may be built on another arena's model: scenes of one
        task differ in where bodies are, which the data hold, not in what is drawn.
        """
        model, data = arena.env.model, arena.env.data
        mujoco.mj_kinematics(model, data)
        mujoco.mj_camlight(model, data)
        frame = renderer.render(data, int(model.camera(camera).id))
        return frame[::-1, ::-1] if camera.startswith("corner") else frame

    def close(self) -> None:
        """Free render contexts. Idempotent; a later render builds new ones."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()
        if self._film is not None:
            self._film[2].close()
            self._film = None


class MetaWorldSuite:
    """The suite as a picklable description (see ``Suite``); arguments as :class:`MetaWorld`."""

    splits = SPLITS

    def __init__(
        self,
        task: str | Sequence[str] = "drawer-open-v3",
        cameras: Sequence[str] = ("corner4",),
        image_size: int = 128,
        reward: Literal["sparse", "dense"] = "sparse",
        max_steps: int = PATH_LIMIT,
    ) -> None:
        _check(cameras, image_size, reward, max_steps)
        require("metaworld", "metaworld")
        tasks = choose_tasks(task)
        self.meta = suite_meta(tasks, tuple(cameras), image_size, max_steps)
        self._config = (tasks, tuple(cameras), image_size, reward, max_steps)

    def assets_sha256(self) -> str:
        """Return the hash of the package's scenes, meshes and textures."""
        package = importlib.util.find_spec("metaworld")
        return hash_folder(Path(package.submodule_search_locations[0]) / "assets")

    def simulators(self, num_envs: int) -> MetaWorld:
        """Build ``num_envs`` simulators in this process."""
        return MetaWorld(num_envs, *self._config)
