"""Taking in what off-policy actors committed; waiting for them when no update is allowed yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from torchrl_vla import schema
from torchrl_vla.actors import Actors
from torchrl_vla.loops.pacing import Pacer
from torchrl_vla.loops.workers import own_part
from torchrl_vla.metrics import TRAIN_SUCCESS, WAIT_ACTORS, Stopwatch
from torchrl_vla.remote import RemoteActors
from torchrl_vla.replay import ReplayFeed


@dataclass
class Recent:
    """What actors did lately: counts since the last report, success of the last episodes."""

    outcomes: deque[bool]
    left_out: int = 0
    """Decisions still to come before outcomes count (``first_decisions`` of ``loops.workers``)."""
    env_steps: int = 0
    decisions: int = 0
    episodes: int = 0

    @classmethod
    def of(cls, loaded: Mapping[str, Any] | None, left_out: int) -> Recent:
        """Return what a checkpoint knows of this rank's last episodes."""
        return cls(deque(own_part(loaded).get("outcomes", []), maxlen=200), left_out)

    def add(self, rows: TensorDictBase) -> None:
        """Take in newly committed transitions."""
        done = rows[schema.DONE]
        self.env_steps += int(rows[schema.NUM_EXECUTED].sum())
        self.decisions += len(rows)
        self.episodes += int(done.sum())
        if self.left_out > 0:
            self.left_out -= len(rows)
        else:
            self.outcomes.extend(rows[schema.SUCCESS][done].tolist())

    def pop(self) -> tuple[int, int, int]:
        """Return ``(env_steps, decisions, episodes)`` since the last call."""
        counts = self.env_steps, self.decisions, self.episodes
        self.env_steps = self.decisions = self.episodes = 0
        return counts

    def metrics(self) -> dict[str, float]:
        """Return the success rate of the last episodes."""
        outcomes = self.outcomes
        return {TRAIN_SUCCESS: sum(outcomes) / len(outcomes) if outcomes else float("nan")}


def drain(
    workers: Actors | RemoteActors,
    feed: ReplayFeed,
    recent: Recent,
    pacer: Pacer,
    watch: Stopwatch,
    version: int = 0,
    give_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Take in what actors committed; wait for them only if no update is allowed yet.

    Args:
        workers: this rank's actors.
        feed: what they wrote, and the rule of what may be drawn.
        recent: counts.
        pacer: whether an update, or a request, is due.
        watch: of the waits.
        version: newest published policy.
        give_up: whether to wait no longer for data.

    Returns:
        Whether an update is allowed now; if not, it gave up.
    """
    while True:
        while pacer.may_request(workers.pending):
            workers.request()
        while workers.pending and workers.receive(wait=False):
            pass
        rows = feed.absorb()
        if rows is not None:
            pacer.decisions += len(rows)
            recent.add(rows)
        if pacer.may_update():
            if feed.can_draw(version):
                return True
            if not workers.pending:  # nothing there that the sampling rule allows: collect on
                workers.request()
        if rows is None:
            if give_up():
                return False
            with watch.wait(WAIT_ACTORS):
                workers.receive()


def collect_in_step(
    workers: Actors,
    feed: ReplayFeed,
    recent: Recent,
    pacer: Pacer,
    watch: Stopwatch,
    version: int = 0,
) -> bool:
    """Collect, and wait for it, until an update is allowed; arguments as for :func:`drain`.

    Nothing is under way when this returns, so that which policy made which decision does not depend
    on who was faster. The replay gives rows lane by lane, in whatever order they arrived.
    """
    while not (pacer.may_update() and feed.can_draw(version)):
        with watch.wait(WAIT_ACTORS):
            for _ in range(workers.num_workers):
                workers.request()  # of the worker that owes fewest: one of each
            while workers.pending:
                workers.receive()
        rows = feed.absorb()
        if rows is not None:
            pacer.decisions += len(rows)
            recent.add(rows)
    return True
