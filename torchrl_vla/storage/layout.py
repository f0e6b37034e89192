"""What one row of a replay folder is made of, the files that hold it, and who may open them.

A folder holds one raw file per key, each ``[lanes * slots, ...]``, and ``replay.json``, which
names their shapes; packed pictures are in one ring of bytes per lane instead. Files get their disk
blocks when they are created: a disk that fills up later cannot kill a process that writes through a
memory map.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_vla import schema

FORMAT = 1
_NAME = "replay.json"
_UNFINISHED = "replay.json.new"
_LOCK = "lane-{:03d}.lock"


@dataclass(frozen=True)
class Column:
    """One key of a row: what a single row of it looks like."""

    key: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """Dotted key, also the name of the file."""
        return ".".join(self.key)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


BOOKKEEPING = (
    Column(("commit",), (), torch.int64),
    Column(("stamp",), (), torch.int64),
    Column(("next_slot",), (), torch.int64),
    Column(("next_stamp",), (), torch.int64),
    Column(("log",), (), torch.int64),
    Column(("observation_crc",), (), torch.int64),
    Column(("row_crc",), (), torch.int64),
    Column(("priority",), (), torch.float32),
)
"""Per slot: see :mod:`torchrl_vla.storage.lane`, which writes them."""
PACKING = (Column(("pack_start",), (), torch.int64), Column(("pack_length",), (), torch.int64))
"""Per slot, if pictures are packed: see :mod:`torchrl_vla.storage.packing`."""
_LEAST_PACKED = 8
"""Observations for which a ring of packed ones has room at least."""
HEADER = ("committed", "allocated", "evicted", "synced", "pid")
"""Per lane: counts, each one aligned 8-byte word. Commit numbers and stamps start at 1 and 0."""


def as_path(key: NestedKey) -> tuple[str, ...]:
    """Return a nested key as a tuple."""
    return (key,) if isinstance(key, str) else tuple(key)


@dataclass(frozen=True)
class Layout:
    """The keys of a transition, and which of them are observations (stored once)."""

    observations: tuple[Column, ...]
    """Root keys; ``("next", *key)`` of a row is the root observation of the row that follows."""
    columns: tuple[Column, ...]
    """Everything else, such as action and ``("next", "reward")``."""
    episode: tuple[str, ...]
    """Integer key that says which rows belong together."""
    decision: tuple[str, ...]
    """Integer key that counts them: 0, 1, ..."""
    done: tuple[str, ...]
    compress_to: float | None = None
    """Share of their size for which the disk has room for uint8 observations, which are packed
    without loss; ``None``: as they are."""

    def __post_init__(self) -> None:
        share = self.compress_to
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"compress_to is {share}; it must be above 0 and at most 1")
        if share is not None and not self.packed:
            names = [str(c) for c in self.observations]
            raise ValueError(f"compress_to is {share}, and no observation of {names} is uint8")

    @classmethod
    def like(
        cls,
        example: TensorDictBase,
        *,
        observations: Sequence[NestedKey] = (schema.IMAGE, schema.STATE),
        episode: NestedKey = schema.EPISODE_ID,
        decision: NestedKey = schema.DECISION,
        done: NestedKey = schema.DONE,
    ) -> Layout:
        """Return the layout of transitions that look like ``example [M]``.

        Raises:
            KeyError: a named key is missing in ``example``, or an observation in its ``next``.
            ValueError: a key has the name of a file of the replay itself.
        """
        once = [as_path(key) for key in observations]
        leaves = {as_path(key): example.get(key) for key in example.keys(True, True)}
        later = [("next", *key) for key in once]
        marks = [as_path(key) for key in (episode, decision, done)]
        missing = [".".join(key) for key in [*once, *later, *marks] if key not in leaves]
        if missing:
            raise KeyError(
                f"transitions lack {missing}, which a replay needs; found "
                f"{schema.sorted_keys(example)}"
            )

        def column(key: tuple[str, ...]) -> Column:
            return Column(key, tuple(leaves[key].shape[1:]), leaves[key].dtype)

        reserved = {c.key for c in (*BOOKKEEPING, *PACKING)} | {("header",), ("pack",)}
        if reserved & set(leaves):
            names = sorted(reserved & set(leaves))
            raise ValueError(f"keys {names} are names of the replay's own files; rename them")
        rest = sorted(set(leaves) - set(once) - set(later))
        return cls(tuple(map(column, once)), tuple(map(column, rest)), *marks)

    def described(self) -> dict[str, str]:
        """Return dtype and shape by key, as ``replay.json`` records them."""
        once = {column.name: f"{column} once" for column in self.observations}
        marks = {f"({n})": ".".join(getattr(self, n)) for n in ("episode", "decision", "done")}
        if self.compress_to is not None:
            marks["(compress_to)"] = f"{self.compress_to} zlib"
        return once | {column.name: str(column) for column in self.columns} | marks

    @property
    def stored(self) -> tuple[Column, ...]:
        """Every file with one entry per slot."""
        packing = PACKING if self.packed else ()
        return (*self.plain, *self.columns, *BOOKKEEPING, *packing)

    @property
    def packed(self) -> tuple[Column, ...]:
        """Observations that are stored packed."""
        if self.compress_to is None:
            return ()
        return tuple(c for c in self.observations if c.dtype == torch.uint8)

    @property
    def plain(self) -> tuple[Column, ...]:
        """Observations that are stored as they are."""
        return tuple(c for c in self.observations if c not in self.packed)

    @property
    def slot_bytes(self) -> int:
        """Bytes on disk per slot, without packed pictures."""
        return sum(column.nbytes for column in self.stored)

    def packed_bytes(self, slots: int) -> int:
        """Return the bytes on disk of the packed pictures of a lane of ``slots``."""
        if not self.packed:
            return 0
        width = sum(column.nbytes for column in self.packed)
        return width * max(_LEAST_PACKED, math.ceil(self.compress_to * slots))

    def check(self, rows: TensorDictBase) -> dict[tuple[str, ...], Tensor]:
        """Return the leaves of ``rows [M]``, which has exactly these keys, shapes and dtypes.

        Raises:
            KeyError: a key is missing or unknown; nothing is left out without a word.
            ValueError: a shape or a dtype differs.
        """
        expected = {c.key: c for c in (*self.observations, *self.columns)}
        for c in self.observations:
            key = ("next", *c.key)
            expected[key] = Column(key, c.shape, c.dtype)
        found = {as_path(key): value for key, value in rows.items(True, True)}
        if found.keys() != expected.keys():
            missing = sorted(".".join(key) for key in expected.keys() - found.keys())
            unknown = sorted(".".join(key) for key in found.keys() - expected.keys())
            raise KeyError(
                f"rows for the replay lack {missing} and have {unknown}, which its layout does not "
                "know; select the layout's keys, or make the replay with a layout of these rows"
            )
        for key, value in found.items():
            if value.dtype != expected[key].dtype or tuple(value.shape[1:]) != expected[key].shape:
                raise ValueError(
                    f"{'.'.join(key)} is {value.dtype} {list(value.shape[1:])} per row; this "
                    f"replay holds {expected[key]}"
                )
        return found


def transition_layout(
    meta: schema.SuiteMeta, chunk_size: int, optional: Sequence[NestedKey] = ()
) -> Layout:
    """Return the layout of this package's transitions (:data:`torchrl_vla.schema.SCHEMA`).

    Args:
        meta: suite, for cameras, image size, state and action dims.
        chunk_size: ``H``.
        optional: keys of the schema that not every policy writes, such as ``schema.TOKENS``.
    """
    sizes = {
        "K": len(meta.cameras),
        "h": meta.image_size,
        "w": meta.image_size,
        "S": meta.state_dim,
        "H": chunk_size,
        "A": meta.action_dim,
    }
    example = TensorDict({}, batch_size=[0])
    for field in schema.SCHEMA:
        if field.required or field.key in optional:
            shape = [sizes[d] if isinstance(d, str) else d for d in field.shape]
            example[field.key] = torch.zeros(0, *shape, dtype=field.dtype)
    example["next", "observation"] = example["observation"]
    return Layout.like(example)


@dataclass(frozen=True)
class Sizes:
    """How large a replay is."""

    lanes: int
    """Writers at a time; each has its own ring."""
    rows: int
    """Newest rows of a lane that can be drawn."""
    slots: int
    """Observations a lane has room for: ``rows``, episode ends, and a margin."""

    @classmethod
    def of(cls, capacity: int, lanes: int, spare: int | None = None) -> Sizes:
        """Return the sizes of a replay of ``capacity`` rows over all lanes.

        Raises:
            ValueError: fewer rows than lanes, or ``spare`` below 4.
        """
        if lanes < 1 or capacity < lanes:
            raise ValueError(
                f"replay capacity is {capacity} for {lanes} lanes; every lane needs at least 1 row"
            )
        rows = -(-capacity // lanes)
        spare = max(64, rows // 64) if spare is None else spare
        if spare < 4:
            raise ValueError(f"spare is {spare}; a lane needs at least 4 observations to spare")
        return cls(lanes, rows, rows + spare)

    def nbytes(self, layout: Layout) -> int:
        """Return the bytes that a replay of ``layout`` has on the disk."""
        return sum(_file_sizes(layout, self).values())

    @property
    def places(self) -> int:
        """Slots of all lanes: indices are below this."""
        return self.lanes * self.slots


def open_folder(folder: Path, layout: Layout, sizes: Sizes, existing: str) -> str:
    """Make ``folder`` a replay, or check that it is this one; returns its id.

    Args:
        folder: on a local disk.
        layout: of the rows.
        sizes: of the rings.
        existing: what to do with a replay that is there: ``"refuse"``, ``"reuse"`` or ``"empty"``.

    Raises:
        FileExistsError: there is one and ``existing`` is ``"refuse"``, or the folder holds other
            things.
        ValueError: it is of another layout or size, or a file of it has been cut.
        PermissionError: it belongs to somebody else or is read-only.
        OSError: ``ENOSPC``, it would not fit on the disk.
    """
    if existing not in ("refuse", "reuse", "empty"):
        raise ValueError(f"existing is {existing!r}; use 'refuse', 'reuse' or 'empty'")
    if os.path.lexists(folder):
        _check_access(folder)
    present = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if _NAME in present:
        if existing == "refuse":
            raise FileExistsError(
                f"{folder} holds the replay of an earlier run; give this run a new folder, or say "
                "existing='reuse' to go on with it"
            )
        return _check_same(folder, layout, sizes)
    ours = {_UNFINISHED, *_file_sizes(layout, sizes), *map(_LOCK.format, range(sizes.lanes))}
    if present and not (_UNFINISHED in present and present <= ours):
        raise FileExistsError(
            f"{folder} is not empty and no replay: it holds {sorted(present)[:5]}; give the replay "
            "a folder of its own"
        )
    for name in present:  # a creation that was killed: nothing can have been written yet
        (folder / name).unlink()
    return _create(folder, layout, sizes)


def read_description(folder: Path) -> dict[str, object]:
    """Return what ``replay.json`` says.

    Raises:
        FileNotFoundError: ``folder`` holds no (complete) replay.
    """
    try:
        return json.loads((folder / _NAME).read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} holds no replay (no {_NAME})") from None


def lock_path(folder: Path, lane: int) -> Path:
    """Return the file whose lock the writer of ``lane`` holds."""
    return folder / _LOCK.format(lane)


def _file_sizes(layout: Layout, sizes: Sizes) -> dict[str, int]:
    files = {f"{c.name}.bin": c.nbytes * sizes.places for c in layout.stored}
    files["header.bin"] = sizes.lanes * len(HEADER) * 8
    if layout.packed:
        files["pack.bin"] = sizes.lanes * layout.packed_bytes(sizes.slots)
    return files


def _check_access(folder: Path) -> None:
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is there and not a folder; the replay needs one")
    owner, user = folder.stat().st_uid, os.geteuid()
    if owner != user:
        raise PermissionError(
            f"{folder} belongs to user {owner} and this process runs as user {user}; a replay is "
            "written by its owner only"
        )
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written to; a replay needs a writable folder")


def _description(layout: Layout, sizes: Sizes) -> dict[str, object]:
    described = {"format": FORMAT, "byteorder": sys.byteorder, "fields": layout.described()}
    return described | vars(sizes)


def _check_same(folder: Path, layout: Layout, sizes: Sizes) -> str:
    found, wanted = read_description(folder), _description(layout, sizes)
    name = str(found.pop("id"))
    if found != wanted:
        raise ValueError(
            f"{folder} holds a replay of another layout.\n  there: {_one_line(found)}\n"
            f"  here:  {_one_line(wanted)}\n  differs: {_differences(found, wanted)}\n"
            "give this run another folder"
        )
    for file, size in _file_sizes(layout, sizes).items():
        path = folder / file
        actual = path.stat().st_size if path.exists() else None
        if actual != size:
            raise ValueError(
                f"{path} has {actual} bytes, it was made with {size}; this replay is damaged and "
                "cannot be reused"
            )
    return name


def _one_line(description: Mapping[str, object]) -> str:
    return json.dumps(description, sort_keys=True)


def _differences(found: Mapping[str, object], wanted: Mapping[str, object]) -> list[str]:
    flat = [d | dict(d.get("fields", {})) for d in (found, wanted)]
    keys = sorted((flat[0].keys() | flat[1].keys()) - {"fields"})
    return [key for key in keys if flat[0].get(key) != flat[1].get(key)]


def _create(folder: Path, layout: Layout, sizes: Sizes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    files = _file_sizes(layout, sizes)
    needed, free = sum(files.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, _too_large(needed, free), str(folder))
    name = uuid.uuid4().hex
    content = json.dumps(_description(layout, sizes) | {"id": name}, indent=1)
    (folder / _UNFINISHED).write_text(content)
    try:
        for file, size in files.items():
            with (folder / file).open("xb") as opened:
                os.posix_fallocate(opened.fileno(), 0, size)
    except OSError as error:
        for file in [*files, _UNFINISHED]:
            (folder / file).unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(errno.ENOSPC, _too_large(needed, free), str(folder)) from error
    for lane in range(sizes.lanes):
        lock_path(folder, lane).touch()
    os.replace(folder / _UNFINISHED, folder / _NAME)
    return name


def _too_large(needed: int, free: int) -> str:
    return (
        f"the replay needs {needed} bytes ({needed / 1e9:.2f} GB) and the disk has {free} free; "
        "lower its capacity or choose another disk"
    )
