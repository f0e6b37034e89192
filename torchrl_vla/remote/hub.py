"""What the learner's loop and the threads of its connections share."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

from torchrl_vla.remote.places import Place, Places
from torchrl_vla.remote.wire import pack
from torchrl_vla.storage.layout import Layout


@dataclass(frozen=True)
class Plan:
    """What an actor does; the same for all actors of a rank.

    Attributes:
        description: what suite and policy are built from, plain JSON.
        chunk_size: ``H``.
        gamma: discount per control step.
        num_envs: ``N``, simulators of an actor.
        decisions_per_env: ``T``, decisions per simulator and batch.
        group_size: episodes per initial state.
        timeout: seconds without a decision after which an actor counts as hung.
        replay: identity of the replay that its rows go to.
    """

    description: Mapping[str, Any]
    chunk_size: int
    gamma: float
    num_envs: int
    decisions_per_env: int
    group_size: int
    timeout: float
    replay: str

    @property
    def batch(self) -> int:
        """Most rows of a batch."""
        return self.num_envs * self.decisions_per_env

    def described(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return asdict(self)


class Snapshot:
    """Weights of one publish, packed when the first actor asks for them.

    Args:
        version: of the weights.
        weights: nobody changes them any more.
    """

    def __init__(self, version: int, weights: TensorDict) -> None:
        self.version, self.weights = version, weights
        self._packed: bytes | None = None
        self._lock = threading.Lock()

    def packed(self) -> bytes:
        """Return them as safetensors."""
        with self._lock:
            if self._packed is None:
                self._packed = pack(self.weights)
            return self._packed


class Hub:
    """Places, requests and newest weights of a rank; :attr:`changed` is held around every use.

    Args:
        plan: what actors do.
        places: who does it.
        layout: of the rows that they send.
        seed: numbers that fix the action noise.
        board: file that says who is present.
    """

    def __init__(
        self, plan: Plan, places: Places, layout: Layout, seed: Sequence[int], board: Path
    ) -> None:
        self.plan, self.places, self.layout, self.seed = plan, places, layout, tuple(seed)
        self.board, self.address = board, ""
        self.epoch = secrets.token_hex(8)
        """Names this learner process: batches and versions of another one mean nothing to it."""
        self.changed = threading.Condition()
        self.ending = ""
        """Why actors are sent away: ``"over"``, or ``"closed"`` if a learner may come again."""
        self.failure: BaseException | None = None
        """What stopped a thread on the learner's side."""
        self._whole: Snapshot | None = None
        self.newest: Snapshot | None = None

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest payload that an actor sends."""
        columns = (*self.layout.observations, *self.layout.observations, *self.layout.columns)
        return self.plan.batch * sum(column.nbytes for column in columns) + (1 << 16)

    def take_weights(self, snapshot: Snapshot) -> None:
        """Make ``snapshot`` the newest; the first one has all of the policy's weights."""
        self._whole = self._whole or snapshot
        self.newest = snapshot

    def weights_for(self, have: Any) -> Snapshot | None:
        """Return what brings an actor up to date; ``None`` if it is.

        Args:
            have: ``[epoch, version]`` of the actor's weights, or anything else.
        """
        newest, whole = self.newest, self._whole
        assert newest is not None
        assert whole is not None
        if have == [self.epoch, newest.version]:
            return None
        if (isinstance(have, list) and have[:1] == [self.epoch]) or newest is whole:
            return newest
        merged = whole.weights.clone(False).update(newest.weights)
        return Snapshot(newest.version, merged)

    def noise(self, place: Place) -> int:
        """Return a seed of action noise that no other actor of the run has."""
        numbers = (*self.seed, place.number, self.places.joins)
        return int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0])

    def fail(self, error: BaseException) -> None:
        """Let the learner's next call raise ``error``."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def write_board(self) -> None:
        """Say in the run's folder who is present."""
        names = ("number", "name", "address")
        present = [{n: getattr(p, n) for n in names} for p in self.places.present]
        facts = {"listens": self.address, "places": len(self.places.all), "present": present}
        facts |= {"ending": self.ending, "lost": self.places.lost}
        half = self.board.with_name(f".{self.board.name}.tmp")
        half.write_text(json.dumps(facts, indent=1))
        os.replace(half, self.board)
