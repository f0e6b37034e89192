"""The replay of a rank in its run's folder: made anew, or found again where a checkpoint left it.

A checkpoint holds no row. It holds, for every rank, a cursor of a few numbers and the counts that
pace updates; the rows are in ``replay/rank-R``, which is its own durable copy. With
``replay.folder`` that is a link to a folder of this run's own on another disk, made before the
rows. So a resumed run finds them whatever its settings say, and several runs can name one disk.
"""

from __future__ import annotations

import math
import os
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from torchrl_vla import schema
from torchrl_vla.loops.pacing import Pacer, PaceSettings
from torchrl_vla.loops.run import Run
from torchrl_vla.replay import ReplayFeed, make_replay
from torchrl_vla.storage.buffer import JournalReplayBuffer
from torchrl_vla.storage.layout import Layout, Sizes, transition_layout


class ReplayFolder:
    """Where the rows of this rank are, and what they are like.

    Args:
        run: the run.
        policy: whose actors write.
        capacity: rows.
        lanes: processes that write.
        pace: of the run; says how far actors run ahead of a checkpoint, if it is deterministic.
        parent: gets the rows instead of the run's folder.
        compress_to: see :class:`torchrl_vla.storage.layout.Layout`.

    Raises:
        FileNotFoundError: there is no such ``parent``.
        PermissionError: ``parent`` cannot be written to.
        ValueError: the run has its rows elsewhere, or ``compress_to`` is out of its range.
    """

    def __init__(
        self,
        run: Run,
        policy: nn.Module,
        capacity: int,
        lanes: int,
        pace: PaceSettings,
        parent: Path | str | None = None,
        compress_to: float | None = None,
    ) -> None:
        self.run, self.capacity, self.lanes = run, capacity, lanes
        self.path: Path = run.folder / "replay" / f"rank-{run.topology.rank}"
        self.parent = None if parent is None else Path(parent).absolute()
        self._check_parent()
        self.layout = replace(layout_of(policy, run), compress_to=compress_to)
        rows = -(-capacity // lanes)
        self.spare = _spare_for_cursor(run, pace, rows) if run.deterministic else None

    @property
    def disk(self) -> Path:
        """A folder that exists on the disk that the rows are on, or are going to be on."""
        return self.path if self.path.exists() else self.parent or self.run.folder

    def _check_parent(self) -> None:
        if self.parent is None:
            return
        if not self.parent.is_dir():
            raise FileNotFoundError(
                f"replay.folder is {self.parent}, and there is no such folder on this machine; "
                "make it, or name another"
            )
        if not os.access(self.parent, os.W_OK | os.X_OK):
            raise PermissionError(
                f"replay.folder is {self.parent}, which this process may not write to"
            )
        if self.path.exists() and self.path.resolve().parent != self.parent.resolve():
            raise ValueError(
                f"replay.folder is {self.parent}, and this run has its rows in "
                f"{self.path.resolve()}; leave replay.folder away, the run finds them"
            )

    def planned_bytes(self) -> int:
        """Return what the replay is going to take on the disk, beyond what it has."""
        if self.path.exists():
            return 0
        return Sizes.of(self.capacity, self.lanes, self.spare).nbytes(self.layout)

    def open(
        self, resume: bool, loaded: Mapping[str, Any] | None
    ) -> tuple[JournalReplayBuffer, dict[str, Any] | None]:
        """Open the replay; with a checkpoint at its cursor, otherwise without rows.

        Args:
            resume: the run goes on in this folder, so that a replay there is its own.
            loaded: the checkpoint, if one was reached.

        Returns:
            The buffer, and what :func:`saved_replays` noted about this rank; ``None`` if there are
            no rows to go on with.

        Raises:
            FileExistsError, ValueError, OSError: see
                :class:`~torchrl_vla.storage.journal.JournalStorage`.
            RuntimeError: a deterministic run cannot have its rows back.
        """
        saved, existing = self._saved(loaded), "empty" if resume else "refuse"
        cursor = None if saved is None else saved["cursor"]
        buffer = make_replay(
            self._place(),
            self.capacity,
            self.layout,
            lanes=self.lanes,
            spare=self.spare,
            existing=existing if saved is None else "reuse",
            cursor=cursor,
        )
        lost = buffer.storage.lost_rows
        if lost and self.run.deterministic:
            raise RuntimeError(
                f"{lost} rows of {self.path} have been overwritten since the checkpoint, so that "
                "this run cannot go on as it would have; save more often, or resume it with "
                "topology.deterministic=false"
            )
        return buffer, saved

    def _place(self) -> Path:
        """Return the folder of the rows, which is not there yet if the run has none."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # a link to what is gone
            if self.parent is not None:
                name = f"{self.run.folder.name}-{uuid.uuid4().hex[:8]}-{self.path.name}"
                self.path.symlink_to(self.parent / name)
        return self.path.resolve()

    def _saved(self, loaded: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if loaded is None:
            return None
        ranks, rank = loaded["json"]["replays"], self.run.topology.rank
        if self.run.topology.is_main and len(ranks) > self.run.topology.world_size:
            left = list(range(self.run.topology.world_size, len(ranks)))
            warnings.warn(
                f"{len(ranks)} ranks saved this run; rows in the replays of ranks {left} are left "
                "where they are and not drawn",
                stacklevel=3,
            )
        if rank >= len(ranks):
            return None
        if not self.path.exists():
            lost = f"{self.path.resolve()}, where the rows of this run were, is not there"
            if self.run.deterministic:
                raise RuntimeError(f"{lost}: a deterministic run cannot go on without them")
            warnings.warn(f"{lost}: the run goes on with an empty replay", stacklevel=3)
            return None
        return ranks[rank]


def saved_replays(run: Run, feed: ReplayFeed, pacer: Pacer) -> list[dict[str, Any]]:
    """Return what a checkpoint notes about the replay of every rank; collective."""
    counts = {"updates": pacer.updates, "decisions": pacer.decisions}
    return run.topology.gather_objects({"cursor": feed.cursor(), "pacer": counts})


def layout_of(policy: nn.Module, run: Run) -> Layout:
    """Return what a row of the replay is made of with this policy's actors."""
    optional = [f.key for f in schema.SCHEMA if not f.required and f.key in policy.out_keys]
    return transition_layout(run.suite.meta, run.chunk_size, optional)


def _spare_for_cursor(run: Run, pace: PaceSettings, rows: int) -> int:
    """Return the spare with which a lane never overwrites what the last checkpoint's cursor has.

    At most one observation more per row for ends of episodes, and two for every decision since.
    """
    updates = run.saves.every_updates or run.budget.updates or 0
    decisions = pace.slack_decisions + math.ceil(updates / pace.updates_per_decision)
    return 64 + rows + 2 * decisions
