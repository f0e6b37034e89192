"""One writer's ring: how a row gets onto disk so that it is there whole or not at all.

A lane is a ring of slots. A slot holds one observation, and the columns of the row that starts from
it. A row names the slot of its ``next``: normally the slot where its successor starts, so every
observation is stored once; after the last decision of an episode a slot that no row starts from.
The observation after the newest row of an open episode waits in such a slot too, and the row that
continues the episode moves in there. A slot is never older than the rows that point at it.

Order of stores, which is what a reader in another process and a kill can see:

1. ``evicted`` rises over the rows whose slots are taken, then those slots lose ``commit`` and
   ``stamp``: nobody finds them any more, and whoever copied meanwhile notices.
2. Observations, then their ``stamp``; columns, ``next_slot``, checksums; ``commit`` and ``log``.
3. ``allocated``, then ``committed``: one aligned 8-byte store makes all rows of the call visible.

This needs stores to become visible in program order, as they do on x86-64. Memory maps outlive a
killed process, so the order is all that a kill needs. A machine that loses power writes pages in
any order; for that, rows and observations carry checksums.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from torchrl_vla.storage.layout import HEADER, Layout, Sizes
from torchrl_vla.storage.packing import Packed, Packs, PackWriter

COMMITTED, ALLOCATED, EVICTED, SYNCED, PID = range(len(HEADER))
Rows = Mapping[tuple[str, ...], Tensor]
"""Leaves ``[M, ...]`` of transitions, by key."""
_ROW_IDENTITY = ("commit", "stamp", "next_slot", "next_stamp")


class Rings:
    """The mapped files of a replay, with the arithmetic that lanes share."""

    def __init__(self, files: Mapping[str, Tensor], layout: Layout, sizes: Sizes) -> None:
        self.files, self.layout, self.sizes = files, layout, sizes
        self.header = files["header"].numpy()
        self.commit, self.stamp = files["commit"].numpy(), files["stamp"].numpy()
        self.next_slot = files["next_slot"].numpy()
        self.next_stamp = files["next_stamp"].numpy()
        self.log = files["log"].numpy()
        self.priority = files["priority"].numpy()
        self.packs = Packs(files, layout, sizes) if layout.packed else None
        self._bytes = {
            c.name: files[c.name].view(sizes.places, -1).view(torch.uint8).numpy()
            for c in layout.stored
        }

    def first(self, lane: int) -> int:
        """Return the oldest commit number of a lane that is still there; newest + 1 if none."""
        committed, _, evicted, *_ = map(int, self.header[lane])
        return max(committed - self.sizes.rows, evicted) + 1

    def region(self, lane: int) -> slice:
        """Return the lane's part of every file."""
        return slice(lane * self.sizes.slots, (lane + 1) * self.sizes.slots)

    def logged(self, lane: int, commits: np.ndarray) -> np.ndarray:
        """Return the index of each row of a lane by commit number."""
        return self.log[lane * self.sizes.slots + (commits - 1) % self.sizes.slots]

    def allocated_after(self, lane: int, commit: int) -> int:
        """Return how many stamps a lane had given out when it had committed ``commit`` rows.

        Stamps are given out row by row, and a row's ``next`` gets its last one.

        Raises:
            LookupError: that row has been overwritten.
        """
        if commit == 0:
            return 0
        at = int(self.logged(lane, np.array([commit]))[0])
        if self.commit[at] != commit:
            raise LookupError(
                f"row {commit} of lane {lane} is overwritten: its writer went round the whole ring "
                "since it was looked at; look more often, or give the replay more capacity"
            )
        return int(self.next_stamp[at]) + 1

    def observation_crcs(self, index: np.ndarray) -> np.ndarray:
        """Return the checksum of each observation as it is in the files now, packed or not."""
        once = [self._bytes[c.name] for c in self.layout.plain]
        out = np.zeros(len(index), np.int64)
        for k, i in enumerate(index):
            crc = 0
            for data in once:
                crc = zlib.crc32(data[i], crc)
            out[k] = crc if self.packs is None else zlib.crc32(self.packs.part(i), crc)
        return out

    def observation(self, place: int) -> dict[tuple[str, ...], np.ndarray] | None:
        """Return the bytes of every observation of a place; ``None`` if they cannot be unpacked."""
        found = {c.key: self._bytes[c.name][place] for c in self.layout.plain}
        if self.packs is None:
            return found
        raw = self.packs.unpack(place)
        return None if raw is None else found | self.packs.split(raw)

    def row_crcs(self, index: np.ndarray) -> np.ndarray:
        """Return the checksum of each row's columns, place and commit number."""
        names = [*(c.name for c in self.layout.columns), *_ROW_IDENTITY]
        rows = np.concatenate([self._bytes[name][index] for name in names], axis=1)
        return np.array([zlib.crc32(row) for row in rows], np.int64)

    def recover(self, lane: int) -> None:
        """Forget what a writer left uncommitted when it died. Only without a live writer."""
        region, header = self.region(lane), self.header[lane]
        commit, stamp = self.commit[region], self.stamp[region]
        commit[commit > header[COMMITTED]] = 0
        stamp[stamp >= header[ALLOCATED]] = -1

    def rewind(self, lane: int, committed: int, allocated: int, evicted: int) -> int:
        """Go back to counts that the lane's header once had.

        Returns:
            Rows that could be drawn then and are lost: overwritten since, or never on the disk
            when the machine lost power.
        """
        header = self.header[lane]
        first = max(committed - self.sizes.rows, evicted) + 1
        here = min(committed, int(header[COMMITTED]))
        gone = min(here, int(header[EVICTED]))
        header[COMMITTED] = here
        header[ALLOCATED] = min(allocated, int(header[ALLOCATED]))
        header[EVICTED] = gone
        header[SYNCED] = min(here, int(header[SYNCED]))
        self.recover(lane)
        return committed + 1 - first - max(0, here + 1 - max(first, gone + 1))

    def keep_intact(self, lane: int, since: int) -> int:
        """Check the rows committed after ``since``; keep the longest run without a broken one.

        Returns:
            Rows given up.
        """
        committed = int(self.header[lane, COMMITTED])
        first = self.first(lane)
        commits = np.arange(first, committed + 1)
        index = self.logged(lane, commits)
        known = (index >= lane * self.sizes.slots) & (index < (lane + 1) * self.sizes.slots)
        good = known.copy()
        good[known] = self.commit[index[known]] == commits[known]
        checked = good & (commits > since)
        good[checked] = self._intact(lane, index[checked])
        broken = np.flatnonzero(~good)
        if not len(broken):
            return 0
        edges = np.concatenate([[-1], broken, [len(good)]])
        k = int(np.argmax(np.diff(edges)))
        start, stop = first + int(edges[k]) + 1, first + int(edges[k + 1])
        self.header[lane, EVICTED] = start - 1
        self.header[lane, COMMITTED] = stop - 1
        self.header[lane, SYNCED] = min(self.header[lane, SYNCED], stop - 1)
        self.recover(lane)
        self._forget_all_but(lane, index[int(edges[k]) + 1 : int(edges[k + 1])])
        return len(good) - (stop - start)

    def _forget_all_but(self, lane: int, index: np.ndarray) -> None:
        """Forget what the observations that no row of ``index`` has say of themselves."""
        forgotten = np.ones(self.sizes.slots, bool)
        forgotten[np.concatenate([index, self.next_slot[index]]) - lane * self.sizes.slots] = False
        self.stamp[self.region(lane)][forgotten] = -1

    def _intact(self, lane: int, index: np.ndarray) -> np.ndarray:
        following = self.next_slot[index]
        base = lane * self.sizes.slots
        good = (following >= base) & (following < base + self.sizes.slots)
        good &= self.row_crcs(index) == self.files["row_crc"].numpy()[index]
        crcs = self.files["observation_crc"].numpy()
        both = np.unique(np.concatenate([index, following[good]]))
        fine = dict(zip(both, self.observation_crcs(both) == crcs[both], strict=True))
        pairs = zip(index, following, strict=True)
        good &= np.array([fine[i] and fine.get(j, False) for i, j in pairs], bool)
        return good & (self.stamp[following % self.sizes.places] == self.next_stamp[index])


