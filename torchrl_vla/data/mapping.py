"""How a data set's cameras and numbers become a suite's, and whether they can.

A data set that :mod:`~torchrl_vla.data.lerobot_demonstrations` wrote for the same suite needs no
mapping. For any other one a small YAML says which camera is which, where each number comes from,
in what unit, and what an open gripper is. What does not fit is refused before a frame is read,
with both sides named (field case B45).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchrl_vla.data.lerobot_layout import Feature, Layout
from torchrl_vla.schema import SuiteMeta

IMAGE_PREFIX = "observation.images."
STATE = "observation.state"
ACTION = "action"
UNITS = {"m": ("m", 1.0), "cm": ("m", 0.01), "mm": ("m", 0.001)} | {
    "rad": ("rad", 1.0),
    "deg": ("rad", np.pi / 180),
    "s": ("s", 1.0),
    "ms": ("s", 0.001),
}
"""Unit, the SI unit it measures the same as, and how many of those it is."""
ACTION_SLACK = 1e-4
"""How far an action may leave [-1, 1] by rounding."""
GRIPPER_SLACK = 0.05
"""How far a gripper may pass its declared ends, as a share of the distance between them."""


@dataclass(frozen=True)
class Column:
    """One number of the suite: ``scale * x + offset`` of one number of the data set."""

    feature: str
    """Feature key of the data set."""
    entry: int | str = 0
    """Position in the feature, or the name that the data set gives there."""
    scale: float = 1.0
    offset: float = 0.0
    unit: str | None = None
    """The data set's unit (after ``scale``), converted to the one in the suite's ``[...]``."""

    def factor(self, wanted: str) -> float:
        """Factor from :attr:`unit` to the unit in brackets of the suite's name ``wanted``."""
        if self.unit is None:
            return 1.0
        match = re.search(r"\[(\w+)\]", wanted)
        target = match.group(1) if match else ""
        ours, theirs = UNITS.get(target, (target, 1.0)), UNITS.get(self.unit)
        if theirs is None or theirs[0] != ours[0]:
            raise ValueError(f"unit {self.unit!r} cannot become the suite's {wanted!r}")
        return theirs[1] / ours[1]

    def convert(self, values: np.ndarray, wanted: str) -> np.ndarray:
        """Return the suite's numbers for the data set's ``[T]``."""
        return (self.scale * values + self.offset) * self.factor(wanted)


@dataclass(frozen=True)
class Gripper:
    """A gripper's number, by what open and closed are on both sides."""

    feature: str
    opened: float
    """The data set's value of an open gripper."""
    closed: float
    suite_opened: float
    """The suite's value of an open gripper (``action_names`` says it)."""
    suite_closed: float
    entry: int | str = 0

    def __post_init__(self) -> None:
        if self.opened == self.closed or self.suite_opened == self.suite_closed:
            raise ValueError(f"{self}: open and closed are one value, they must differ")

    def convert(self, values: np.ndarray, wanted: str) -> np.ndarray:
        """Return the suite's numbers for the data set's ``[T]``.

        Raises:
            ValueError: values beyond the declared ends: another convention is in the data.
        """
        share = (values - self.closed) / (self.opened - self.closed)
        if share.min() < -GRIPPER_SLACK or share.max() > 1 + GRIPPER_SLACK:
            raise ValueError(
                f"{self.feature!r}[{self.entry!r}] is between {values.min():g} and "
                f"{values.max():g}, the mapping says {self.opened:g} is open and "
                f"{self.closed:g} closed: correct `opened` and `closed`"
            )
        return self.suite_closed + share * (self.suite_opened - self.suite_closed)


Source = Column | Gripper
Sources = str | Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class DatasetMapping:
    """What the YAML of a foreign data set says; ``None`` means "as our own writer names it"."""

    cameras: Mapping[str, str] = field(default_factory=dict)
    """Feature key by the suite's camera name; ``observation.images.NAME`` if not listed."""
    state: Sources = None
    """Where the suite's state comes from: a feature key (its numbers in order), or one entry per
    number with the arguments of :class:`Column` (or :class:`Gripper`)."""
    action: Sources = None
    """The same for the action."""
    instructions: Mapping[str, str | None] = field(default_factory=dict)
    """The suite's instruction by the data set's; ``null`` leaves such episodes out."""
    accept_fps: float | None = None
    """Frame rate of the data set to accept although the suite runs at another: one row is then one
    control step all the same."""
    resize: bool = False
    """Whether pictures of another size are resized (square ones only)."""


