"""Scenes with privileged labels: which block does the instruction name, and what is asked of it?

A stand-in for the grounding that a large VLM brings from its pre-training. The labels come from the
simulator's state, which no robot has: this is not reinforcement learning and is named as such
everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.envs.simulator import SimulationError, Simulators

POSITION = "position"
"""Label key: float32 ``[M, 6]``: named block x, y, the same minus the gripper's (in 0.1 m), and the
asked motion: sideways (-1 left, 1 right, 0 none) and up (1 or 0)."""
UNIT = 0.1
"""Metres per unit of the label."""


class LabelledSimulators(Simulators, Protocol):
    """Simulators that also tell where their blocks are."""

    named_block: tuple[int, ...]
    """Block that each task id names."""
    asked_motion: tuple[tuple[float, float], ...]
    """Sideways and upward motion that each task id asks for."""

    def block_positions(self, index: int) -> np.ndarray:
        """Return block centres, float32 ``[3, 3]`` in metres."""


def render_scenes(
    simulators: LabelledSimulators, init_state_ids: Iterable[int], *, seed: int = 0
) -> TensorDict:
    """Render one scene per id with the gripper moved about at random.

    Returns:
        TensorDict ``[M]`` with image, state, task_id and ``"blocks"`` float32 ``[M, 3, 2]`` (x, y
        of every block, metres).
    """
    rng = np.random.default_rng(seed)
    image, state, task_id, blocks = [], [], [], []
    for init_state_id in init_state_ids:
        simulators.reset(0, int(init_state_id))
        task = simulators.task_id(0)
        direction = rng.uniform(-1, 1, simulators.meta.action_dim).astype(np.float32)
        try:
            for _ in range(rng.integers(0, 9)):
                if simulators.step(0, direction).terminated:
                    break
        except SimulationError:
            continue
        image.append(simulators.render(0))
        state.append(simulators.state(0))
        task_id.append(task)
        blocks.append(simulators.block_positions(0)[:, :2])
    out = TensorDict(batch_size=[len(image)])
    out[schema.IMAGE] = torch.from_numpy(np.stack(image))
    out[schema.STATE] = torch.from_numpy(np.stack(state))
    out[schema.TASK_ID] = torch.tensor(task_id)[:, None]
    out["blocks"] = torch.from_numpy(np.stack(blocks))
    return out


def label(scenes: TensorDict, task_id: torch.Tensor, simulators: LabelledSimulators) -> TensorDict:
    """Return ``scenes`` under the instructions ``task_id`` (int64 ``[M, 1]``) with their label.

    One picture serves every instruction; the label follows the words.
    """
    rows = torch.arange(len(scenes))
    target = scenes["blocks"][rows, torch.tensor(simulators.named_block)[task_id[:, 0]]]
    gripper = scenes[schema.STATE][:, :2]
    out = scenes.select("observation")
    out[schema.TASK_ID] = task_id
    motion = torch.tensor(simulators.asked_motion)[task_id[:, 0]]
    out[POSITION] = torch.cat([target / UNIT, (target - gripper) / UNIT, motion], dim=-1)
    return out
