"""The learner's side: remote actors as one source of batches, like :class:`actors.Actors`.

    loop ──request()──▶ credits ──────▶ a thread per connection ◀──TCP──▶ actor
    loop ◀─receive()──  "rows committed"     │ rows ──▶ lane of the replay
    loop ──publish()──▶ newest weights ──────┘

The loop never waits for a connection: threads of their own accept actors, commit their rows and
send them weights. It can wait for data, as with local actors; who is present is in
``remote.json`` and in the log.

A batch counts once it is in the replay. Its actor keeps it until it has been told so, and sends it
again after a cut; the batch's number says whether it is in already. A learner that starts again
goes back to its checkpoint, so actors drop what they had not delivered to the one before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import socket

from tensordict import TensorDict

from torchrl_vla.actors import ActorSettings, actor_streams
from torchrl_vla.remote.hub import Hub, Plan, Snapshot
from torchrl_vla.remote.places import Places
from torchrl_vla.remote.session import POLL_SECONDS, Session
from torchrl_vla.remote.settings import Listening
from torchrl_vla.remote.wire import Channel, RefusedError
from torchrl_vla.storage.buffer import JournalReplayBuffer

_LOG = logging.getLogger(__name__)
_STRANGERS = 16
"""Connections at a time that have not proved themselves."""
_GREETING_SECONDS = 10.0
_REMIND_SECONDS = 30.0


class RemoteActors:
    """Actors on other hosts that join this rank, as one source of batches.

    Args:
        where: address and secret.
        hub: places and plan.
        rank: of the learner.
        to_be_continued: whether the run goes on in another process; actors then stay and wait.

    Raises:
        OSError: the address cannot be used.
    """

    asynchronous = True

    def __init__(
        self,
        where: Listening,
        hub: Hub,
        rank: int = 0,
        to_be_continued: Callable[[], bool] = lambda: False,
    ) -> None:
        self.hub, self._secret = hub, where.secret
        self._to_be_continued = to_be_continued
        self._reminded = time.monotonic()
        self._greeting = threading.Semaphore(_STRANGERS)
        self._threads: set[threading.Thread] = set()
        self._listener: socket = where.socket(rank)
        self._listener.settimeout(0.5)
        host, port = self._listener.getsockname()[:2]
        hub.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        hub.write_board()
        self._start(self._accept)
        _LOG.warning("rank %d listens for remote actors on %s", rank, hub.address)

    @property
    def num_workers(self) -> int:
        """Places."""
        return len(self.hub.places.all)

    @property
    def pending(self) -> int:
        """Requests that no :meth:`receive` has answered yet."""
        with self.hub.changed:
            return self.hub.places.pending

    @property
    def present(self) -> int:
        """Actors that are connected."""
        with self.hub.changed:
            return len(self.hub.places.present)

    @property
    def restarts(self) -> int:
        """Actors that were cut off since the start."""
        return self.hub.places.lost

    def request(self) -> None:
        """Ask for one more batch of whoever has least to do; returns at once."""
        with self.hub.changed:
            self.hub.places.wanted += 1
            self.hub.changed.notify_all()

    def receive(self, wait: bool = True) -> bool | None:
        """Return ``True`` when a batch is in the replay, ``None`` if none is yet.

        Args:
            wait: for one, at most half a second: with nobody there it would be for ever.

        Raises:
            BaseException: what stopped a thread of this side, such as a replay that cannot be
                written.
        """
        hub = self.hub
        with hub.changed:
            if hub.places.pass_over_silent():
                hub.changed.notify_all()
            if wait and not hub.places.done and hub.failure is None:
                hub.changed.wait(0.5)
                self._remind()
            if hub.failure is not None:
                raise hub.failure
            if not hub.places.done:
                return None
            hub.places.done -= 1
            return True

    def publish(self, weights: TensorDict, version: int) -> None:
        """Make weights the newest; actors get them when they next ask, older ones are never sent.

        Args:
            weights: as for :meth:`torchrl_vla.actors.Actors.publish`; not changed afterwards.
            version: stamped on every decision made with them.
        """
        with self.hub.changed:
            self.hub.take_weights(Snapshot(version, weights))
            self.hub.changed.notify_all()

    def positions(self) -> dict[str, list[int]]:
        """Return where every place's initial-state stream stands, for a checkpoint."""
        with self.hub.changed:
            return {"positions": [place.position for place in self.hub.places.all]}

    def idle_share(self) -> float:
        """Return the share of the time since the last call that present actors waited for work.

        In [0, 1]; see :meth:`torchrl_vla.remote.places.Places.idle_share`.
        """
        with self.hub.changed:
            return self.hub.places.idle_share()

    def __enter__(self) -> RemoteActors:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(over=kind is None and not self._to_be_continued())

    def close(self, *, over: bool = False) -> None:
        """Let all actors go. Idempotent.

        Args:
            over: tell them that there is nothing more to do; otherwise they wait for a learner.
        """
        hub = self.hub
        with hub.changed:
            if hub.ending:
                return
            hub.ending = "over" if over else "closed"
            hub.changed.notify_all()
        until = time.monotonic() + 3 * POLL_SECONDS
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
        with hub.changed:
            channels = [place.channel for place in hub.places.present]
        for channel in channels:
            channel.close()
        for thread in list(self._threads):
            thread.join(_GREETING_SECONDS)
        for place in hub.places.all:
            place.writer.storage.release()
        hub.write_board()

    def _remind(self) -> None:
        places, now = self.hub.places, time.monotonic()
        if places.done or now - self._reminded < _REMIND_SECONDS:
            return
        self._reminded = now
        names = ", ".join(place.name for place in places.present) or "nobody"
        _LOG.warning("waiting for data on %s; actors present: %s", self.hub.address, names)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        def guarded() -> None:
            try:
                target(*arguments)
            except BaseException as error:
                self.hub.fail(error)
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=guarded, name="remote-actors", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self) -> None:
        with self._listener:
            while not self.hub.ending:
                try:
                    connection, address = self._listener.accept()
                except TimeoutError:
                    continue
                if not self._greeting.acquire(blocking=False):
                    connection.close()  # it tries again
                    continue
                self._start(self._attend, connection, f"{address[0]}:{address[1]}")

    def _attend(self, connection: socket, address: str) -> None:
        """Serve one connection from its first byte to its last."""
        channel = Channel(connection, _GREETING_SECONDS)
        try:
            if self._knows_secret(channel, address):
                channel.wait_at_most(self.hub.places.patience)
                Session(self.hub, channel, address).run()
        finally:
            channel.close()

    def _knows_secret(self, channel: Channel, address: str) -> bool:
        try:
            channel.challenge(self._secret)
        except (OSError, RefusedError) as error:
            _LOG.warning("connection from %s is refused: %s", address, error)
            return False
        finally:
            self._greeting.release()
        return True


def start_listening(
    where: Listening,
    settings: ActorSettings,
    *,
    chunk_size: int,
    gamma: float,
    seed: int,
    rank: int,
    folder: Path,
    replay: JournalReplayBuffer,
    positions: Sequence[int] | None = None,
    attempt: int = 0,
    to_be_continued: Callable[[], bool] = lambda: False,
) -> RemoteActors:
    """Let remote actors join this rank; arguments as for :func:`torchrl_vla.actors.start_actors`.

    ``settings.num_workers`` is the number of places.

    Raises:
        OSError: the address cannot be used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    streams = actor_streams(seed, rank, settings.num_workers)
    plan = Plan(
        description=where.description,
        chunk_size=chunk_size,
        gamma=gamma,
        num_envs=settings.envs_per_worker,
        decisions_per_env=settings.decisions_per_env,
        group_size=settings.group_size,
        timeout=settings.timeout,
        replay=replay.storage.id,
    )
    places = Places(streams, positions or [0] * len(streams), replay, settings.timeout)
    layout, board = replay.storage.layout, folder / "remote.json"
    hub = Hub(plan, places, layout, (seed, rank, attempt), board)
    return RemoteActors(where, hub, rank, to_be_continued)
