"""A worker's environment: which initial states are its own, and which of its decisions are data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDictBase

from torchrl_vla import schema
from torchrl_vla.envs.chunked import ChunkedEnv, InitStateStream
from torchrl_vla.envs.simulator import Suite

_WORKERS, _RANKS, _SEEDS = 64, 64, 200_001
_MOST_RANKS, _SEEDS_OF_MANY = 1024, 2_901
"""Blocks of initial-state streams; all of them fit into a split (``envs/splits.py``)."""


class NonFiniteError(ValueError):
    """A worker's batch holds a number that is not finite."""


def make_actor_env(
    suite: Suite,
    *,
    num_envs: int,
    chunk_size: int,
    gamma: float,
    streams: Sequence[int],
    group_size: int = 1,
    worker: int,
    position: int,
    on_step: Callable[[ChunkedEnv, int], None],
) -> ChunkedEnv:
    """Build worker ``worker``'s environment on training states.

    Args:
        suite: picklable description of the suite.
        num_envs: simulators in this worker.
        chunk_size: ``H``.
        gamma: discount per control step.
        streams: initial-state stream of every worker.
        group_size: episodes per initial state.
        worker: which worker this is.
        position: episodes that the worker's stream handed out before.
        on_step: heartbeat.
    """
    # What was cut inside a group never becomes a whole group: go on with the next one.
    start = -(-position // group_size) * group_size
    init_states = InitStateStream(suite.splits["train"], streams[worker], group_size, start)
    return ChunkedEnv(
        suite.simulators(num_envs),
        init_states,
        chunk_size=chunk_size,
        gamma=gamma,
        on_step=on_step,
    )


def actor_streams(seed: int, rank: int, num_workers: int) -> list[int]:
    """Return the initial-state stream of each worker: distinct over seeds, ranks and workers.

    Ranks from 64 on have their streams behind those of ranks 0..63, of which there is room for
    fewer seeds; a run's first 64 ranks have the same streams whatever its size.

    Args:
        seed: 0..200,000; on ranks from 64 on 0..2,900.
        rank: 0..1023.
        num_workers: 0..64.

    Raises:
        ValueError: a number is outside its range.
    """
    seeds = _SEEDS if rank < _RANKS else _SEEDS_OF_MANY
    limits = {"rank": (rank, _MOST_RANKS - 1), "num_workers": (num_workers, _WORKERS)}
    for name, (value, limit) in (limits | {"seed": (seed, seeds - 1)}).items():
        if not 0 <= value <= limit:
            raise ValueError(f"{name} is {value}; on rank {rank} it must be in 0..{limit}")
    place = seed * _RANKS + rank
    if rank >= _RANKS:
        place = _SEEDS * _RANKS + seed * (_MOST_RANKS - _RANKS) + rank - _RANKS
    return [place * _WORKERS + worker for worker in range(num_workers)]


def to_transitions(batch: TensorDictBase) -> TensorDictBase:
    """Flatten a collected batch ``[N, T]`` to replay rows and leave out diverged simulations.

    Root copies of the previous decision's outcome and the collector's bookkeeping are dropped.
    """
    keep = [f.key for f in schema.SCHEMA if batch.get(f.key, None) is not None]
    keep += [("next", "observation")]
    flat = batch.select(*keep).flatten()
    return flat[~flat[schema.SIM_ERROR].squeeze(-1)]


def check_finite(batch: TensorDictBase) -> None:
    """Check all floating-point numbers of a batch ``[N, T]``, apart from diverged simulations.

    Raises:
        NonFiniteError: names the key and the first simulator and decision.
    """
    data = ~batch[schema.SIM_ERROR].squeeze(-1)
    for key, leaf in batch.items(True, True):
        if not leaf.is_floating_point() or bool(torch.isfinite(leaf).all()):
            continue
        bad = ~torch.isfinite(leaf).reshape(*batch.batch_size, -1).all(-1) & data
        if bool(bad.any()):
            simulator, step = bad.nonzero()[0].tolist()
            raise NonFiniteError(
                f"{key!r} is not finite in {int(bad.sum())} of {batch.numel()} decisions, first in "
                f"simulator {simulator} at decision {step} of the batch"
            )