def sources(
    given: Sources, key: str, names: Sequence[str], features: Mapping[str, Feature]
) -> list[Source]:
    """Return where each of a suite's numbers comes from.

    Args:
        given: What the mapping says.
        key: Feature of our own writer.
        names: The suite's names of the numbers.
        features: The data set's features.

    Raises:
        ValueError: the data set lacks something, or the counts differ.
    """
    listed = [] if given is None or isinstance(given, str) else [_source(item) for item in given]
    if not listed:
        key = given or key
        feature = _find(features, key)
        size = feature.shape[0]
        if size != len(names):
            raise ValueError(
                f"the data set's {key!r} has {size} numbers {_show(feature.names)}, the suite "
                f"wants {len(names)} {_show(names)}: list them one by one"
            )
        if given is None and feature.names != tuple(names):
            raise ValueError(
                f"the data set names the numbers of {key!r} {_show(feature.names)}, the suite "
                f"{_show(names)}: name the feature, or list its numbers, in the mapping"
            )
        return [Column(key, entry) for entry in range(size)]
    if len(listed) != len(names):
        raise ValueError(
            f"the mapping lists {len(listed)} numbers, the suite wants {len(names)} {_show(names)}"
        )
    for source, name in zip(listed, names, strict=True):
        position(source, features)
        if isinstance(source, Column):
            source.factor(name)
    return listed


def position(source: Source, features: Mapping[str, Feature]) -> int:
    """Return the position of a source's number in its feature.

    Raises:
        ValueError: the data set has no such feature or number.
    """
    feature = _find(features, source.feature)
    if isinstance(source.entry, str):
        if source.entry not in (feature.names or ()):
            raise ValueError(
                f"the data set's {source.feature!r} has no {source.entry!r}, only "
                f"{_show(feature.names)}"
            )
        return feature.names.index(source.entry)
    if not 0 <= source.entry < feature.shape[0]:
        raise ValueError(
            f"the data set's {source.feature!r} has {feature.shape[0]} numbers, the mapping asks "
            f"for number {source.entry}"
        )
    return source.entry


def convert(
    listed: Sequence[Source],
    names: Sequence[str],
    columns: Mapping[str, np.ndarray],
    features: Mapping[str, Feature],
) -> np.ndarray:
    """Return the suite's numbers, float32 ``[T, len(listed)]``, from a recording's columns."""
    rows = []
    for source, name in zip(listed, names, strict=True):
        values = columns[source.feature].astype(np.float64)
        values = values[:, None] if values.ndim == 1 else values
        rows.append(source.convert(values[:, position(source, features)], name))
    return np.stack(rows, axis=1).astype(np.float32)


def check_actions(actions: np.ndarray, names: Sequence[str]) -> None:
    """Check that actions are in [-1, 1]; nothing is clipped.

    Raises:
        ValueError: one is not.
    """
    beyond = np.abs(actions).max(axis=0)
    worst = int(beyond.argmax())
    if not beyond[worst] <= 1 + ACTION_SLACK:
        raise ValueError(
            f"action {names[worst]!r} reaches {beyond[worst]:g} in the data, the suite takes "
            "-1..1: give its scale in the mapping"
        )


def camera_keys(mapping: DatasetMapping, layout: Layout, meta: SuiteMeta) -> list[str]:
    """Return the data set's camera for each of the suite's.

    Raises:
        ValueError: a camera is missing, or of another size.
    """
    unknown = sorted(set(mapping.cameras) - set(meta.cameras))
    if unknown:
        raise ValueError(f"the mapping names cameras {unknown}, the suite has {meta.cameras}")
    keys = [mapping.cameras.get(name, IMAGE_PREFIX + name) for name in meta.cameras]
    for name, key in zip(meta.cameras, keys, strict=True):
        if key not in layout.cameras:
            raise ValueError(
                f"the suite's camera {name!r} should be {key!r}, the data set has "
                f"{sorted(layout.cameras)}"
            )
        height, width, _ = layout.cameras[key].shape
        same = height == width == meta.image_size
        if not same and not (mapping.resize and height == width):
            raise ValueError(
                f"pictures of {key!r} are {height}x{width} px, the suite's are "
                f"{meta.image_size}x{meta.image_size}: set resize: true (square pictures only), "
                "or another image_size of the suite"
            )
    return keys


def task_ids(mapping: DatasetMapping, layout: Layout, meta: SuiteMeta) -> dict[str, int | None]:
    """Return the suite's task id for each of the data set's instructions; None leaves it out.

    Raises:
        ValueError: an instruction that the suite does not have.
    """
    known = {text: task_id for task_id, text in enumerate(meta.instructions)}
    ours = {text: mapping.instructions.get(text, text) for text in layout.tasks.values()}
    unknown = sorted(text for text, name in ours.items() if name is not None and name not in known)
    if unknown:
        raise ValueError(
            f"the data set's instructions {unknown} are none of the suite's {len(known)} "
            f"{_show(meta.instructions)}: map them under instructions, or to null"
        )
    return {text: None if name is None else known[name] for text, name in ours.items()}


def _source(item: Mapping[str, Any]) -> Source:
    return Gripper(**item) if "opened" in item else Column(**item)


def _find(features: Mapping[str, Feature], key: str) -> Feature:
    if key not in features or len(features[key].shape) != 1:
        vectors = sorted(name for name, feature in features.items() if len(feature.shape) == 1)
        raise ValueError(f"the data set has no vector {key!r}, only {vectors}")
    return features[key]


def _show(names: Sequence[str] | None) -> str:
    if names is None:
        return "(unnamed)"
    return "(" + ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") + ")"
