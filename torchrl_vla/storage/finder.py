"""Where the rows of a replay are: what is there, what came and went, what follows what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchrl_vla.storage.lane import COMMITTED, EVICTED, Rings
from torchrl_vla.storage.layout import Sizes


class RowGoneError(LookupError):
    """No row is at an index: none was written there, or it has been overwritten."""


@dataclass(frozen=True)
class Changes:
    """What happened between two looks at a replay."""

    new: Tensor
    """Indices of rows, lane by lane, in the order in which they were written."""
    commits: Tensor
    """Their commit numbers, see :meth:`RowFinder.holds`."""
    gone: Tensor
    """Places that no longer hold the row they held."""
    window: tuple[np.ndarray, np.ndarray]
    """Commit numbers of every lane at the later look: oldest, and newest + 1."""


class RowFinder:
    """The part of :class:`~torchrl_vla.storage.journal.JournalStorage` that finds rows.

    Every lane has a window of live commit numbers; the lane's log says at which place each of them
    is. So drawing costs the same however many rows there are.
    """

    folder: Path
    sizes: Sizes
    rings: Rings
    max_size: int

    @property
    def write_count(self) -> int:
        """Rows committed since the replay was made, over all lanes."""
        return int(self.rings.header[:, COMMITTED].sum())

    def positions(self) -> list[int]:
        """Return the newest commit number of every lane."""
        return self.rings.header[:, COMMITTED].tolist()

    def __len__(self) -> int:
        """Rows that can be drawn."""
        return int(self._windows()[1].sum())

    def _windows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the oldest commit number of every lane, and how many rows it has from there."""
        header = self.rings.header
        committed = header[:, COMMITTED].copy()
        first = np.maximum(committed - self.sizes.rows, header[:, EVICTED]) + 1
        return first, np.maximum(committed + 1 - first, 0)

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw indices ``[count]`` uniformly with replacement from the live rows of all lanes.

        Raises:
            RuntimeError: there are no rows.
        """
        first, counts = self._windows()
        if not counts.any():
            raise RuntimeError(f"the replay {self.folder} is empty; nothing can be drawn yet")
        ends = np.cumsum(counts)
        rank = torch.randint(int(ends[-1]), (count,), generator=generator).numpy()
        lane = np.searchsorted(ends, rank, side="right")
        commits = first[lane] + rank - (ends - counts)[lane]
        return torch.from_numpy(self.rings.logged(lane, commits))

    def live(self) -> Tensor:
        """Return the indices of all rows, lane by lane, oldest first."""
        return self.changes(None).new

    def changes(self, seen: Changes | None) -> Changes:
        """Return which rows came and which left since an earlier call; ``None``: since ever.

        Whoever keeps something per row (features, priorities) drops ``gone`` first, then takes in
        ``new``: a place may be in both.
        """
        first, counts = self._windows()
        stop = first + counts
        if seen is not None and all(map(np.array_equal, seen.window, (first, stop))):
            nothing = torch.empty(0, dtype=torch.int64)
            return Changes(nothing, nothing, nothing, seen.window)
        old_first, old_stop = (first, first) if seen is None else seen.window
        reset = old_stop > stop  # the replay went back to a cursor
        new, numbers, gone = [], [], []
        for lane in range(self.sizes.lanes):
            start = first[lane] if reset[lane] else max(first[lane], old_stop[lane])
            commits = np.arange(start, stop[lane])
            index = self.rings.logged(lane, commits)
            here = self.rings.commit[index] == commits
            new.append(index[here])
            numbers.append(commits[here])
            left = np.arange(old_first[lane], min(first[lane], old_stop[lane]))
            index = self.rings.logged(lane, left)
            forgotten = self.rings.header[lane, COMMITTED] - old_first[lane] >= self.sizes.slots
            gone.append(self._dead(lane) if reset[lane] or (len(left) and forgotten) else index)
        joined = (torch.from_numpy(np.concatenate(a)) for a in (new, numbers, gone))
        return Changes(*joined, (first, stop))

    def holds(self, index: Tensor, commits: Tensor) -> Tensor:
        """Return whether each place ``[M]`` still holds the row of that commit number, ``[M]``."""
        at, commit = index.numpy(), commits.numpy()
        same = (self.rings.commit[at] == commit) & self._is_live(at, commit)
        return torch.from_numpy(same)

    def next_places(self, index: Tensor) -> Tensor:
        """Return where the next decision of each row's episode is, or will be, written ``[M]``."""
        return torch.from_numpy(self.rings.next_slot[index.numpy()])

    def _dead(self, lane: int) -> np.ndarray:
        """Return every place of a lane without a row."""
        places = np.arange(self.sizes.slots) + lane * self.sizes.slots
        return places[~self._is_live(places, self.rings.commit[places])]

    def following(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of the next decision of each row's episode, and whether it is there."""
        rings, at = self.rings, index.numpy()
        then = rings.next_slot[at]
        there = rings.stamp[then] == rings.next_stamp[at]
        there &= self._is_live(then, rings.commit[then])
        return torch.from_numpy(then), torch.from_numpy(there)

    def _is_live(self, at: np.ndarray, commit: np.ndarray) -> np.ndarray:
        first, counts = self._windows()
        lane = at // self.sizes.slots
        return (commit >= first[lane]) & (commit < (first + counts)[lane])

    def contains(self, item: int) -> bool:
        """Whether a row is at an index."""
        if not 0 <= item < self.max_size:
            return False
        at = np.array([item])
        return bool(self._is_live(at, self.rings.commit[at])[0])
