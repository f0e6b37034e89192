"""Our suites as Gymnasium environments, single and vector.

Importing this module registers them, so that Gymnasium's own ``"module:id"`` form is enough::

    gymnasium.make("torchrl_vla.envs.registration:torchrl_vla/Tabletop-v0", image_size=64)
    gymnasium.make_vec("torchrl_vla.envs.registration:torchrl_vla/MetaWorld-v0", 8, task="mt10")

A Gymnasium step is one control step; chunks are :class:`~torchrl_vla.envs.chunked.ChunkedEnv`'s.
"""

from __future__ import annotations

import pkgutil
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from torchrl_vla.envs.simulator import SimulationError, Simulators, Suite

SUITES = {
    "torchrl_vla/Tabletop-v0": "torchrl_vla.envs.tabletop:TabletopSuite",
    "torchrl_vla/MetaWorld-v0": "torchrl_vla.envs.metaworld:MetaWorldSuite",
    "torchrl_vla/Libero-v0": "torchrl_vla.envs.libero:LiberoSuite",
}
"""Suite class by Gymnasium id; arguments of ``make`` go to it."""


class SimulatorEnv(gymnasium.Env[dict[str, Any], np.ndarray]):
    """One simulator as a Gymnasium environment.

    Observation: ``image`` (a dict of uint8 ``[h, w, 3]`` by camera), ``state`` float32 ``[S]``,
    ``task`` (index of the instruction). Action: float32 ``[A]`` in [-1, 1]. ``info`` holds
    ``instruction``, ``success``, ``sim_error`` and ``init_state_id``. ``reset`` draws the initial
    state from the split, by the seed; ``options={"init_state_id": ...}`` names one.

    Args:
        suite: the suite.
        split: key of ``suite.splits`` to draw initial states from.
        render_mode: ``None`` or ``"rgb_array"`` (the first camera, as observed).
        simulators: simulators to use one of; built from the suite if ``None``.
        index: which of them.

    Raises:
        ValueError: an unknown split or render mode.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(
        self,
        suite: Suite,
        *,
        split: str = "train",
        render_mode: str | None = None,
        simulators: Simulators | None = None,
        index: int = 0,
    ) -> None:
        if split not in suite.splits:
            raise ValueError(f"split is {split!r}, must be one of {sorted(suite.splits)}")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode is {render_mode!r}, must be None or 'rgb_array'")
        self.render_mode = render_mode
        self.simulators = suite.simulators(1) if simulators is None else simulators
        self.index, self.split = index, suite.splits[split]
        meta = self.meta = suite.meta
        self.metadata = self.metadata | {"render_fps": meta.control_hz}
        frame = spaces.Box(0, 255, (meta.image_size, meta.image_size, 3), np.uint8)
        self.observation_space = spaces.Dict(
            image=spaces.Dict(dict.fromkeys(meta.cameras, frame)),
            state=spaces.Box(-np.inf, np.inf, (meta.state_dim,), np.float32),
            task=spaces.Discrete(len(meta.instructions)),
        )
        self.action_space = spaces.Box(-1.0, 1.0, (meta.action_dim,), np.float32)
        self._steps = 0
        self._init_state_id = -1
        self._observation: dict[str, Any] = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; see the class for seed and options."""
        super().reset(seed=seed)
        drawn = self.split[int(self.np_random.integers(len(self.split)))]
        self._init_state_id = int((options or {}).get("init_state_id", drawn))
        self.simulators.reset(self.index, self._init_state_id)
        self._steps = 0
        return self._observe(), self._info()

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute one control step; a diverged simulation is cut off with ``sim_error``."""
        try:
            outcome = self.simulators.step(self.index, np.asarray(action, np.float32))
        except SimulationError:
            return self._observation, 0.0, False, True, self._info(sim_error=True)
        self._steps += 1
        limit = outcome.truncated or self._steps >= self.meta.max_steps
        truncated = limit and not outcome.terminated
        info = self._info(success=outcome.success)
        return self._observe(), float(outcome.reward), outcome.terminated, truncated, info

    def _observe(self) -> dict[str, Any]:
        images = self.simulators.render(self.index).transpose(0, 2, 3, 1)
        self._observation = {
            "image": {
                name: np.ascontiguousarray(image)
                for name, image in zip(self.meta.cameras, images, strict=True)
            },
            "state": self.simulators.state(self.index),
            "task": np.int64(self.simulators.task_id(self.index)),
        }
        return self._observation

    def _info(self, *, success: bool = False, sim_error: bool = False) -> dict[str, Any]:
        return {
            "instruction": self.meta.instructions[int(self._observation["task"])],
            "success": success,
            "sim_error": sim_error,
            "init_state_id": self._init_state_id,
        }

    def render(self) -> np.ndarray | None:
        """Return the first camera's picture as last observed, uint8 ``[h, w, 3]``."""
        if self.render_mode is None:
            return None
        return self._observation["image"][self.meta.cameras[0]].copy()

    def close(self) -> None:
        """Free the simulators. Idempotent."""
        self.simulators.close()


def make_single(
    suite: str, split: str = "train", render_mode: str | None = None, **settings: Any
) -> SimulatorEnv:
    """Build one environment; ``suite`` is ``"module:Class"``, ``settings`` its arguments."""
    built = pkgutil.resolve_name(suite)(**settings)
    return SimulatorEnv(built, split=split, render_mode=render_mode)


def make_vector(
    suite: str,
    num_envs: int = 1,
    split: str = "train",
    render_mode: str | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    **settings: Any,
) -> SyncVectorEnv:
    """Build a vector environment whose members share one process, model and renderer."""
    built = pkgutil.resolve_name(suite)(**settings)
    simulators = built.simulators(num_envs)
    members = [
        partial(
            SimulatorEnv,
            built,
            split=split,
            render_mode=render_mode,
            simulators=simulators,
            index=index,
        )
        for index in range(num_envs)
    ]
    return SyncVectorEnv(members, autoreset_mode=autoreset_mode)


for _id, _suite in SUITES.items():
    if _id not in gymnasium.registry:
        gymnasium.register(
            _id,
            entry_point=f"{__name__}:make_single",
            vector_entry_point=f"{__name__}:make_vector",
            kwargs={"suite": _suite},
        )
