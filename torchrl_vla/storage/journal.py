"""A TorchRL storage that is durable as it is: memory-mapped files that are their own journal.

Rows are appended by processes that each own a lane (:mod:`torchrl_vla.storage.lane`) and are read
from any process at the same time, without a lock. A process that is killed at any moment leaves
every committed row and none of the others. Nothing is saved or loaded: a checkpoint keeps a
:meth:`JournalStorage.cursor` of a few numbers, and opening at it drops what came later.

What the room is for: keeping rows and finding them again. What it does not do: choose which rows a
minibatch has (:mod:`torchrl_vla.replay`), or look at what is in them.
"""

from __future__ import annotations

import json
import math
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_vla.storage.finder import Changes, RowFinder, RowGoneError
from torchrl_vla.storage.lane import (
    ALLOCATED,
    COMMITTED,
    EVICTED,
    SYNCED,
    LaneWriter,
    Rings,
)
from torchrl_vla.storage.layout import (
    Layout,
    Sizes,
    as_path,
    open_folder,
    read_description,
)
from torchrl_vla.storage.locks import claim, nobody_writing
from torchrl_vla.storage.maps import map_files, unmap_pages
from torchrl_vla.storage.outputs import Outputs

_START = {"committed": 0, "allocated": 0, "evicted": 0}
"""Where a lane stands before its first row."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NO_SEMAPHORES = True
"""TorchRL's storage then counts without process-shared values, whose semaphores would stay behind
in /dev/shm when a run is killed as a whole. What processes share here are the files."""


class JournalStorage(RowFinder, Storage):
    """Rows on memory-mapped files, each observation once; ``next`` is looked up.

    An *index* is a place, not a rank: ``0 <= index < max_size``, and some places hold no row. Take
    indices from :meth:`draw`, :meth:`live`, :meth:`changes` or from a sampler. A slice counts live
    rows, lane by lane, oldest first.

    Args:
        folder: on a local disk; the replay owns it.
        capacity: newest rows that can be drawn, over all lanes.
        layout: what a row is made of.
        lanes: processes that may write at the same time; each gets an equal part of ``capacity``.
        spare: observations each lane has room for beyond its rows: one per episode end, and what a
            checkpoint's cursor may lie behind without losing rows. With too few, the oldest rows
            go early. At least 4; ``None`` is a 64th of the lane's rows, at least 64.
        existing: ``"refuse"`` a folder with a replay in it, ``"reuse"`` it, or make it ``"empty"``.
        cursor: go on from here (:meth:`cursor`); later rows are dropped. Needs ``"reuse"``.
        verify: compare checksums. ``None`` checks the rows since the last sync if the machine was
            started anew (or is another one) since they were written; ``True`` checks all.

    Raises:
        ValueError: a number is out of its range, another layout, or a cursor of another replay.
        RuntimeError: another process is writing this replay.
        OSError: see :func:`torchrl_vla.storage.layout.open_folder`.
    """

    def __init__(
        self,
        folder: Path | str,
        capacity: int,
        layout: Layout,
        *,
        lanes: int = 1,
        spare: int | None = None,
        existing: str = "refuse",
        cursor: Mapping[str, Any] | None = None,
        verify: bool | None = None,
    ) -> None:
        if cursor is not None and existing != "reuse":
            raise ValueError("a cursor goes on with an existing replay; say existing='reuse'")
        self.folder, self.layout = Path(folder).absolute(), layout
        self.sizes = Sizes.of(capacity, lanes, spare)
        self.id = open_folder(self.folder, layout, self.sizes, existing)
        super().__init__(self.sizes.places, compilable=_NO_SEMAPHORES)
        self.capacity = capacity
        self.lost_rows = 0
        """Rows that the opening could not bring back (overwritten since the cursor, or damaged)."""
        self._lane: int | None = None
        self._attach()
        if existing == "empty":
            cursor = {"id": self.id, "lanes": [_START] * lanes}
        self._open(cursor, verify)

    @classmethod
    def attached(
        cls, folder: Path | str, layout: Layout, lane: int | None = None
    ) -> JournalStorage:
        """Return a replay that another process has open, to read it or to write a lane of it.

        Args:
            folder: of the replay.
            layout: of its rows.
            lane: the one to write; any that is free if ``None``.

        Raises:
            FileNotFoundError: ``folder`` holds no replay.
            ValueError: it has another layout.
        """
        found = read_description(Path(folder))
        sizes = Sizes(*(int(found[name]) for name in ("lanes", "rows", "slots")))
        storage = cls.__new__(cls)
        Storage.__init__(storage, sizes.places, compilable=_NO_SEMAPHORES)
        storage.folder, storage.layout, storage.sizes = Path(folder).absolute(), layout, sizes
        storage.capacity, storage.lost_rows = sizes.rows * sizes.lanes, 0
        storage._lane = lane
        storage.id = open_folder(storage.folder, layout, sizes, "reuse")
        storage._attach()
        return storage

    def _attach(self) -> None:
        self.rings = Rings(map_files(self.folder, self.layout, self.sizes), self.layout, self.sizes)
        self._outputs = Outputs()
        self._writer: tuple[int, LaneWriter, weakref.finalize] | None = None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        counters = ("_mutation_revision_value", "_last_cursor_index_value")
        for name in ("rings", "_outputs", "_writer", *counters):
            state.pop(name, None)
        # Other processes attach to the files; which buffers use this object is not their business.
        state["_attached_entities_list"] = []
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach()

    def _open(self, cursor: Mapping[str, Any] | None, verify: bool | None) -> None:
        if cursor is not None and cursor["id"] != self.id:
            raise ValueError(
                f"the cursor is of replay {cursor['id']}, and {self.folder} holds replay {self.id}"
            )
        rings, lanes = self.rings, range(self.sizes.lanes)
        with nobody_writing(self.folder, rings):
            for lane in lanes:
                rings.recover(lane)
            missing = 0
            if cursor is not None:  # first, so that rows to be dropped are not worth keeping
                missing = sum(rings.rewind(lane, **cursor["lanes"][lane]) for lane in lanes)
            boot = self.folder / "boot_id"
            known = boot.exists() and boot.read_text() == _BOOT.read_text()
            broken = 0
            if verify or (verify is None and not known):
                since = [0 if verify else int(n) for n in rings.header[:, SYNCED]]
                broken = sum(rings.keep_intact(lane, since[lane]) for lane in lanes)
            if not known:
                boot.write_text(_BOOT.read_text())
        self.lost_rows = broken + missing
        if self.lost_rows:
            warnings.warn(
                f"{self.folder}: {broken} rows were given up because of damage and {missing} of "
                f"the cursor's rows are no longer there; {len(self)} rows are left",
                stacklevel=4,
            )

    def cursor(self, seen: Changes | None = None, *, sync: bool = False) -> dict[str, Any]:
        """Return a small record of where every lane stands, for a checkpoint.

        Args:
            seen: where they stood at this look (:meth:`changes`) instead of now, so that a
                checkpoint has exactly the rows that were counted.
            sync: also wait until every row is on the disk. Without it a killed process loses
                nothing; a machine that loses power may lose rows, which the next opening notices.
        """
        header = self.rings.header.copy()
        if sync:
            for path in self.folder.glob("*.bin"):
                with path.open("rb") as opened:
                    os.fsync(opened.fileno())
            self.rings.header[:, SYNCED] = header[:, COMMITTED]
        if seen is not None:
            for lane, committed in enumerate((seen.window[1] - 1).tolist()):
                header[lane, ALLOCATED] = self.rings.allocated_after(lane, committed)
                header[lane, COMMITTED] = committed
        names = {"committed": COMMITTED, "allocated": ALLOCATED, "evicted": EVICTED}
        lanes = [{name: int(line[at]) for name, at in names.items()} for line in header]
        return {"id": self.id, "lanes": lanes}

    def append(self, rows: TensorDictBase) -> Tensor:
        """Commit ``rows [M]`` to this process's lane and return their indices ``[M]``.

        Rows of an episode must come in order, with their ``next``. If the process is killed inside,
        a prefix of ``rows`` may have been committed.

        Raises:
            KeyError, ValueError: ``rows`` are not in the layout.
            RuntimeError: all lanes have living writers.
        """
        leaves, writer = self.layout.check(rows), self._own_lane()
        most = writer.most_rows
        parts = (slice(start, start + most) for start in range(0, len(rows), most))
        try:
            done = [writer.append({k: leaf[part] for k, leaf in leaves.items()}) for part in parts]
        except BaseException:  # Ctrl-C too: who writes next clears up first
            self.release()
            raise
        self.forget_pages()
        return torch.cat(done) if done else torch.empty(0, dtype=torch.int64)

    def forget_pages(self) -> None:
        """Give back this process's resident pages of observations; nothing of the replay is lost.

        For whoever reads or writes each observation once. They come back when they are read again.
        """
        for name in (*(column.name for column in self.layout.plain), "pack"):
            if name in self.rings.files:
                unmap_pages(self.rings.files[name])

    def _own_lane(self) -> LaneWriter:
        if self._writer is not None:
            pid, writer, unlock = self._writer
            if pid == os.getpid():
                return writer
            unlock()  # a descriptor inherited by fork: the lane stays the parent's
        lane, lock = claim(self.folder, self.rings, self._lane)
        unlock = weakref.finalize(self, os.close, lock)
        self._writer = (os.getpid(), LaneWriter(self.rings, lane), unlock)
        return self._writer[1]

    def release(self) -> None:
        """Give this process's lane back, for another writer. Idempotent."""
        if self._writer is not None:
            self._writer[2]()
            self._writer = None

    def get(self, index: Any) -> TensorDict:
        """Return whole rows with ``next``; an integer gives a single one.

        The large tensors are handed out again once nobody holds a reference to them or to a view.

        Raises:
            RowGoneError: a place holds no row (any more).
            RuntimeError: a packed picture is damaged.
        """
        if isinstance(index, int | np.integer):
            return self.get([index])[0]
        if isinstance(index, slice):
            index = self.live()[index]
        places = torch.as_tensor(index, dtype=torch.int64).flatten()
        at, rings = places.numpy(), self.rings
        commits, then = self._begin(at)
        out = self.columns(places, [column.key for column in self.layout.columns])
        for column in self.layout.plain:
            width = math.prod(column.shape)  # flat rows copy faster
            source = rings.files[column.name].view(self.max_size, width)
            for key, where in ((column.key, places), (("next", *column.key), then)):
                value = self._outputs.take(len(places), column)
                torch.index_select(source, 0, where, out=value.view(len(places), width))
                out.set(key, value)
        broken = self._unpack(out, np.concatenate([at, then.numpy()]))
        self._end(at, commits, then.numpy())
        if broken:
            raise RuntimeError(
                f"{len(broken)} packed pictures of {self.folder} are damaged, such as that of "
                f"place {broken[0]}; open the replay with verify=True, which gives up such rows"
            )
        return out

    def _unpack(self, out: TensorDict, places: np.ndarray) -> list[int]:
        """Add the packed observations of rows and of their ``next``; returns what is broken."""
        packs, both = self.rings.packs, {}
        if packs is None:
            return []
        for column in self.layout.packed:
            value = self._outputs.take(len(places), column)
            both[column.key] = value.view(len(places), column.nbytes).numpy()
            out.set(column.key, value[: len(out)])
            out.set(("next", *column.key), value[len(out) :])
        return packs.read(places, both)

    def _begin(self, at: np.ndarray) -> tuple[np.ndarray, Tensor]:
        if len(at) and (at.min() < 0 or at.max() >= self.max_size):
            raise RowGoneError(f"indices {at.min()}..{at.max()}; the limit is {self.max_size - 1}")
        commits = self.rings.commit[at]
        there = self._is_live(at, commits)
        if not there.all():
            raise RowGoneError(
                f"{(~there).sum()} of {len(at)} places hold no row, such as {at[~there][0]}; take "
                "indices from draw(), live() or changes()"
            )
        return commits, torch.from_numpy(self.rings.next_slot[at])

    def _end(self, at: np.ndarray, commits: np.ndarray, then: np.ndarray) -> None:
        """Raise if a writer reached a row while it was copied."""
        rings = self.rings
        whole = (rings.stamp[then] == rings.next_stamp[at]) & (rings.commit[at] == commits)
        if not whole.all():
            raise RowGoneError(f"{(~whole).sum()} rows were overwritten while they were read")

    def columns(self, index: Tensor, keys: Sequence[NestedKey]) -> TensorDict:
        """Return a few columns of rows ``[M]`` without touching any image.

        A row that a writer overwrites meanwhile may come out mixed; :meth:`get` does not allow
        that.

        Args:
            index: places ``[M]``.
            keys: of the layout's columns, such as ``("next", "reward")``.
        """
        names = {column.key: column.name for column in self.layout.columns}
        out = TensorDict({}, batch_size=[len(index)])
        for key in map(as_path, keys):
            out.set(key, torch.index_select(self.rings.files[names[key]], 0, index))
        return out

    def __iter__(self) -> Iterator[TensorDict]:
        for index in self.live().tolist():
            yield self[index]

    def _rand_given_ndim(self, batch_size: int) -> Tensor:
        return self.draw(batch_size, self._rng)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Refuse: rows are appended, never changed."""
        raise NotImplementedError(
            "a journal is only appended to; use JournalReplayBuffer, or JournalWriter as the writer"
        )

    def _empty(self) -> None:
        raise NotImplementedError("a journal is not emptied; open a new folder")

    def state_dict(self) -> dict[str, Any]:
        """Return :meth:`cursor`: the rows stay where they are."""
        return self.cursor()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a cursor of this replay; refused while another process writes."""
        self.release()
        self._open(state_dict, verify=False)

    def dumps(self, path: Path | str) -> None:
        """Write :meth:`state_dict` to the folder ``path``."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        (path / "cursor.json").write_text(json.dumps(self.state_dict()))

    def loads(self, path: Path | str) -> None:
        """Go back to what :meth:`dumps` wrote."""
        self.load_state_dict(json.loads((Path(path) / "cursor.json").read_text()))
        self._bump_mutation_revision()
