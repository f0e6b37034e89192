"""Any Gymnasium environment with pixels as a suite of ours, described by a config.

What the room is for: the other direction of :mod:`torchrl_vla.envs.registration`. It finds the
picture, the numbers and the success in what a foreign environment gives, scales actions, and sees
to it that no autoreset mode puts a step into the data that was none: an episode is always started
by an explicit ``reset(seed=init_state_id)``, and the last observation of an episode is its own.

Importing this module imports no ``gymnasium``; building a suite does.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageOps

from torchrl_vla.envs.extras import require
from torchrl_vla.envs.gymnasium_actions import Actions
from torchrl_vla.envs.gymnasium_episodes import Single, Step, VectorOfOne
from torchrl_vla.envs.simulator import SimulationError, StepOutcome, SuiteMeta
from torchrl_vla.envs.splits import SPLITS

Vectorization = Literal["sync", "vector_entry_point"]
NO_STATE = ("no proprioception, always 0 [1]",)


def _pick(observation: Any, key: str) -> Any:
    """Return ``observation["a"]["b"]`` for ``key`` ``"a.b"``; the whole for ``"."``."""
    for part in filter(None, key.split(".")):
        observation = observation[part]
    return observation


@dataclass(frozen=True)
class _Description:
    """Everything that is configured; the picklable part of the suite."""

    env_id: str
    instruction: str
    kwargs: tuple[tuple[str, Any], ...]
    image_size: int
    image_from: str
    state_from: str | None
    success_key: str | None
    max_steps: int
    vectorization: Vectorization | None
    autoreset_mode: str

    def build(self) -> Single | VectorOfOne:
        """Build one environment."""
        import gymnasium

        kwargs = dict(self.kwargs)
        if self.image_from == "render":
            kwargs.setdefault("render_mode", "rgb_array")
        if self.vectorization is None:
            # Our own environment counts the steps, so Gymnasium's time limit stays out.
            return Single(gymnasium.make(self.env_id, max_episode_steps=-1, **kwargs))
        if self.vectorization == "sync":
            mode = gymnasium.vector.AutoresetMode(self.autoreset_mode)
            kwargs |= {"vector_kwargs": {"autoreset_mode": mode}, "max_episode_steps": -1}
        env = gymnasium.make_vec(
            self.env_id, num_envs=1, vectorization_mode=self.vectorization, **kwargs
        )
        return VectorOfOne(env)

    def check(self) -> None:
        """Raise ``ValueError`` for settings that cannot work together."""
        if not 16 <= self.image_size <= 1024:
            raise ValueError(f"image_size is {self.image_size}, must be in 16..1024")
        if self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}, must be >= 1")
        modes = ("NextStep", "SameStep", "Disabled")
        if self.autoreset_mode not in modes:
            raise ValueError(f"autoreset_mode is {self.autoreset_mode!r}, must be one of {modes}")
        if self.vectorization not in (None, "sync", "vector_entry_point"):
            raise ValueError(
                f"vectorization is {self.vectorization!r}, must be null, 'sync' or "
                "'vector_entry_point'"
            )

    def check_mode(self, env: Single | VectorOfOne) -> None:
        """Refuse an environment whose last picture of an episode would be the next episode's."""
        mode = env.env.metadata.get("autoreset_mode")
        if self.image_from == "render" and getattr(mode, "value", None) == "SameStep":
            raise ValueError(
                f"{self.env_id} resets itself in the step that ends an episode (SameStep), so its "
                "render() then shows the next episode; use autoreset_mode=NextStep, or image_from "
                "with the key of a picture in the observation"
            )


class GymnasiumSimulators:
    """N Gymnasium environments as simulators (see ``Simulators``).

    Arguments of the suite, see :class:`GymnasiumSuite`.
    """

    def __init__(self, num_envs: int, description: _Description, meta: SuiteMeta) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}, must be >= 1: ask for at least one")
        self.meta, self.num_envs, self._description = meta, num_envs, description
        self._envs = [description.build() for _ in range(num_envs)]
        for env in self._envs:
            description.check_mode(env)
        self._actions = Actions(self._envs[0].action_space)
        self._observation: list[Any] = [None] * num_envs

    def __reduce__(self) -> tuple[type[GymnasiumSimulators], tuple[Any, ...]]:
        """Pickle the configuration, never the environments."""
        return type(self), (self.num_envs, self._description, self.meta)

    def reset(self, index: int, init_state_id: int) -> None:
        """Reset environment ``index`` with seed ``init_state_id``."""
        self._observation[index] = self._envs[index].reset(init_state_id)

    def task_id(self, index: int) -> int:
        """Always 0: an environment is one task."""
        return 0

    def step(self, index: int, action: np.ndarray) -> StepOutcome:
        """Execute one step; ``action`` is float32 ``[A]`` in [-1, 1].

        Raises:
            SimulationError: the state is not finite.
        """
        step = self._envs[index].step(self._actions.decode(action))
        self._observation[index] = step.observation
        if not np.isfinite(self.state(index)).all():
            raise SimulationError(f"the state of {self.meta.name} {index} is not finite")
        success = self._succeeded(step)
        return StepOutcome(step.reward, step.terminated or success, success, step.truncated)

    def _succeeded(self, step: Step) -> bool:
        key = self._description.success_key
        if key is None:
            return False
        if key not in step.info and step.terminated:
            raise KeyError(
                f"info of {self.meta.name} has no {key!r}, only {sorted(step.info)}; correct "
                "success_key, or use null for an environment without a success"
            )
        return bool(step.info.get(key, False))

    def render(self, index: int) -> np.ndarray:
        """Return the picture, uint8 ``[1, 3, h, w]``; not square: padded with black."""
        return self._frame(index, self.meta.image_size).transpose(2, 0, 1)[None]

    def render_frame(self, index: int, size: int = 480) -> np.ndarray:
        """Return the picture as uint8 RGB ``[size, size, 3]``."""
        return self._frame(index, size)

    def _frame(self, index: int, size: int) -> np.ndarray:
        source = self._description.image_from
        if source == "render":
            frame = self._envs[index].render()
        else:
            frame = _pick(self._observation[index], source)
        frame = np.asarray(frame)
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[-1] != 3:
            raise ValueError(
                f"image_from={source!r} of {self.meta.name} gives {frame.dtype} {frame.shape}, "
                "must be uint8 [h, w, 3]: choose another source"
            )
        if frame.shape[:2] == (size, size):
            return frame.copy()
        picture = ImageOps.pad(Image.fromarray(frame), (size, size), Image.Resampling.BILINEAR)
        return np.array(picture)

    def state(self, index: int) -> np.ndarray:
        """Return the numbers named by ``state_from``, float32 ``[S]``, or one 0."""
        key = self._description.state_from
        if key is None:
            return np.zeros(1, np.float32)
        return np.ravel(_pick(self._observation[index], key)).astype(np.float32)

    def expert_action(self, index: int) -> np.ndarray:
        """Not there: a foreign environment has no expert."""
        raise NotImplementedError(
            f"{self.meta.name} has no scripted expert; use recorded demonstrations, or an "
            "algorithm without them"
        )

    def close(self) -> None:
        """Close the environments. Idempotent."""
        for env in self._envs:
            env.close()


