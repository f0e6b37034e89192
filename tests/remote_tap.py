"""A relay between an actor and its learner that notes what was delivered and what was confirmed.

It reads the frames on their way (they are signed, not encrypted) and can hold them back, as a
network does that is unplugged: nothing is lost, and nothing arrives.
"""

import json
import struct
import threading
from collections.abc import Iterator

from remote_network import Relay

from torchrl_vla import schema
from torchrl_vla.remote.wire import unpack

LENGTHS, TAG = struct.Struct(">IQ"), 32
Row = tuple[int, int]
"""Episode and decision."""


class Frames:
    """Takes a stream of bytes apart.

    Args:
        unsigned: how many frames of the greeting come before the first one with a tag.
    """

    def __init__(self, unsigned: int) -> None:
        self._unsigned, self._bytes = unsigned, bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict, bytes]]:
        """Yield the frames that ``data`` completes: message and payload."""
        self._bytes += data
        while len(self._bytes) >= LENGTHS.size:
            text, payload = LENGTHS.unpack_from(self._bytes)
            start, middle = LENGTHS.size, LENGTHS.size + text
            end = middle + payload + (0 if self._unsigned > 0 else TAG)
            if len(self._bytes) < end:
                return
            message = json.loads(bytes(self._bytes[start:middle]))
            content = bytes(self._bytes[middle : middle + payload])
            del self._bytes[:end]
            self._unsigned -= 1
            yield message, content


class Tap(Relay):
    """Carries the connections of one actor process.

    Attributes:
        sent: rows that it sent at least once, by whatever way they ended.
        confirmed: rows of which the learner said that they are in the replay.
        leaves: the leaves of one batch.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.sent: set[Row] = set()
        self.confirmed: set[Row] = set()
        self.leaves: dict = {}
        self._batches: dict[int, list[Row]] = {}  # that are not confirmed
        self._plugged = threading.Event()
        self._plugged.set()
        self._lock = threading.Lock()
        super().__init__(target)

    @property
    def plugged(self) -> bool:
        """Whether something arrives."""
        return self._plugged.is_set()

    def unplug(self) -> None:
        """Hold back everything, in both directions, until :meth:`plug`."""
        self._plugged.clear()

    def plug(self) -> None:
        """Let everything go on."""
        self._plugged.set()

    def readers(self) -> tuple[Frames, Frames]:
        """Return what reads a new connection: of the actor's bytes, and of the learner's."""
        return Frames(unsigned=1), Frames(unsigned=2)

    def pass_on(self, data: bytes, frames: Frames, *, up: bool) -> None:
        """Note the frames in ``data`` before they go on."""
        self._plugged.wait()
        for message, payload in frames.feed(data):
            with self._lock:
                self._sending(message, payload) if up else self._answering(message)

    def _sending(self, message: dict, payload: bytes) -> None:
        if "seq" not in message:
            return
        self.leaves = leaves = unpack(payload)
        columns = (leaves[key,].flatten().tolist() for key in (schema.EPISODE_ID, schema.DECISION))
        rows = list(zip(*columns, strict=True))
        self._batches[message["seq"]] = rows
        self.sent.update(rows)

    def _answering(self, message: dict) -> None:
        if "committed" not in message:
            return
        if message.get("own") is False:
            self._batches.clear()  # a place anew: the actor drops what was not confirmed
        for number in [n for n in self._batches if n <= message["committed"]]:
            self.confirmed.update(self._batches.pop(number))
