"""LIBERO's task suites (Liu et al. 2023, arXiv:2306.03310) as suites of ours.

What the room takes from the package: scenes, controller, published initial states, sentences and
success. What it adds: our renderer (``benchmarks/environments.py`` measures it), resets that keep
the scene, initial states by id, and silence: no question, no file outside the run's folder.

Observations and actions are those that published policies were trained on: pictures turned by 180
degrees, an 8-number state, end-effector deltas in the controller's units, ten settling steps at the
start that no limit counts.

Importing this module imports no ``libero``; building a suite does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from torchrl_vla.envs.assets import hash_files
from torchrl_vla.envs.divergence import diverged
from torchrl_vla.envs.libero_package import LiberoTask, initial_states, suite_tasks
from torchrl_vla.envs.libero_scene import CONTROL_HZ, Scene
from torchrl_vla.envs.offscreen import render_on
from torchrl_vla.envs.simulator import SimulationError, StepOutcome, SuiteMeta
from torchrl_vla.envs.splits import SPLITS, position_in_split

Gripper = Literal["plus_closes", "plus_opens"]

STEP_LIMITS = {"spatial": 220, "object": 280, "goal": 300, "10": 520, "90": 400}
"""Control steps per episode by suite, as in OpenVLA's evaluation (Kim et al. 2024)."""
CAMERAS = ("agentview", "robot0_eye_in_hand")
PUBLISHED_SEED = 0
"""Seed of what a published initial state leaves open: where fixtures stand."""


@dataclass(frozen=True)
class LiberoSettings:
    """What is configured; see :class:`LiberoSuite`."""

    suite: str = "libero_spatial"
    tasks: tuple[int, ...] | None = None
    image_size: int = 128
    cameras: tuple[str, ...] = CAMERAS
    gripper: Gripper = "plus_closes"
    max_steps: int | None = None
    render_gpu: int | Literal["spread"] | None = None
    keep_scenes: int = 4
    numba_cache: str | None = None

    def __post_init__(self) -> None:
        if not 32 <= self.image_size <= 1024:
            raise ValueError(f"image_size is {self.image_size}, must be in 32..1024")
        if not self.cameras:
            raise ValueError(f"cameras is empty; {CAMERAS} are usual")
        if self.gripper not in ("plus_closes", "plus_opens"):
            raise ValueError(
                f"gripper is {self.gripper!r}, must be 'plus_closes' (LIBERO's own) or 'plus_opens'"
            )
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}, must be >= 1")
        if self.keep_scenes < 0:
            raise ValueError(f"keep_scenes is {self.keep_scenes}, must be >= 0")

    def chosen(self) -> tuple[LiberoTask, ...]:
        """Return the chosen tasks.

        Raises:
            ValueError: an unknown suite or task number.
        """
        every = suite_tasks(self.suite)
        numbers = range(len(every)) if self.tasks is None else self.tasks
        wrong = [number for number in numbers if not 0 <= number < len(every)]
        if wrong or not numbers or len(set(numbers)) < len(numbers):
            raise ValueError(
                f"tasks is {list(numbers)}; name tasks of {self.suite} by 0..{len(every) - 1}, "
                "each once"
            )
        return tuple(every[number] for number in numbers)


def step_limit(suite: str) -> int:
    """Return the published step limit of a suite; its variants (``libero_goal_swap``) share it.

    Raises:
        ValueError: none is published.
    """
    kind = suite.removeprefix("libero_").split("_")[0]
    if kind not in STEP_LIMITS:
        raise ValueError(f"no step limit is published for {suite!r}; give max_steps")
    return STEP_LIMITS[kind]


def suite_meta(settings: LiberoSettings, tasks: Sequence[LiberoTask]) -> SuiteMeta:
    """Describe a suite."""
    moves = [f"d{axis} of the hand, 1 = 5 cm" for axis in "xyz"]
    turns = [f"rotation about {axis}, 1 = 0.5 rad" for axis in "xyz"]
    closes = settings.gripper == "plus_closes"
    grip = "gripper, -1 opens, 1 closes" if closes else "gripper, -1 closes, 1 opens"
    limit = step_limit(settings.suite) if settings.max_steps is None else settings.max_steps
    return SuiteMeta(
        name=settings.suite,
        instructions=tuple(task.instruction for task in tasks),
        task_names=tuple(task.name for task in tasks),
        cameras=settings.cameras,
        image_size=settings.image_size,
        state_names=(
            *(f"hand_{axis} [m]" for axis in "xyz"),
            *(f"hand rotation vector {axis} [rad]" for axis in "xyz"),
            "left finger [m]",
            "right finger [m]",
        ),
        action_names=(*moves, *turns, grip),
        max_steps=limit,
        control_hz=CONTROL_HZ,
    )