class LaneWriter:
    """Appends rows to one lane. The only writer of its region."""

    def __init__(self, rings: Rings, lane: int) -> None:
        self.rings, self.lane = rings, lane
        self.base, self.slots = lane * rings.sizes.slots, rings.sizes.slots
        self.header = rings.header[lane]
        self.margin = max(2, (rings.sizes.slots - rings.sizes.rows) // 2)
        rings.recover(lane)
        self.packer = None
        if rings.packs is not None:
            stamps = rings.stamp[rings.region(lane)]
            self.packer = PackWriter(rings.packs, lane, stamps)
        self.ends = self._open_ends()
        """By open episode: its next decision, and the stamp of the observation waiting there."""

    @property
    def most_rows(self) -> int:
        """Rows to give to one :meth:`append`, so that it takes at most the margin."""
        most = self.margin // 2
        return most if self.packer is None else min(most, self.packer.most_rows)

    def append(self, rows: Rows) -> Tensor:
        """Write and commit ``rows [M]``, ``M`` at most :attr:`most_rows`; returns their indices.

        Rows of one episode must come in order; several episodes may alternate.
        """
        count = len(rows[self.rings.layout.episode])
        start, commits = int(self.header[ALLOCATED]), int(self.header[COMMITTED])
        root, following, owned, ends = self._place(rows, start)
        fresh = np.arange(start, int(following[-1]) + 1)
        places, at, then = (self.base + stamps % self.slots for stamps in (fresh, root, following))
        rings, files = self.rings, self.rings.files
        own = torch.from_numpy(np.flatnonzero(owned))
        packed, taken = None, places
        if self.packer is not None:
            packed = self.packer.pack(self._pictures(rows, root - start, following - start, own))
            taken = np.concatenate([places, self._overwritten(packed, start, commits + count)])

        self.header[EVICTED] = max(int(self.header[EVICTED]), int(rings.commit[taken].max()))
        rings.commit[taken] = 0
        rings.stamp[taken] = -1

        at_index, then_index = torch.from_numpy(at), torch.from_numpy(then)
        for column in rings.layout.plain:
            target, value = files[column.name], rows[column.key]
            target.index_copy_(0, then_index, rows["next", *column.key])
            target.index_copy_(0, at_index[own], value if len(own) == count else value[own])
        if packed is not None:
            self.packer.write(places, packed)
        files["observation_crc"].numpy()[places] = rings.observation_crcs(places)
        rings.stamp[places] = fresh
        for column in rings.layout.columns:
            files[column.name].index_copy_(0, at_index, rows[column.key])
        rings.next_slot[at], rings.next_stamp[at] = then, following
        rings.priority[at] = np.nan
        numbers = np.arange(commits + 1, commits + 1 + count)
        rings.commit[at] = numbers
        files["row_crc"].numpy()[at] = rings.row_crcs(at)
        rings.log[self.base + (numbers - 1) % self.slots] = at

        self.header[ALLOCATED] = start + len(fresh)
        self.header[COMMITTED] = commits + count
        self._note(ends)
        return at_index

    def _pictures(
        self, rows: Rows, root: np.ndarray, following: np.ndarray, own: Tensor
    ) -> np.ndarray:
        """Return the pictures to be packed, uint8 ``[F, width]`` in the order of their stamps."""
        raw = np.empty((int(following[-1]) + 1, self.rings.packs.width), np.uint8)
        for key, part in self.rings.packs.split(raw).items():
            part[following] = rows["next", *key].flatten(1).numpy()
            part[root[own.numpy()]] = rows[key][own].flatten(1).numpy()
        return raw

    def _overwritten(self, packed: Packed, start: int, committed: int) -> np.ndarray:
        """Return the places whose pictures make room; warns if rows are lost that were wanted."""
        rings = self.rings
        places = self.packer.overwritten(packed, start)
        if len(places):
            left, wanted = committed - int(rings.commit[places].max()), rings.sizes.rows
            if left < min(wanted, committed):
                self.packer.warn_of_loss(left, wanted, packed)
        return places

    def _place(
        self, rows: Rows, start: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, tuple[int, int] | None]]:
        """Choose a stamp for the root and the next observation of every row.

        Returns:
            Root stamps ``[M]``, next stamps ``[M]``, whether the root is stored with this row
            ``[M]`` (it is not where it continues an earlier one), and how ``ends`` changes.
        """
        layout = self.rings.layout
        episode, decision, done = (
            rows[key].flatten().tolist() for key in (layout.episode, layout.decision, layout.done)
        )
        root, following = np.zeros((2, len(episode)), np.int64)
        owned = np.ones(len(episode), bool)
        follows = self._neighbours(rows)
        changed: dict[int, tuple[int, int] | None] = {}
        writer_of: dict[int, int] = {}  # row of this call whose next observation has a stamp
        stamp = start
        for i, name in enumerate(episode):
            end = changed.get(name, self.ends.get(name))
            if end is not None and end[0] == decision[i] and self._waits(end[1], start, len(done)):
                j = writer_of.get(end[1])
                same = follows[i] if i and j == i - 1 else self._same(rows, i, end[1], j)
                owned[i] = not same
            if owned[i]:
                root[i], stamp = stamp, stamp + 1
            else:
                root[i] = end[1]
            following[i], stamp = stamp, stamp + 1
            writer_of[int(following[i])] = i
            changed[name] = None if done[i] else (decision[i] + 1, int(following[i]))
        return root, following, owned, changed

    def _neighbours(self, rows: Rows) -> list[bool]:
        """Whether each row starts from the ``next`` of the row before it in ``rows``."""
        same = torch.ones(len(rows[self.rings.layout.episode]) - 1, dtype=torch.bool)
        for column in self.rings.layout.observations:
            root, following = rows[column.key], rows["next", *column.key]
            same &= (root[1:] == following[:-1]).unsqueeze(-1).flatten(1).all(1)
        return [False, *same.tolist()]

    def _waits(self, stamp: int, start: int, rows: int) -> bool:
        """Whether the observation of ``stamp`` is still there after a commit of ``rows``."""
        if stamp >= start or self.packer is None:
            return stamp >= start - self.margin
        return stamp >= start - self.margin and self.packer.stays(stamp, rows)

    def _same(self, rows: Rows, i: int, stamp: int, writer: int | None) -> bool:
        """Whether row ``i`` starts from the observation that has ``stamp``."""
        once = self.rings.layout.observations
        if writer is not None:
            return all(torch.equal(rows["next", *c.key][writer], rows[c.key][i]) for c in once)
        waiting = self.rings.observation(self.base + stamp % self.slots)
        return waiting is not None and all(
            np.array_equal(waiting[c.key], rows[c.key][i].reshape(-1).view(torch.uint8))
            for c in once
        )

    def _note(self, changed: dict[int, tuple[int, int] | None]) -> None:
        for name, end in changed.items():
            self.ends.pop(name, None)
            if end is not None:
                self.ends[name] = end  # at the back: entries stay in the order of their stamps
        oldest = int(self.header[ALLOCATED]) - self.margin
        for name, (_, stamp) in list(self.ends.items()):
            if stamp >= oldest:
                break
            del self.ends[name]

    def _open_ends(self) -> dict[int, tuple[int, int]]:
        rings, layout = self.rings, self.rings.layout
        commits = np.arange(rings.first(self.lane), int(self.header[COMMITTED]) + 1)
        index = rings.logged(self.lane, commits)
        following = rings.next_slot[index]
        waiting = rings.commit[following] == 0
        waiting &= rings.stamp[following] == rings.next_stamp[index]
        index = index[waiting]
        episode, decision, done = (
            rings.files[".".join(key)].numpy()[index].reshape(len(index))
            for key in (layout.episode, layout.decision, layout.done)
        )
        stamps = rings.next_stamp[index]
        order = np.argsort(stamps)
        found: dict[int, tuple[int, int]] = {}
        for k in order[~done[order].astype(bool)]:
            found.pop(int(episode[k]), None)
            found[int(episode[k])] = (int(decision[k]) + 1, int(stamps[k]))
        return found
