"""Which remote actor has which place of a rank, and how many batches it may collect.

A place is what a local worker has: an initial-state stream and a lane of the replay. An actor that
is away keeps its place for a while, then another one may take it. Credits go the same way: the
learner's requests wait here until a present actor takes them, and come back when it leaves.

Plain bookkeeping without a lock: :mod:`torchrl_vla.remote.server` holds one around every call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchrl_vla.remote.wire import Channel
from torchrl_vla.storage.buffer import JournalReplayBuffer

CREDITS = 2
"""Batches that one actor may owe: one under way on the network while it collects the next."""
SILENT_SECONDS = 3.0
"""After which others may do what an actor was asked for; one that works asks twice a second."""


@dataclass
class Place:
    """One place, and the actor that has it."""

    number: int
    stream: int
    """Of initial states."""
    position: int
    """Episodes that the stream handed out."""
    writer: JournalReplayBuffer
    """To the place's lane."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while rows are committed."""
    actor: str = ""
    """Identity of the actor's process; empty if nobody has the place."""
    users: int = 0
    """Actors that had it since the learner started."""
    name: str = ""
    address: str = ""
    channel: Channel | None = None
    """Its connection; ``None`` while it is away."""
    left: float = 0.0
    """When it was cut off, monotonic seconds."""
    heard: float = 0.0
    """When its last question came, monotonic seconds."""
    silent: bool = False
    """Whether its requests have been given to others since."""
    committed: int = 0
    """Number of its last batch in the replay."""
    owed: int = 0
    """Batches that it was asked for."""
    said: float | None = None
    """Seconds it was idle since its process started, as of then; ``None`` on a new connection."""
    idle: float = 0.0
    """Seconds that the place's actors had nothing to do, of those in :attr:`watched`."""
    watched: float = 0.0
    """Seconds between what they said, while they were connected."""

    def hear(self, idle: float, now: float) -> None:
        """Take note that the actor spoke ``now`` (monotonic), idle for ``idle`` seconds so far."""
        if self.said is not None:
            self.watched += now - self.heard
            self.idle += max(0.0, idle - self.said)
        self.heard, self.said = now, idle


class Places:
    """All places of a rank, with the requests that are not answered yet.

    Args:
        streams: initial-state stream of each place.
        positions: where each stream goes on.
        replay: gets a lane per place.
        patience: seconds that an absent actor keeps its place.
    """

    def __init__(
        self,
        streams: Sequence[int],
        positions: Sequence[int],
        replay: JournalReplayBuffer,
        patience: float,
    ) -> None:
        self.all = [
            Place(number, stream, position, replay.for_lane(number))
            for number, (stream, position) in enumerate(zip(streams, positions, strict=True))
        ]
        self.patience = patience
        self.wanted = 0
        """Batches that were requested and that no actor was asked for."""
        self.done = 0
        """Batches that came and that the learner has not taken note of."""
        self.joins = 0
        self.lost = 0
        """Actors that were cut off, did not take leave."""
        self._idle_mark, self._idle_share = (0.0, 0.0), 0.0

    @property
    def present(self) -> list[Place]:
        """Places with a connected actor."""
        return [place for place in self.all if place.channel is not None]

    @property
    def pending(self) -> int:
        """Requests that the learner has had no answer to."""
        return self.wanted + self.done + sum(place.owed for place in self.all)

    def join(
        self, actor: str, name: str, address: str, before: int | None
    ) -> tuple[Place | None, bool]:
        """Give ``actor`` its place, or a free one; ``None`` if there is none.

        A new actor's count of batches starts at 0. The connection is the caller's business.

        Args:
            actor: identity of its process.
            name: for people.
            address: for people.
            before: the place that it had with an earlier learner process of this run.

        Returns:
            The place, and whether it was the actor's already.
        """
        own = [place for place in self.all if place.actor == actor]
        place = own[0] if own else self._free(before)
        if place is None:
            return None, False
        if not own:
            place.actor, place.committed = actor, 0
            place.users += 1
        place.name, place.address, place.said = name, address, None
        place.left = place.heard = time.monotonic()
        self.joins += 1
        return place, bool(own)

    def _free(self, before: int | None) -> Place | None:
        never = [place for place in self.all if not place.actor]
        limit = time.monotonic() - self.patience
        given_up = [p for p in self.all if p.actor and p.channel is None and p.left < limit]
        given_up.sort(key=lambda place: place.left)
        free = never + given_up
        return next((p for p in free if p.number == before), next(iter(free), None))

    def leave(self, place: Place, *, for_good: bool) -> None:
        """Take back what the actor of ``place`` was asked for; ``for_good`` frees its place."""
        place.channel, place.left, place.silent = None, time.monotonic(), False
        self.wanted += place.owed
        place.owed = 0
        if for_good:
            place.actor = ""
        else:
            self.lost += 1

    def idle_share(self) -> float:
        """Return the share of the time since the last call that connected actors were idle.

        In [0, 1]; the time of each actor counts up to what it said last. If none has said anything
        since, the share is the one before, and 0 at first.
        """
        (idle_before, watched_before) = self._idle_mark
        idle, watched = (sum(getattr(p, n) for p in self.all) for n in ("idle", "watched"))
        if watched > watched_before:
            self._idle_mark = idle, watched
            self._idle_share = min(1.0, (idle - idle_before) / (watched - watched_before))
        return self._idle_share

    def bring_back(self, place: Place, owed: int) -> None:
        """Take note that an actor came (back) and still works on ``owed`` batches."""
        free = self.wanted + place.owed
        place.owed = max(0, min(owed, CREDITS))
        self.wanted = max(0, free - place.owed)

    def pass_over_silent(self) -> bool:
        """Let others have what silent actors were asked for; returns whether there was any."""
        limit = time.monotonic() - SILENT_SECONDS
        silent = [place for place in self.present if place.owed and place.heard < limit]
        for place in silent:
            self.wanted += place.owed
            place.owed, place.silent = 0, True
        return bool(silent)

    def heard_from(self, place: Place, owed: int) -> None:
        """Take note that an actor works on ``owed`` batches, in its own count."""
        if place.silent:
            place.silent = False
            self.bring_back(place, owed)

    def grant(self, place: Place) -> int:
        """Return how many more batches the actor may collect, 0 or 1.

        A second one is for an actor only if there is also one for each that has none.
        """
        others = sum(not p.owed and not p.silent for p in self.present if p is not place)
        if place.owed >= CREDITS or self.wanted <= (others if place.owed else 0):
            return 0
        self.wanted -= 1
        place.owed += 1
        return 1

    def arrived(self, place: Place) -> None:
        """Take note of a committed batch."""
        place.owed = max(0, place.owed - 1)
        self.done += 1
