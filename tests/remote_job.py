"""A learner rank's side in the test's process, with remote actors as processes of their own."""

import json
import time
from pathlib import Path

from remote_nursery import Born, Nursery
from steer import LAYOUT, weights

from torchrl_vla import schema
from torchrl_vla.actors import ActorSettings
from torchrl_vla.remote import Listening, split_address, start_listening
from torchrl_vla.replay import make_replay

SECRET = b"s" * 40
ENVS, STEPS = 3, 4
BATCH = ENVS * STEPS
BATCH_BYTES = BATCH * 2 * 192
"""Its images alone: more than any question has."""
KEYS = (schema.EPISODE_ID, schema.DECISION)


class Job:
    """The learner's side, and the actor processes that were started for it."""

    def __init__(self, folder: Path, nursery: Nursery, host: str = "127.0.0.1") -> None:
        self.folder, self.nursery, self.host, self.taken = folder, nursery, host, 0
        self.actors: dict[str, Born] = {}
        self.port, self.cursor, self.remote = 0, None, None
        self.description = {"lengths": [5, 9, 2]}

    def listen(self, *, places: int = 2, timeout: float = 20.0) -> None:
        existing = "refuse" if self.cursor is None else "reuse"
        self.replay = make_replay(
            self.folder / "replay",
            4000,
            LAYOUT,
            lanes=places,
            existing=existing,
            cursor=self.cursor,
        )
        where = Listening(self.host, self.port, SECRET, self.description)
        self.remote = start_listening(
            where,
            ActorSettings(places, ENVS, STEPS, timeout),
            chunk_size=4,
            gamma=0.5,
            seed=0,
            rank=0,
            folder=self.folder / "actors",
            replay=self.replay,
        )
        self.address = split_address(self.remote.hub.address)
        self.port = self.address[1]
        self.remote.publish(weights(0.25), 1)

    def actor(self, name: str, address=None, secret: bytes = SECRET) -> Born:
        report = self.folder / f"{name}.json"
        born = self.nursery.actor(address or self.address, secret, name, report)
        self.actors[name] = born
        return born

    def collect(self, batches: int, seconds: float = 200.0) -> None:
        """Request so many batches, two at a time, and wait until they are in the replay."""
        deadline, wanted = time.monotonic() + seconds, self.taken + batches
        while self.taken < wanted:
            while self.remote.pending < min(4, wanted - self.taken):
                self.remote.request()
            self.taken += bool(self.remote.receive())
            assert time.monotonic() < deadline, f"{wanted - self.taken} batches are missing"

    def rows(self):
        return self.replay.storage[:]

    def board(self) -> dict:
        return json.loads((self.folder / "actors" / "remote.json").read_text())

    def close(self) -> None:
        for born in self.actors.values():
            born.kill()
        if self.remote is not None:
            self.remote.close()


def check_once(rows) -> None:
    """Check that no decision is there twice and no episode has a gap."""
    schema.check_transitions(rows, where="test")
    seen: dict[int, list[int]] = {}
    for episode, decision in zip(
        rows[schema.EPISODE_ID].flatten().tolist(),
        rows[schema.DECISION].flatten().tolist(),
        strict=True,
    ):
        seen.setdefault(episode, []).append(decision)
    for episode, decisions in seen.items():
        assert sorted(decisions) == list(range(len(decisions))), episode


def committed(job: Job) -> int:
    return job.replay.storage.cursor()["lanes"][0]["committed"]
