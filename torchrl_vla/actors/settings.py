"""How many actors a rank has and what each does, and starting them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tensordict.nn import TensorDictModuleBase

from torchrl_vla.actors.environment import actor_streams, make_actor_env
from torchrl_vla.actors.server import RankServer, ServerSettings, request_and_response
from torchrl_vla.actors.supervision import RestartLimit
from torchrl_vla.actors.workers import Actors
from torchrl_vla.envs.simulator import Suite
from torchrl_vla.storage.buffer import JournalReplayBuffer

PUBLISH = ("blocking", "background")


@dataclass(frozen=True)
class ActorSettings:
    """How many actor processes a rank has and what each does."""

    num_workers: int
    """``W``, processes."""
    envs_per_worker: int
    """``N``, simulators in each."""
    decisions_per_env: int
    """``T``, decisions per simulator and batch."""
    timeout: float = 30.0
    """Seconds without a sign of life after which a worker counts as hung."""
    group_size: int = 1
    """Episodes per initial state."""
    max_restarts: int = 5
    """Workers of a rank that may be replaced within ``restart_minutes``; 0: the first failure ends
    the run."""
    restart_minutes: float = 10.0
    publish: str = "blocking"
    """``"blocking"``: weights are there for the workers when the learner goes on.
    ``"background"``: a thread hands them over meanwhile."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "publish":
                continue
            least = 0 if name == "max_restarts" else "above 0"
            if value < 0 or (value == 0 and name != "max_restarts"):
                raise ValueError(f"actors.{name} is {value}; it must be {least} or more")
        if self.publish not in PUBLISH:
            raise ValueError(f"actors.publish is {self.publish!r}; use one of {PUBLISH}")


def start_actors(
    suite: Suite,
    make_policy: Callable[[], TensorDictModuleBase],
    settings: ActorSettings,
    *,
    chunk_size: int,
    gamma: float,
    seed: int,
    rank: int,
    folder: Path,
    positions: Sequence[int] | None = None,
    attempt: int = 0,
    replay: JournalReplayBuffer | None = None,
    server: ServerSettings | None = None,
) -> Actors:
    """Start this rank's actors on training states.

    Args:
        suite: picklable description of the suite.
        make_policy: picklable; builds the policy in a worker.
        settings: processes, simulators, batch.
        chunk_size: ``H``.
        gamma: discount per control step.
        seed: the run's seed.
        rank: this rank.
        folder: of the rank's actors.
        positions: where the initial-state streams go on (resume).
        attempt: changes the action noise when a run goes on.
        replay: see :class:`Actors`.
        server: of the policy server that acts for all workers; ``None``: each has its own copy.
    """
    make_env = partial(
        make_actor_env,
        suite,
        num_envs=settings.envs_per_worker,
        chunk_size=chunk_size,
        gamma=gamma,
        streams=actor_streams(seed, rank, settings.num_workers),
        group_size=settings.group_size,
    )
    return Actors(
        make_env,
        make_policy,
        num_workers=settings.num_workers,
        steps_per_batch=settings.decisions_per_env,
        folder=folder,
        positions=positions,
        replay=replay,
        seed=(seed, rank, attempt),
        timeout=settings.timeout,
        limit=RestartLimit(settings.max_restarts, settings.restart_minutes),
        background=settings.publish == "background",
        server=None
        if server is None
        else partial(
            RankServer,
            *request_and_response(server.copy, suite.meta, chunk_size, settings.envs_per_worker),
            server,
            settings.timeout,
        ),
    )
