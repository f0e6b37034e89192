"""Every TensorDict key that crosses a room: shape, dtype, unit, who writes it, who reads it.

The layout extends TorchRL's canonical VLA schema (:mod:`torchrl.data.vla.schema`); nothing here
renames a TorchRL key. One decision (a policy call, executed as up to ``H`` control steps) is one
element of the batch.

Legend: ``*`` batch dims, ``K`` cameras, ``h w`` image, ``S`` state, ``H`` steps per chunk,
``A`` action dims, ``V`` action bins. Scalars per decision keep a trailing 1, as rewards do in
TorchRL, so that no two of them can broadcast into a matrix by accident.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data.vla.schema import ACTION_CHUNK_KEY, ACTION_TOKENS_KEY, IMAGE_KEY, STATE_KEY

IMAGE = IMAGE_KEY
STATE = STATE_KEY
TASK_ID: NestedKey = "task_id"
INIT_STATE_ID: NestedKey = "init_state_id"
GROUP_ID: NestedKey = "group_id"
EPISODE_ID: NestedKey = "episode_id"
DECISION: NestedKey = "decision"
CHUNK = ACTION_CHUNK_KEY
TOKENS = ACTION_TOKENS_KEY
LOG_PROBS: NestedKey = ("vla_action", "log_probs")
POLICY_VERSION: NestedKey = "policy_version"
REWARD: NestedKey = ("next", "reward")
DONE: NestedKey = ("next", "done")
TERMINATED: NestedKey = ("next", "terminated")
TRUNCATED: NestedKey = ("next", "truncated")
SUCCESS: NestedKey = ("next", "success")
SIM_ERROR: NestedKey = ("next", "sim_error")
EXECUTED_MASK: NestedKey = ("next", "executed_mask")
NUM_EXECUTED: NestedKey = ("next", "num_executed")


@dataclass(frozen=True)
class SuiteMeta:
    """Everything about a task suite that does not change while it runs.

    Strings live here and nowhere in the step path: transitions carry ``task_id``, an index into
    ``instructions``.
    """

    name: str
    """Suite name, recorded in checkpoints and results."""
    instructions: tuple[str, ...]
    """Instruction in words, by ``task_id``."""
    task_names: tuple[str, ...]
    """Short task name by ``task_id``; several ids may share one (results are reported per name)."""
    cameras: tuple[str, ...]
    """Camera names, in the order of the image tensor's camera axis."""
    image_size: int
    """Image height and width in pixels."""
    state_names: tuple[str, ...]
    """Name and unit of every proprioceptive number, e.g. ``"ee_x [m]"``."""
    action_names: tuple[str, ...]
    """Name and meaning of every action dimension; all are in [-1, 1]."""
    max_steps: int
    """Control steps after which an episode is truncated."""
    control_hz: float
    """Control steps per simulated second."""

    @property
    def state_dim(self) -> int:
        """Length of the proprioceptive state."""
        return len(self.state_names)

    @property
    def action_dim(self) -> int:
        """Length of one control vector (``A``)."""
        return len(self.action_names)


@dataclass(frozen=True)
class Field:
    """One key of the schema."""

    key: NestedKey
    shape: tuple[str | int, ...]
    """Shape after the batch dims, letters from the legend."""
    dtype: torch.dtype
    meaning: str
    written_by: str
    read_by: str
    required: bool = True
    """Whether every transition has it (tokens exist only for token policies, for example)."""


SCHEMA: tuple[Field, ...] = (
    Field(IMAGE, ("K", 3, "h", "w"), torch.uint8, "RGB, 0..255", "envs", "policies"),
    Field(STATE, ("S",), torch.float32, "proprioception, SI units", "envs", "policies"),
    Field(TASK_ID, (1,), torch.int64, "row of the instruction table", "envs", "policies"),
    Field(INIT_STATE_ID, (1,), torch.int64, "names the initial state", "envs", "evaluate"),
    Field(GROUP_ID, (1,), torch.int64, "episodes from one initial state", "envs", "objectives"),
    Field(EPISODE_ID, (1,), torch.int64, "unique in a run", "envs", "replay, objectives"),
    Field(DECISION, (1,), torch.int64, "0, 1, ... in the episode", "envs", "replay"),
    Field(CHUNK, ("H", "A"), torch.float32, "control vectors in [-1, 1]", "policies", "envs"),
    Field(TOKENS, ("H", "A"), torch.int64, "bins, 0..V-1", "policies", "objectives", False),
    Field(
        LOG_PROBS,
        ("H", "A"),
        torch.float32,
        "log-prob of each number of the chunk under the behaviour policy",
        "policies",
        "objectives",
        False,
    ),
    Field(POLICY_VERSION, (1,), torch.int64, "publish that chose the action", "policies", "loops"),
    Field(REWARD, (1,), torch.float32, "sum of gamma^k r_k, executed steps", "envs", "objectives"),
    Field(DONE, (1,), torch.bool, "terminated or truncated", "envs", "objectives, replay"),
    Field(TERMINATED, (1,), torch.bool, "no future: never bootstrapped", "envs", "objectives"),
    Field(TRUNCATED, (1,), torch.bool, "cut off: bootstrapped", "envs", "objectives"),
    Field(SUCCESS, (1,), torch.bool, "task solved in this decision", "envs", "metrics, replay"),
    Field(SIM_ERROR, (1,), torch.bool, "physics diverged: not data", "envs", "actors"),
    Field(EXECUTED_MASK, ("H",), torch.bool, "control steps that ran", "envs", "objectives"),
    Field(NUM_EXECUTED, (1,), torch.int64, "sum of executed_mask", "envs", "objectives"),
)


def check_transitions(td: TensorDictBase, *, where: str) -> None:
    """Check ``td`` against the schema at a door of the replay.

    Args:
        td: transitions with any batch dims.
        where: which door, for the message.

    Raises:
        KeyError: a required key is missing.
        TypeError: a dtype differs.
        ValueError: a shape differs, letters disagree between keys, or a transition is flagged
            ``sim_error`` (void episodes are never data).
    """
    sizes: dict[str, int] = {}
    for field in SCHEMA:
        value = td.get(field.key, None)
        if value is None:
            if field.required:
                raise KeyError(
                    f"{where}: transitions lack {field.key!r} ({field.meaning}), which "
                    f"{field.written_by} should have written; found {sorted_keys(td)}"
                )
            continue
        if value.dtype != field.dtype:
            raise TypeError(f"{where}: {field.key!r} has dtype {value.dtype}, not {field.dtype}")
        shape = tuple(value.shape[td.ndim :])
        bound = tuple(
            sizes.setdefault(d, n) if isinstance(d, str) else d
            for d, n in zip(field.shape, shape, strict=False)
        )
        if len(shape) != len(field.shape) or shape != bound:
            raise ValueError(
                f"{where}: {field.key!r} has shape {shape} after the batch dims, expected "
                f"{field.shape} with {sizes}"
            )
    if bool(td.get(SIM_ERROR).any()):
        raise ValueError(f"{where}: transitions of a diverged simulation are not data")


def sorted_keys(td: TensorDictBase) -> list[str]:
    """Leaf keys of ``td`` as sorted dotted strings, for messages."""
    return sorted(".".join(key) if isinstance(key, tuple) else key for key in td.keys(True, True))
