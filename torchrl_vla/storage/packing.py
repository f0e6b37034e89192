"""Pictures in fewer bytes: a ring of bytes per lane beside the lane's ring of slots.

Packed pictures differ in size. They stand one after the other in the ring of bytes, in the order of
their stamps, and a slot says where: writing goes over the oldest ones in both rings, so nothing is
ever moved or searched for. How many rows fit depends on the pictures: if they take more than the
ring was made for, the oldest rows go early, and a warning says so. A picture that does not get
smaller is kept as it is.

Order of stores and the reader's check afterwards are those of :mod:`torchrl_vla.storage.lane`.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from torchrl_vla.storage.layout import Layout, Sizes

LEVEL = 1
"""Of zlib. Higher ones take longer than a simulator takes for the step, for a few percent."""


@dataclass(frozen=True)
class Packed:
    """Pictures of one commit, in the order of their stamps."""

    parts: Sequence[bytes]
    starts: np.ndarray
    """Where each begins; counts all bytes that the lane has ever been given ``[F]``."""

    @property
    def end(self) -> int:
        """Where the next one may begin."""
        return int(self.starts[-1]) + len(self.parts[-1])


class Packs:
    """The packed pictures of all lanes.

    Args:
        files: mapped, see :func:`torchrl_vla.storage.maps.map_files`.
        layout: of the rows; it has packed columns.
        sizes: of the rings.
    """

    def __init__(self, files: Mapping[str, Tensor], layout: Layout, sizes: Sizes) -> None:
        self.columns, self.slots = layout.packed, sizes.slots
        self.bytes = files["pack"].numpy()
        self.starts, self.lengths = (files[f"pack_{n}"].numpy() for n in ("start", "length"))
        ends = np.cumsum([column.nbytes for column in self.columns]).tolist()
        self.width = ends[-1]
        """Bytes of an observation's pictures as they are."""
        starts = [0, *ends[:-1]]
        self._cuts = {c.key: slice(*at) for c, *at in zip(self.columns, starts, ends, strict=True)}
        self.room = self.bytes.shape[1]
        """Bytes of a lane's ring."""

    def part(self, place: int) -> np.ndarray:
        """Return the packed bytes of a place; none if what it says cannot be."""
        start, length = int(self.starts[place]), int(self.lengths[place])
        at = start % self.room
        if start < 0 or not 0 < length <= min(self.width, self.room - at):
            return self.bytes[0, :0]
        return self.bytes[place // self.slots, at : at + length]

    def unpack(self, place: int) -> np.ndarray | None:
        """Return the pictures of a place, uint8 ``[width]``; ``None`` if they cannot be read.

        That means damage, or a writer that was faster: the stamps tell.
        """
        part = self.part(place)
        if len(part) == self.width:
            return part
        unpacker = zlib.decompressobj()
        try:
            raw = unpacker.decompress(part, self.width + 1)
        except zlib.error:
            return None
        if len(raw) != self.width or not unpacker.eof:
            return None
        return np.frombuffer(raw, np.uint8)

    def split(self, raw: np.ndarray) -> dict[tuple[str, ...], np.ndarray]:
        """Return the bytes of every packed column of raw pictures ``[..., width]``."""
        return {key: raw[..., cut] for key, cut in self._cuts.items()}

    def read(self, places: np.ndarray, outs: Mapping[tuple[str, ...], np.ndarray]) -> list[int]:
        """Unpack ``places [M]`` into ``outs``, each uint8 ``[M, nbytes]``; every place once.

        Returns:
            The places that could not be read.
        """
        broken, before = [], (-1, 0)
        for row in np.argsort(places, kind="stable").tolist():
            place = int(places[row])
            if place == before[0]:
                for out in outs.values():
                    out[row] = out[before[1]]
                continue
            before = place, row
            raw = self.unpack(place)
            if raw is None:
                broken.append(place)
                continue
            for key, part in self.split(raw).items():
                outs[key][row] = part
        return broken


class PackWriter:
    """Packs the pictures of one lane. The only writer of its ring of bytes.

    Args:
        packs: the rings.
        lane: whose.
        stamps: of the lane's slots, in the file; nothing uncommitted is left in them.
    """

    def __init__(self, packs: Packs, lane: int, stamps: np.ndarray) -> None:
        self.packs, self.lane, self._stamps = packs, lane, stamps
        self._base, self._slots = lane * packs.slots, packs.slots
        there = np.flatnonzero(stamps >= 0)
        self._end = self._first_free(self._base + there)
        self._oldest = int(stamps[there].min()) if len(there) else 0
        self._warned = False

    def _first_free(self, places: np.ndarray) -> int:
        """Return where the newest picture of ``places`` ends.

        Those that a cursor dropped are not among them, so that a lane goes on at the same byte.
        """
        starts, lengths = self.packs.starts[places], self.packs.lengths[places]
        fine = (starts >= 0) & (lengths > 0) & (lengths <= self.packs.width)
        return int((starts + lengths)[fine].max(initial=0))

    @property
    def most_rows(self) -> int:
        """Rows of one commit that take at most half of the ring, each two observations."""
        return max(1, (self.packs.room // self.packs.width - 2) // 4)

    def stays(self, stamp: int, rows: int) -> bool:
        """Whether the pictures of ``stamp`` outlive a commit of ``rows`` that do not shrink."""
        start = int(self.packs.starts[self._base + stamp % self._slots])
        return start >= self._end + (2 * rows + 1) * self.packs.width - self.packs.room

    def pack(self, raw: np.ndarray) -> Packed:
        """Pack pictures, uint8 ``[F, width]``, and choose where they go."""
        room, width = self.packs.room, self.packs.width
        parts = [zlib.compress(row, LEVEL) for row in raw]
        parts = [p if len(p) < width else row.tobytes() for p, row in zip(parts, raw, strict=True)]
        starts, end = np.empty(len(parts), np.int64), self._end
        for k, part in enumerate(parts):
            if end % room + len(part) > room:  # none goes over the end of the file
                end += room - end % room
            starts[k], end = end, end + len(part)
        return Packed(parts, starts)

    def overwritten(self, packed: Packed, first: int) -> np.ndarray:
        """Return the places whose pictures ``packed`` is going to be written over.

        Args:
            packed: what comes.
            first: its first stamp.
        """
        kept, places = packed.end - self.packs.room, []
        self._oldest = max(self._oldest, first + len(packed.parts) - self._slots)
        while self._oldest < first:
            slot = self._oldest % self._slots
            if self._stamps[slot] == self._oldest:  # otherwise it has been given up
                if self.packs.starts[self._base + slot] >= kept:
                    break
                places.append(self._base + slot)
            self._oldest += 1
        return np.array(places, np.int64)

    def write(self, places: np.ndarray, packed: Packed) -> None:
        """Write what nobody looks for yet."""
        ring, room = self.packs.bytes[self.lane], self.packs.room
        for part, start in zip(packed.parts, packed.starts.tolist(), strict=True):
            ring[start % room : start % room + len(part)] = np.frombuffer(part, np.uint8)
        self.packs.starts[places] = packed.starts
        self.packs.lengths[places] = [len(part) for part in packed.parts]
        self._end = packed.end

    def warn_of_loss(self, rows: int, wanted: int, packed: Packed) -> None:
        """Say once that rows leave early.

        Args:
            rows: that are left in the lane.
            wanted: what it was made for.
            packed: the newest pictures.
        """
        if self._warned:
            return
        self._warned = True
        share = sum(map(len, packed.parts)) / (len(packed.parts) * self.packs.width)
        warnings.warn(
            f"lane {self.lane} of the replay has room for {rows} of {wanted} rows: its newest "
            f"pictures took {share:.2f} of their size, and compress_to has room for less; raise it",
            stacklevel=4,
        )
