"""What the launcher told this process: the only reader of ``RANK`` and its companions."""

from __future__ import annotations

import os
from dataclasses import dataclass

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launched:
    """A process among those that a launcher started.

    Attributes:
        rank: 0 .. world_size - 1.
        world_size: processes in all.
        local_rank: index on this node.
        local_world_size: processes on this node.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def read_environment() -> Launched | None:
    """Return what ``torchrun`` (or another launcher) said; ``None`` if nobody said anything.

    Raises:
        RuntimeError: some of the variables are there and others are missing, nodes run different
            numbers of ranks, or torchrun would start ranks again that could not meet.
    """
    found = [name for name in _RANKS if name in os.environ]
    if not found:
        return None
    missing = [name for name in (*_RANKS, *_MASTER) if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"the environment has {found} but lacks {missing}: start with torchrun, or unset "
            f"{found} to run as one process"
        )
    launched = Launched(*(int(os.environ[name]) for name in _RANKS))
    if launched.rank % launched.local_world_size != launched.local_rank:
        raise RuntimeError(
            f"rank {launched.rank} is number {launched.local_rank} of "
            f"{launched.local_world_size} on its node, so another node runs another number; start "
            "the same number of ranks on every node (torchrun --nproc-per-node)"
        )
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get(_OWN_STORE) != "1":
        raise RuntimeError(
            f"torchrun --max-restarts={restarts} without {_OWN_STORE}=1: ranks that it starts "
            "again would find addresses of dead ones in the store that all attempts share, and "
            f"hang; export {_OWN_STORE}=1 on every node, or use --max-restarts=0"
        )
    return launched


def under_torchrun() -> bool:
    """Whether an elastic agent (torchrun) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