class GymnasiumSuite:
    """One Gymnasium environment as a suite (see ``Suite``).

    Actions: a ``Box`` with finite bounds is scaled from [-1, 1]; of a ``Discrete`` space's ``n``
    numbers the largest is the choice. Anything else is refused. A success ends the episode.

    Args:
        env_id: what ``gymnasium.make`` takes, ``"module:Id-v0"`` included.
        instruction: what the robot is told.
        max_steps: control steps until truncation; the environment's registered limit if ``None``.
            A limit inside the environment may truncate before.
        kwargs: further arguments of ``gymnasium.make``.
        image_size: image height and width [px]; other pictures are scaled, padded to a square.
        image_from: ``"render"``, ``"."`` (the observation itself), or a key (``"a.b"`` nests) of
            the observation.
        state_from: likewise for the proprioceptive numbers; ``None`` for none.
        state_names: name and unit of each; numbered if ``None``.
        success_key: key of ``info`` that tells success; ``None``: there is no such thing.
        control_hz: control steps per second; ``render_fps`` of the environment if ``None``.
        vectorization: for an environment that exists as a vector environment: ``"sync"`` or
            ``"vector_entry_point"``.
        autoreset_mode: of a ``"sync"`` vector environment.

    Raises:
        ValueError: a setting outside its limits, or a space that does not fit.
        ModuleNotFoundError: ``gymnasium`` is not installed.
    """

    splits = SPLITS

    def __init__(
        self,
        env_id: str,
        instruction: str,
        max_steps: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
        image_size: int = 64,
        image_from: str = "render",
        state_from: str | None = None,
        state_names: tuple[str, ...] | None = None,
        success_key: str | None = None,
        control_hz: float | None = None,
        vectorization: Vectorization | None = None,
        autoreset_mode: str = "NextStep",
    ) -> None:
        require("gymnasium", "gymnasium")
        self._description = _Description(
            env_id,
            instruction,
            tuple((kwargs or {}).items()),
            image_size,
            image_from,
            state_from,
            success_key,
            _step_limit(env_id) if max_steps is None else max_steps,
            vectorization,
            autoreset_mode,
        )
        self._description.check()
        env = self._description.build()
        try:
            self._description.check_mode(env)
            self.meta = _meta(self._description, env, state_names, control_hz)
        finally:
            env.close()

    def simulators(self, num_envs: int) -> GymnasiumSimulators:
        """Build ``num_envs`` environments in this process."""
        return GymnasiumSimulators(num_envs, self._description, self.meta)


def _step_limit(env_id: str) -> int:
    """Return the registered step limit; ``"module:Id-v0"`` imports the module that registers."""
    import gymnasium

    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    limit = gymnasium.spec(name).max_episode_steps
    if limit is None:
        raise ValueError(f"{env_id} has no registered step limit; give max_steps")
    return limit


def _meta(
    description: _Description,
    env: Single | VectorOfOne,
    state_names: tuple[str, ...] | None,
    control_hz: float | None,
) -> SuiteMeta:
    """Describe the suite from one reset of its environment."""
    observation = env.reset(0)
    if description.state_from is None:
        names = NO_STATE
    else:
        size = np.size(_pick(observation, description.state_from))
        names = tuple(state_names or (f"{description.state_from} {i}" for i in range(size)))
        if len(names) != size:
            raise ValueError(f"state_names has {len(names)} names for {size} numbers; give {size}")
    rate = control_hz or env.env.metadata.get("render_fps")
    if rate is None:
        raise ValueError(f"{description.env_id} does not say its render_fps; give control_hz")
    camera = description.image_from
    return SuiteMeta(
        name=description.env_id,
        instructions=(description.instruction,),
        task_names=(description.env_id,),
        cameras=(camera,),
        image_size=description.image_size,
        state_names=names,
        action_names=Actions(env.action_space).names,
        max_steps=description.max_steps,
        control_hz=float(rate),
    )
