"""What a simulator must offer so that :class:`~torchrl_vla.envs.chunked.ChunkedEnv` can drive it.

The room's only contract: N copies of one robot task suite in one process, addressed by index, in
plain NumPy. Chunks, TensorDict, batching and episode bookkeeping are the environment's business;
physics, rendering, success and failure are the simulator's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from torchrl_vla.schema import SuiteMeta as SuiteMeta


@dataclass(frozen=True)
class StepOutcome:
    """Result of one control step."""

    reward: float
    """Reward of this control step (not discounted)."""
    terminated: bool
    """The episode ended in a success or a failure; a time limit counts if the state shows it."""
    success: bool
    """The task is solved (implies ``terminated``)."""
    truncated: bool = False
    """The suite itself cut the episode off (a time limit of its own, which the state does not
    show): its value is bootstrapped. With ``terminated`` as well, ``terminated`` wins."""


class SimulationError(RuntimeError):
    """Physics diverged (non-finite state). The episode is void: it must not become data."""


class Simulators(Protocol):
    """N simulators of one suite in one process.

    A limit that the state shows (a clock) is part of the task and ends in ``terminated``. Any other
    limit is left to :class:`ChunkedEnv`, which counts steps and truncates; a foreign environment
    that has one of its own reports it as ``truncated``.
    """

    meta: SuiteMeta
    num_envs: int

    def reset(self, index: int, init_state_id: int) -> None:
        """Put simulator ``index`` into the initial state that ``init_state_id`` names.

        The state (task, object poses, everything) is a pure function of ``init_state_id``.
        """

    def task_id(self, index: int) -> int:
        """Index into ``meta.instructions`` of the running episode of simulator ``index``."""

    def step(self, index: int, action: np.ndarray) -> StepOutcome:
        """Execute one control step; ``action`` is float32 ``[A]`` in [-1, 1].

        Raises:
            SimulationError: the physics state is not finite.
        """

    def render(self, index: int) -> np.ndarray:
        """Return uint8 RGB images ``[K, 3, h, w]``, one per camera of ``meta.cameras``."""

    def state(self, index: int) -> np.ndarray:
        """Return the proprioceptive state, float32 ``[S]`` in SI units (``meta.state_names``)."""

    def expert_action(self, index: int) -> np.ndarray:
        """Return the scripted expert's next control vector, float32 ``[A]`` in [-1, 1]."""

    def close(self) -> None:
        """Free render contexts. Idempotent."""


class Suite(Protocol):
    """A task suite as a picklable description: build simulators in whichever process needs them.

    A suite may offer ``assets_sha256()``, the hash of what its scenes are built from; evaluations
    keep it beside their results.
    """

    meta: SuiteMeta
    splits: dict[str, range]
    """Initial-state ids by purpose: at least ``"train"`` and ``"eval"``; they never overlap."""

    def simulators(self, num_envs: int) -> Simulators:
        """Build ``num_envs`` simulators in this process."""