class Libero:
    """N LIBERO simulators in one process (see ``Simulators``); any mix of the suite's tasks.

    A scene is built when a task first comes up (seconds) and kept for later episodes. Each scene
    with its renderer takes some hundred MB; of the scenes that no simulator is using, at most
    ``keep_scenes`` are kept. Pickling keeps the configuration only.

    Arguments of the suite, see :class:`LiberoSuite`.
    """

    def __init__(self, num_envs: int, settings: LiberoSettings) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}, must be >= 1: ask for at least one")
        render_on(settings.render_gpu)
        self._settings, self._tasks = settings, settings.chosen()
        self.meta, self.num_envs = suite_meta(settings, self._tasks), num_envs
        self._scenes: list[Scene | None] = [None] * num_envs
        self._idle: list[Scene] = []
        """Unused scenes, the longest unused first."""

    def __reduce__(self) -> tuple[type[Libero], tuple[int, LiberoSettings]]:
        """Pickle the configuration, never the scenes."""
        return type(self), (self.num_envs, self._settings)

    def reset(self, index: int, init_state_id: int) -> None:
        """Start the episode that ``init_state_id`` names in simulator ``index``.

        Tasks take turns over consecutive ids of a split. An id of ``"eval"`` names a published
        initial state; any other split's is drawn from the task's own regions, seeded with the id.

        Raises:
            ValueError: ``init_state_id`` is in no split, or past the published states.
        """
        number, task_id = divmod(position_in_split(init_state_id), len(self._tasks))
        seed: int | np.ndarray = PUBLISHED_SEED
        state = None
        if init_state_id in SPLITS["eval"]:
            published = initial_states(self._tasks[task_id])
            if number >= len(published):
                raise ValueError(
                    f"init_state_id is {init_state_id}, state {number} of "
                    f"{self._tasks[task_id].name}, which has {len(published)} published ones: "
                    "ask for fewer evaluation episodes"
                )
            state = published[number]
        else:
            seed = np.random.SeedSequence(init_state_id).generate_state(4)
        self._lend(index, task_id).reset(seed, state)

    def _lend(self, index: int, task_id: int) -> Scene:
        """Give simulator ``index`` a scene of a task, its own if that fits; its last is free."""
        old = self._scenes[index]
        if old is not None:
            self._idle.append(old)
            self._scenes[index] = None
        fitting = [scene for scene in self._idle if scene.task_id == task_id]
        if fitting:
            scene = fitting[-1]
            self._idle.remove(scene)
        else:
            scene = Scene(task_id, self._tasks[task_id], self._settings.numba_cache)
        while len(self._idle) > self._settings.keep_scenes:
            self._idle.pop(0).close()
        self._scenes[index] = scene
        return scene

    def _scene(self, index: int) -> Scene:
        scene = self._scenes[index]
        if scene is None:
            raise RuntimeError(f"simulator {index} has no episode: call reset({index}, id) first")
        return scene

    def task_id(self, index: int) -> int:
        """Index into ``meta.instructions`` of the running episode.

        Raises:
            RuntimeError: the simulator was never reset.
        """
        return self._scene(index).task_id

    def step(self, index: int, action: np.ndarray) -> StepOutcome:
        """Execute one control step (50 ms); ``action`` is float32 ``[7]`` in [-1, 1].

        Only the sign of the last number counts: the gripper closes or opens at its own speed, and
        0 leaves it.

        Raises:
            ValueError: ``action`` has another shape.
            SimulationError: the physics state is not finite; reset before the next step.
            RuntimeError: the simulator was never reset.
        """
        scene = self._scene(index)
        if np.shape(action) != (7,):
            raise ValueError(f"action has shape {np.shape(action)}, must be (7,)")
        command = np.array(action, np.float64)
        if self._settings.gripper == "plus_opens":
            command[6] = -command[6]
        solved = scene.step(command)
        if diverged(scene.data):
            self._scenes[index] = None
            self._idle.append(scene)
            raise SimulationError(
                f"physics of simulator {index} ({scene.task.name}) diverged: discard the episode "
                "and reset"
            )
        return StepOutcome(float(solved), solved, solved)

    def state(self, index: int) -> np.ndarray:
        """Proprioception, float32 ``[8]``, see ``meta.state_names``."""
        return self._scene(index).state()

    def expert_action(self, index: int) -> np.ndarray:
        """Not there: LIBERO has no scripted experts."""
        raise NotImplementedError(
            "LIBERO has no scripted expert; use recorded demonstrations (launch/demos.py reads "
            "LeRobot datasets), or an algorithm without them"
        )

    def render(self, index: int) -> np.ndarray:
        """Return new uint8 RGB images ``[K, 3, h, w]``, one per camera of ``meta.cameras``.

        Raises:
            RuntimeError: no usable OpenGL backend, or a renderer inherited by ``fork``.
        """
        scene, size = self._scene(index), self.meta.image_size
        pictures = [
            scene.picture(camera, size).transpose(2, 0, 1).copy() for camera in self.meta.cameras
        ]
        return np.stack(pictures)

    def render_frame(self, index: int, size: int = 480) -> np.ndarray:
        """Return a uint8 RGB frame ``[size, size, 3]`` of the first camera, with shadows.

        Raises:
            ValueError: ``size`` outside 16..2048.
            RuntimeError: as :meth:`render`.
        """
        if not 16 <= size <= 2048:
            raise ValueError(f"size is {size}, must be in 16..2048: choose a smaller video")
        frame = self._scene(index).picture(self.meta.cameras[0], size, high_quality=True)
        return frame.copy()

    def close(self) -> None:
        """Free render contexts. Idempotent; a later render builds new ones."""
        for scene in filter(None, [*self._scenes, *self._idle]):
            scene.close_renderers()


