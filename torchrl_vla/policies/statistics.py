"""Dataset statistics and conventions between a checkpoint's numbers and the simulator's.

A checkpoint works in normalised numbers; a dataset recorded others; a simulator wants a third kind.
Every conversion is made here, once, and what is converted has a type of its own where doing it
twice would go unnoticed.

Legend: ``*`` batch dims, ``A`` numbers of one vector.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["quantile", "min_max", "mean_std"]
FIELDS: dict[Kind, tuple[str, str]] = {
    "quantile": ("q01", "q99"),
    "min_max": ("min", "max"),
    "mean_std": ("mean", "std"),
}
CONSTANT = 1e-6
"""A dimension whose range (or standard deviation) is below this is constant."""
log = logging.getLogger(__name__)


def choose_statistics(
    table: Mapping[str, Mapping[str, Any]], key: str | None, *, source: str
) -> tuple[str, Mapping[str, Any]]:
    """Return one dataset's entry of a statistics table.

    Args:
        table: entries by dataset name.
        key: which one, to the letter; None takes the only one there is.
        source: where the table comes from, for messages.

    Returns:
        ``(name, entry)``.

    Raises:
        ValueError: the table is empty, lacks ``key``, or has several entries and ``key`` is None.
    """
    names = sorted(table)
    if key is None and len(names) == 1:
        log.info("statistics of %r, the only entry of %s", names[0], source)
        return names[0], table[names[0]]
    if key is None or key not in table:
        asked = "none was asked for" if key is None else f"{key!r} was asked for"
        raise ValueError(
            f"{source} has statistics for {names}, and {asked}; set policy.unnorm_key to one of "
            "them (another dataset's statistics would scale every action wrongly)"
        )
    return key, table[key]


def fingerprint(entry: Mapping[str, Any]) -> str:
    """Return a SHA-256 (first 16 hex digits) of a statistics entry, the same on every machine."""
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Normalizer(nn.Module):
    """Affine map between recorded and normalised numbers, in float64.

    - ``quantile`` and ``min_max``: [low, high] to [-1, 1], with ``range_epsilon`` added to the
      range.
    - ``mean_std``: to zero mean and unit standard deviation.

    Dimensions outside the mask pass through bit for bit. Constant dimensions normalise to 0, and
    return as the constant whatever the policy says.

    Args:
        kind: which of the three.
        entry: lists by field name (``q01``, ``q99``, ``mask``, ...), as the files hold them.
        range_epsilon: added to the range (1e-8 in OpenVLA-OFT, 0 in OpenVLA).
        clip: whether normalised numbers are limited to [-1, 1], as for OFT's proprioception.
        name: what these numbers are, for messages.

    Raises:
        ValueError: unknown kind, a field is missing, not finite, of another length, or upside down.
    """

    def __init__(
        self,
        kind: Kind,
        entry: Mapping[str, Any],
        *,
        range_epsilon: float = 0.0,
        clip: bool = False,
        name: str = "action",
    ) -> None:
        super().__init__()
        if kind not in FIELDS:
            raise ValueError(f"statistics kind is {kind!r}; use one of {sorted(FIELDS)}")
        missing = [field for field in FIELDS[kind] if field not in entry]
        if missing:
            raise ValueError(f"{name} statistics lack {missing}; they hold {sorted(entry)}")
        first, second = (torch.tensor(entry[f], dtype=torch.float64) for f in FIELDS[kind])
        mask = torch.tensor(entry.get("mask") or [True] * len(first))
        if not first.shape == second.shape == mask.shape:
            sizes = [len(first), len(second), len(mask)]
            raise ValueError(f"{name} statistics have {sizes} numbers ({FIELDS[kind]}, mask)")
        spread = second if kind == "mean_std" else second - first
        if not bool(first.isfinite().all() & spread.isfinite().all() & (spread >= 0).all()):
            raise ValueError(f"{name} statistics are not finite or upside down: {dict(entry)}")
        constant = mask & (spread < CONSTANT)
        if constant.any():
            warnings.warn(
                f"{name} dimensions {constant.nonzero().flatten().tolist()} are constant in the "
                "data: they normalise to 0 and always come back as that constant",
                stacklevel=2,
            )
        self.kind, self.clip = kind, clip
        self.register_buffer("offset", first, persistent=False)
        scale = spread if kind == "mean_std" else spread + range_epsilon
        self.register_buffer("scale", torch.where(constant, 1.0, scale), persistent=False)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("constant", constant, persistent=False)

    def normalise(self, values: Tensor) -> Tensor:
        """Map recorded numbers ``[*, A]`` to normalised ones, in the same dtype."""
        self._check(values)
        # In float64 also when values are float32: a pass-through survives both casts unchanged.
        wide = values.to(self.offset)
        out = (wide - self.offset) / self.scale
        if self.kind != "mean_std":
            out = 2 * out - 1
        out = torch.where(self.constant, 0.0, torch.where(self.mask, out, wide))
        return (out.clamp(-1, 1) if self.clip else out).to(values.dtype)

    def restore(self, values: Tensor) -> Tensor:
        """Map normalised numbers ``[*, A]`` to recorded ones, in the same dtype."""
        self._check(values)
        wide = values.to(self.offset)
        unit = wide if self.kind == "mean_std" else 0.5 * (wide + 1)
        out = torch.where(self.constant, self.offset, unit * self.scale + self.offset)
        return torch.where(self.mask, out, wide).to(values.dtype)

    def _check(self, values: Tensor) -> None:
        if values.shape[-1] != len(self.offset):
            raise ValueError(
                f"vectors have {values.shape[-1]} numbers, the statistics {len(self.offset)}"
            )


@dataclass(frozen=True)
class DatasetActions:
    """Actions as recorded: gripper in [0, 1], 1 is open."""

    values: Tensor


@dataclass(frozen=True)
class SimulatorActions:
    """Actions as a robosuite simulator takes them: gripper -1 opens, +1 closes."""

    values: Tensor


@dataclass(frozen=True)
class LiberoGripper:
    """The gripper convention of the LIBERO data sets.

    Args:
        index: which number of the action is the gripper.
    """

    index: int = -1

    def to_simulator(self, actions: DatasetActions) -> SimulatorActions:
        """Above 0.5 opens (-1); everything else, 0.5 itself included, closes (+1). Never 0.

        Raises:
            TypeError: the actions are converted already.
        """
        if not isinstance(actions, DatasetActions):
            raise TypeError(
                f"{type(actions).__name__} given, DatasetActions needed: the gripper is converted "
                "exactly once"
            )
        values = actions.values.clone()
        values[..., self.index] = torch.where(values[..., self.index] > 0.5, -1.0, 1.0).to(values)
        return SimulatorActions(values)

    def to_dataset(self, actions: SimulatorActions) -> DatasetActions:
        """-1 to 1 (open), +1 to 0.

        Raises:
            TypeError: the actions are not in the simulator's convention.
        """
        if not isinstance(actions, SimulatorActions):
            raise TypeError(
                f"{type(actions).__name__} given, SimulatorActions needed: the gripper is "
                "converted exactly once"
            )
        values = actions.values.clone()
        values[..., self.index] = (1 - values[..., self.index]) / 2
        return DatasetActions(values)


class ActionSpace(nn.Module):
    """From a policy's normalised numbers to the simulator's actions and back.

    Args:
        normalizer: the dataset's action statistics; None if the policy works in recorded units.
        gripper: the gripper's convention; None if data and simulator share one.

    Raises:
        ValueError: the statistics reach beyond [-1, 1], which no environment here accepts.
    """

    def __init__(self, normalizer: Normalizer | None, gripper: LiberoGripper | None = None) -> None:
        super().__init__()
        self.normalizer, self.gripper = normalizer, gripper
        if normalizer is not None and normalizer.kind != "mean_std":
            ends = torch.ones_like(normalizer.offset)
            reach = torch.stack([normalizer.restore(-ends), normalizer.restore(ends)]).abs()
            if reach.max() > 1 + CONSTANT:
                raise ValueError(
                    f"the action statistics reach to {float(reach.max()):.4g}, but environments "
                    "take control vectors in [-1, 1]; rescale the environment's actions"
                )

    def to_simulator(self, values: Tensor) -> Tensor:
        """Map normalised ``[*, A]`` to control vectors ``[*, A]``, same dtype."""
        recorded = values if self.normalizer is None else self.normalizer.restore(values)
        if self.gripper is None:
            return recorded
        return self.gripper.to_simulator(DatasetActions(recorded)).values

    def from_simulator(self, actions: Tensor) -> Tensor:
        """Map control vectors ``[*, A]`` to normalised ones, same dtype."""
        if self.gripper is not None:
            actions = self.gripper.to_dataset(SimulatorActions(actions)).values
        return actions if self.normalizer is None else self.normalizer.normalise(actions)
