"""A rank's actors as the loops start them: here or elsewhere, and where a checkpoint left them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from torchrl_vla.actors import Actors, ActorSettings, ServerSettings, start_actors
from torchrl_vla.loops.run import Run
from torchrl_vla.remote import Listening, RemoteActors, start_listening
from torchrl_vla.storage.buffer import JournalReplayBuffer
from torchrl_vla.topology import Topology


def start_workers(
    run: Run,
    make_policy: Callable[..., nn.Module],
    actors: ActorSettings,
    evaluated: nn.Module,
    *,
    seed: int,
    gamma: float,
    loaded: Mapping[str, Any] | None = None,
    replay: JournalReplayBuffer | None = None,
    remote: Listening | None = None,
) -> Actors | RemoteActors:
    """Start this rank's actors.

    Args:
        run: the run.
        make_policy: picklable; ``make_policy(meta)`` builds the policy in a worker.
        actors: processes, simulators, batch.
        evaluated: a whole copy of the policy, for a policy server.
        seed: of the run.
        gamma: discount per control step.
        loaded: the checkpoint that the run goes on from, if any.
        replay: actors write there; ``None``: they hand over rounds.
        remote: start none: others join there, and write ``replay``.
    """
    rank = run.topology.rank
    if remote is None:
        build = partial(make_policy, run.suite.meta)
        server = ServerSettings.of(run.topology, evaluated)
        start = partial(start_actors, run.suite, build, actors, server=server)
    else:
        start = partial(start_listening, remote, actors, to_be_continued=lambda: run.interrupted)
    return start(
        chunk_size=run.chunk_size,
        gamma=gamma,
        seed=seed,
        rank=rank,
        folder=run.folder / "actors" / f"rank-{rank}",
        positions=own_part(loaded).get("positions"),
        attempt=run.counters["updates"],
        replay=replay,
    )


def first_decisions(run: Run, actors: ActorSettings) -> int:
    """Return the decisions of this rank within which the first episode of every simulator ends.

    All began at once, so that those which have ended by then are the short ones: their success says
    more about their length than about the policy.
    """
    longest = -(-run.suite.meta.max_steps // run.chunk_size)
    return actors.num_workers * actors.envs_per_worker * longest


def own_part(loaded: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return what a checkpoint holds for this rank alone; empty without one, or of other ranks."""
    return {} if loaded is None else loaded["rank_json"] or {}


def restarts_of(workers: Actors | RemoteActors, topology: Topology) -> float:
    """Return how many workers were replaced so far, over all ranks; collective."""
    return float(topology.all_reduce_sum(torch.tensor(workers.restarts)))
