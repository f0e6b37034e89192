"""One connection on the learner's side, from the challenge to the farewell; in a thread of its own.

After the welcome the actor asks and this side answers, one question at a time:

    actor    {"ready", "have": [epoch, version], "idle_ms", "position", "owed", "seq"?} + rows
    learner  {"committed", "grant", "version"?} + weights

A question stays open for a second if there is neither work nor anything else to say.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.remote.hub import Hub
from torchrl_vla.remote.places import Place
from torchrl_vla.remote.wire import Channel, RefusedError, WireError, unpack

_LOG = logging.getLogger(__name__)
POLL_SECONDS = 1.0
"""How long a question stays open."""
_LONGEST = 100
"""Characters of a name."""


class Session:
    """Serves one actor that has proved itself.

    Args:
        hub: of the rank.
        channel: to the actor.
        address: of the actor, for people.
    """

    def __init__(self, hub: Hub, channel: Channel, address: str) -> None:
        self.hub, self.channel, self.address = hub, channel, address
        self._place: Place | None = None

    def run(self) -> None:
        """Serve until one side ends it; what only concerns the actor is logged, not raised."""
        reason, for_good = "", False
        try:
            self._join()
            if self._place is not None:
                reason, for_good = self._serve(self._place), True
        except (OSError, RefusedError) as error:
            reason = str(error)
            _LOG.warning("remote actor at %s: %s", self.address, reason)
        finally:
            self.channel.close()
            if self._place is not None:
                self._leave(self._place, reason, for_good)

    def _join(self) -> None:
        hello, _ = self.channel.receive()
        actor, name = (str(hello.get(key, ""))[:_LONGEST] for key in ("actor", "name"))
        if not actor:
            raise WireError("its hello has no identity")
        hub = self.hub
        before = hello.get("place") if hello.get("replay") == hub.plan.replay else None
        with hub.changed:
            place, own = None, False
            if not hub.ending:
                place, own = hub.places.join(actor, name, self.address, before)
        if place is None:
            self.channel.send({"wait": hub.ending or f"all {len(hub.places.all)} places are taken"})
            return
        if own and (old := place.channel) is not None:
            old.close()  # the actor has given it up
        owed, known = _number(hello, "owed"), _number(hello, "committed")
        with place.lock, hub.changed:  # what its last connection was committing is in now
            place.channel, self._place = self.channel, place
            owed -= place.committed - known  # delivered, but it does not know
            hub.places.bring_back(place, owed if own else 0)
            # Only then nobody else has been in its stream since the checkpoint.
            continues = before == place.number and place.users == 1
            if continues:
                place.position = max(place.position, _number(hello, "position"))
            welcome = hub.plan.described() | {
                "epoch": hub.epoch,
                "place": place.number,
                "stream": place.stream,
                "position": place.position,
                "own": own,
                "continues": continues,
                "committed": place.committed,
                "noise": hub.noise(place),
            }
            present = len(hub.places.present)
            hub.write_board()
        _LOG.warning(
            "remote actor %s at %s has place %d; %d present",
            name,
            self.address,
            place.number,
            present,
        )
        self.channel.send(welcome)

    def _leave(self, place: Place, reason: str, for_good: bool) -> None:
        hub = self.hub
        with hub.changed:
            if place.channel is not self.channel:
                return  # it is back on another connection
            hub.places.leave(place, for_good=for_good)
            present = len(hub.places.present)
            hub.write_board()
            hub.changed.notify_all()
        _LOG.warning(
            "remote actor %s at %s left place %d (%s); %d present",
            place.name,
            self.address,
            place.number,
            reason,
            present,
        )

    def _serve(self, place: Place) -> str:
        """Answer questions until the end; returns the reason."""
        while True:
            question, payload = self.channel.receive(self.hub.most_bytes)
            self._take(place, question, payload)
            if question.get("leave"):
                self.channel.send({"committed": place.committed, "grant": 0, "ending": "left"})
                return "it took leave"
            answer, weights = self._answer(place, question)
            self.channel.send(answer, weights)
            if "ending" in answer:
                return f"the learner is {answer['ending']}"

    def _take(self, place: Place, question: dict[str, Any], payload: bytes) -> None:
        """Commit the rows that come with a question, unless they are in the replay already."""
        hub, position = self.hub, _number(question, "position")
        owed = _number(question, "owed")
        with hub.changed:
            hub.places.heard_from(place, owed)
            # First: a checkpoint may have fewer rows than its positions say, never more.
            place.position = max(place.position, position)
            place.hear(_number(question, "idle_ms") / 1000, time.monotonic())
        if "seq" not in question:
            return
        number, rows = _number(question, "seq"), self._rows(payload)
        with place.lock:
            if number <= place.committed:
                return
            if number != place.committed + 1:
                raise WireError(f"batch {number} came after batch {place.committed}")
            if place.channel is not self.channel:
                raise WireError("its place is on another connection")
            if len(rows):
                try:
                    place.writer.extend(rows)
                except BaseException as error:
                    hub.fail(error)
                    raise WireError("its rows cannot be written") from error
            place.committed = number
            with hub.changed:
                hub.places.arrived(place)
                hub.changed.notify_all()

    def _rows(self, payload: bytes) -> TensorDict:
        """Return checked rows ``[M]``."""
        leaves = unpack(payload)
        count = len(next(iter(leaves.values()), ()))
        try:
            rows = TensorDict({}, batch_size=[count])
            for key, leaf in leaves.items():
                rows.set(key, leaf)
            self.hub.layout.check(rows)
        except (KeyError, ValueError, RuntimeError) as error:
            raise self._refusal(f"rows do not fit the replay: {error}") from error
        if count > self.hub.plan.batch:
            raise self._refusal(f"a batch has {count} rows, at most {self.hub.plan.batch}")
        broken = [
            ".".join(key)
            for key, leaf in leaves.items()
            if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all())
        ]
        if broken or bool(rows[schema.SIM_ERROR].any()):
            raise self._refusal(f"rows are not finite in {broken or 'a diverged simulation'}")
        return rows

    def _refusal(self, reason: str) -> WireError:
        self.channel.send({"refused": reason})
        return WireError(reason)

    def _answer(self, place: Place, question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        hub, until = self.hub, time.monotonic() + POLL_SECONDS
        snapshot = None
        with hub.changed:
            while True:
                able = question.get("ready") and hub.newest is not None and not hub.ending
                grant = hub.places.grant(place) if able else 0
                rest = until - time.monotonic()
                if place.owed or hub.ending or rest <= 0:
                    break
                hub.changed.wait(rest)
            answer = {"committed": place.committed, "grant": grant}
            if hub.ending:
                return answer | {"ending": hub.ending}, b""
            if place.owed and able:
                snapshot = hub.weights_for(question.get("have"))
        if snapshot is None:
            return answer, b""
        return answer | {"version": snapshot.version}, snapshot.packed()


def _number(message: dict[str, Any], name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int | float) or not 0 <= value < 2**62:
        raise WireError(f"its {name} is {value!r}, not a number from 0 on")
    return int(value)
