"""The actor's side of the network: a thread that keeps the connection while the actor collects.

It joins, asks for work, sends batches and takes in weights; after a cut it joins again, for as long
as it takes, and sends again what the learner has not said to have. The actor's own thread sees
credits, weights and an outbox, and never a socket.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_vla.remote.settings import read_board
from torchrl_vla.remote.wire import Channel, Key, pack, unpack

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.5
"""Longest time between two questions while the actor collects."""
_SLOWEST_RETRY = 5.0
_FIXED = ("description", "chunk_size", "gamma", "num_envs", "decisions_per_env", "group_size")
_IDENTITY = (*_FIXED, "replay", "place", "stream")
"""What an actor is built for; when any of it changes, it is built anew."""
HUNG = 70
"""Exit code of an actor whose simulators or policy hang."""


@dataclass(frozen=True)
class Answer:
    """What the learner says to a question."""

    committed: int
    grant: int
    version: int | None
    ending: str | None

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Answer:
        """Read a message."""
        version, ending = message.get("version"), message.get("ending")
        return cls(int(message["committed"]), int(message["grant"]), version, ending)


class Link(threading.Thread):
    """The connection of one actor process to its learner rank.

    Args:
        address: host and port of the rank, or the file where it says them; that is read again
            before every attempt to join, because a learner that starts again may be elsewhere.
        secret: of the job.
        name: of the actor, for people.
        timeout: seconds without progress after which the connection counts as cut, until the
            learner says how long that is (``actors.timeout``).
    """

    def __init__(
        self, address: tuple[str, int] | Path, secret: bytes, name: str, timeout: float = 30.0
    ) -> None:
        super().__init__(name="link", daemon=True)
        self._address, self._secret, self._label = address, secret, name
        self._timeout, self._actor = timeout, secrets.token_hex(8)
        self.learner = str(address)
        """Where it was looked for last, for people."""
        self._changed = threading.Condition()
        self._plan: dict[str, Any] = {}
        self._credits = 0
        self._outbox: deque[tuple[bytes, int]] = deque()  # packed, rows
        self.delivered_rows = 0
        """Rows that the learner has said to have."""
        self._committed = 0  # the batch before the first one in the outbox
        self._version: int | None = None
        self._arrived: dict[Key, torch.Tensor] = {}
        self._weight_bytes = 0  # 0: the actor is not ready
        self._leaving = self._over = False
        self._error: BaseException | None = None
        self.position = 0
        self.beat = time.monotonic()
        self._collecting = False
        self._term = 0
        """Counts the learners and places so far: a batch belongs to the one it was asked in."""
        self._idle = 0.0
        self._idle_since: float | None = None  # of a wait that lasts

    # What the actor's own thread calls.

    def plan(self) -> dict[str, Any] | None:
        """Wait for a learner and return what it wants done; ``None`` if the run is over.

        Raises:
            RefusedError: the learner refuses this actor.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._plan or self._ends)
            self._raise_error()
            return None if self._ends else self._plan

    def begin(self, weight_bytes: int) -> None:
        """Say that the actor can collect, and how large its policy's weights are."""
        with self._changed:
            self._weight_bytes = weight_bytes
            self._changed.notify_all()

    def wait_for_credit(self, plan: dict[str, Any]) -> int | None:
        """Wait until a batch is wanted; ``None`` if ``plan`` is no longer the one, or at the end.

        Returns:
            What to give to :meth:`put` with the batch.

        Raises:
            RefusedError: the learner refuses this actor.
        """
        with self._changed:
            self._collecting, self._idle_since = False, time.monotonic()
            self._changed.wait_for(lambda: self._credits or self._ends or self._plan is not plan)
            self._raise_error()
            self.beat = time.monotonic()
            self._idle, self._idle_since = self._idle + self.beat - self._idle_since, None
            self._collecting = not self._ends and self._plan is plan
            return self._term if self._collecting else None

    def heartbeat(self, position: int) -> None:
        """Note a decision, and how many episodes the initial-state stream has handed out."""
        self.position, self.beat = position, time.monotonic()

    def put(self, rows: TensorDictBase, term: int) -> None:
        """Hand over the batch that a credit was for; void if its learner is another one now."""
        packed = pack(rows)
        with self._changed:
            if self._term == term:
                self._credits -= 1
                self._outbox.append((packed, len(rows)))
                self._changed.notify_all()

    def take(self, destination: TensorDictBase) -> int | None:
        """Copy the newest weights into ``destination``; ``None`` if it has them already.

        The same as :meth:`torchrl_vla.actors.weights.Subscriber.take`.
        """
        with self._changed:
            arrived, self._arrived = self._arrived, {}
            version = self._version
        if not arrived:
            return None
        for key, value in arrived.items():
            destination.get(key).copy_(value)
        return version

    def leave(self) -> None:
        """Ask the link to deliver what there is and to take leave; safe in a signal handler."""
        self._leaving = True

    def finish(self, seconds: float) -> tuple[int, int]:
        """Wait for the farewell; returns rows that were delivered, batches that could not be."""
        self.join(seconds)
        return self.delivered_rows, len(self._outbox)

    @property
    def _ends(self) -> bool:
        return self._leaving or self._over or self._error is not None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # The thread.

    def run(self) -> None:
        """Keep the connection until the end."""
        try:
            self._keep()
        except BaseException as error:
            self._error = error
        with self._changed:
            self._changed.notify_all()

    def _keep(self) -> None:
        pause = 0.1
        while not (self._over or self._may_leave):
            try:
                channel = self._join()
                if channel is not None:
                    pause = 0.1
                    try:
                        self._talk(channel)
                    finally:
                        channel.close()
            except OSError as error:
                _LOG.warning("%s: %s; trying again", self.learner, error)
            if not self._over:
                self._pause(pause)
                pause = min(2 * pause, _SLOWEST_RETRY)

    @property
    def _may_leave(self) -> bool:
        return self._leaving and not self._outbox and not self._collecting

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._leaving and time.monotonic() < until:
            self._look_for_hang()
            time.sleep(0.05)

    def _join(self) -> Channel | None:
        found = self._address
        where = read_board(found) if isinstance(found, Path) else found
        self.learner = f"{where[0]}:{where[1]}"
        connection = socket.create_connection(where, timeout=self._timeout)
        channel = Channel(connection, self._timeout)
        try:
            channel.answer(self._secret)
            with self._changed:
                hello = {
                    "actor": self._actor,
                    "name": self._label,
                    "owed": self._credits + len(self._outbox),
                    "committed": self._committed,
                    "position": self.position,
                    **{name: self._plan.get(name) for name in ("replay", "place")},
                }
            channel.send(hello)
            welcome, _ = channel.receive()
        except BaseException:
            channel.close()
            raise
        if "wait" in welcome:
            _LOG.warning("%s: %s; waiting", self.learner, welcome["wait"])
            channel.close()
            return None
        self._take_plan(welcome)
        channel.wait_at_most(float(welcome["timeout"]))
        return channel

    def _take_plan(self, welcome: dict[str, Any]) -> None:
        with self._changed:
            old, committed = self._plan, int(welcome["committed"])
            same = bool(old) and all(old[name] == welcome[name] for name in _IDENTITY)
            if same and welcome["own"]:
                self._drop_delivered(committed)
                return
            same = same and welcome["continues"]
            # Another learner, or another place: what it had not been told to have is void.
            self._outbox.clear()
            self._credits, self._committed, self._term = 0, committed, self._term + 1
            self._version, self._arrived = None, {}
            if same:
                old["epoch"] = welcome["epoch"]  # the actor goes on as it is
            else:
                self._plan, self._weight_bytes = welcome, 0
                self.position = int(welcome["position"])
            self._changed.notify_all()

    def _drop_delivered(self, committed: int) -> None:
        while self._outbox and self._committed < committed:
            self.delivered_rows += self._outbox.popleft()[1]
            self._committed += 1

    def _talk(self, channel: Channel) -> None:
        """Ask and take in answers until the end."""
        while True:
            with self._changed:
                if self._credits and not self._outbox and not self._may_leave:
                    self._changed.wait(_POLL_SECONDS)
                question, payload = self._question()
                limit = 2 * self._weight_bytes + (1 << 20)
            self._look_for_hang()
            channel.send(question, payload)
            message, weights = channel.receive(limit)
            answer = Answer.of(message)
            with self._changed:
                self._drop_delivered(answer.committed)
                self._credits += answer.grant
                if answer.version is not None:
                    self._arrived |= unpack(weights)
                    self._version = answer.version
                self._over = answer.ending in ("over", "left")
                self._changed.notify_all()
            if answer.ending is not None:
                return

    def _question(self) -> tuple[dict[str, Any], bytes]:
        waits = 0.0 if self._idle_since is None else time.monotonic() - self._idle_since
        question = {
            "ready": bool(self._weight_bytes) and not self._leaving,
            "have": [self._plan["epoch"], self._version],
            "idle_ms": int(1000 * (self._idle + waits)),
            "position": self.position,
            "owed": self._credits + len(self._outbox),
        }
        if self._outbox:
            return question | {"seq": self._committed + 1}, self._outbox[0][0]
        if self._may_leave:
            question["leave"] = True
        return question, b""

    def _look_for_hang(self) -> None:
        """End the process if the actor's own thread hangs: the learner would wait for its batch."""
        limit = self._plan.get("timeout", float("inf"))
        if self._collecting and time.monotonic() - self.beat > limit:
            faulthandler.dump_traceback(sys.stderr)
            _LOG.error("no decision for %.0f s (actors.timeout): the actor ends itself", limit)
            os._exit(HUNG)