class LiberoSuite:
    """A LIBERO suite as a picklable description (see ``Suite``).

    Differs: training states are drawn anew, never the published ones, which evaluate; an episode
    ends at its first success; where fixtures stand is the same in every episode from a published
    state, while the package lets it depend on how many episodes came before.

    Args:
        suite: ``"libero_spatial"``, ``"libero_object"``, ``"libero_goal"``, ``"libero_10"``,
            ``"libero_90"`` or another suite of the package.
        tasks: numbers of the tasks to use, in the package's order; ``None`` for all.
        image_size: image height and width [px], 32..1024.
        cameras: cameras of the scene, in the order of the image tensor.
        gripper: meaning of the last action's sign; ``"plus_closes"`` is LIBERO's own,
            ``"plus_opens"`` that of policies trained on RLDS or OpenVLA data.
        max_steps: control steps until truncation; the published limit if ``None``.
        render_gpu: see :func:`torchrl_vla.envs.offscreen.render_on`.
        keep_scenes: unused scenes that stay in memory, per process.
        numba_cache: folder for robosuite's compiled controller, which makes a step's physics about
            1.5 times faster and takes 16 s to compile once; ``None`` does not compile.

    Raises:
        ValueError: an argument outside its limits.
        ModuleNotFoundError: LIBERO is not installed.
    """

    def __init__(
        self,
        suite: str = "libero_spatial",
        tasks: Sequence[int] | None = None,
        image_size: int = 128,
        cameras: Sequence[str] = CAMERAS,
        gripper: Gripper = "plus_closes",
        max_steps: int | None = None,
        render_gpu: int | Literal["spread"] | None = None,
        keep_scenes: int = 4,
        numba_cache: str | None = None,
    ) -> None:
        self._settings = LiberoSettings(
            suite,
            None if tasks is None else tuple(tasks),
            image_size,
            tuple(cameras),
            gripper,
            max_steps,
            render_gpu,
            keep_scenes,
            numba_cache,
        )
        chosen = self._settings.chosen()
        self.meta = suite_meta(self._settings, chosen)
        published = len(chosen) * min(len(initial_states(task)) for task in chosen)
        start = SPLITS["eval"].start
        self.splits = SPLITS | {"eval": range(start, start + published)}

    def assets_sha256(self) -> str:
        """Return the hash of the chosen tasks' BDDL files and published initial states."""
        chosen = self._settings.chosen()
        return hash_files(
            path for task in chosen for path in (task.bddl_file, task.init_states_file)
        )

    def simulators(self, num_envs: int) -> Libero:
        """Build ``num_envs`` simulators in this process."""
        return Libero(num_envs, self._settings)
