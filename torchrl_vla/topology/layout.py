"""Who runs where: ranks, meshes, devices and actors of a run, as plain numbers.

Nothing here needs a process group, a GPU or an environment variable, so every split from one laptop
process to many nodes can be checked on any machine. :func:`plan` refuses what cannot work, before
anything is started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ACTORS = ("local", "server")
"""Where actors choose actions: each with its own copy of the policy, or at a policy server."""


@dataclass(frozen=True)
class Place:
    """Where one learner rank stands.

    Attributes:
        rank: 0 .. world_size - 1.
        node: 0 .. nodes - 1.
        local_rank: index of the rank on its node.
        replica: which copy of the parameters it holds a part of.
        shard: which part.
        device: of its shard: ``"cpu"`` or ``"cuda:N"``.
        actor_device: of the policy that its actors act with.
    """

    rank: int
    node: int
    local_rank: int
    replica: int
    shard: int
    device: str
    actor_device: str


@dataclass(frozen=True)
class Layout:
    """A split that works; made by :func:`plan`.

    Attributes:
        world_size: learner ranks.
        ranks_per_node: the same number on every node.
        replicate: copies of the parameters; each is spread over :attr:`shard` ranks.
        device: ``"cpu"``, ``"cuda"`` (rank ``i`` of a node has GPU ``i``) or ``"cuda:N"``.
        actors: see :data:`ACTORS`.
        actor_gpus: GPUs of a node that belong to policy servers, after those of the ranks.
        server_groups: parts of a rank's workers that take turns at their policy server.
    """

    world_size: int
    ranks_per_node: int
    replicate: int
    device: str
    actors: Literal["local", "server"]
    actor_gpus: int
    server_groups: int

    @property
    def nodes(self) -> int:
        """Number of nodes that have learner ranks."""
        return self.world_size // self.ranks_per_node

    @property
    def shard(self) -> int:
        """Number of ranks that one copy of the parameters is spread over."""
        return self.world_size // self.replicate

    @property
    def mesh(self) -> dict[str, int]:
        """Dimensions of the device mesh by name, outermost first (FSDP, or HSDP if replicated)."""
        if self.replicate == 1:
            return {"shard": self.shard}
        return {"replicate": self.replicate, "shard": self.shard}

    def place(self, rank: int) -> Place:
        """Return where ``rank`` stands.

        Raises:
            IndexError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank is {rank}; ranks go from 0 to {self.world_size - 1}")
        node, local_rank = divmod(rank, self.ranks_per_node)
        replica, shard = divmod(rank, self.shard)
        device = f"cuda:{local_rank}" if self.device == "cuda" else self.device
        return Place(rank, node, local_rank, replica, shard, device, self._actor_device(local_rank))

    def _actor_device(self, local_rank: int) -> str:
        if self.actors == "local" or self.device == "cpu":
            return "cpu"
        if self.actor_gpus == 0:
            return f"cuda:{local_rank}" if self.device == "cuda" else self.device
        server = local_rank * self.actor_gpus // self.ranks_per_node
        return f"cuda:{self.ranks_per_node + server}"

    def __str__(self) -> str:
        mesh = " x ".join(f"{size} {name}" for name, size in self.mesh.items())
        spare = f", {self.actor_gpus} GPUs per node for actors" if self.actor_gpus else ""
        return (
            f"{self.world_size} ranks on {self.nodes} nodes, {mesh}, {self.device}, "
            f"actors: {self.actors}{spare}"
        )


def plan(
    world_size: int,
    *,
    ranks_per_node: int,
    gpus: int,
    device: str = "auto",
    replicate: int | Literal["node"] = 1,
    actors: str = "local",
    actor_gpus: int = 0,
    server_groups: int = 2,
) -> Layout:
    """Check a split and fill in what follows from it.

    Args:
        world_size: learner ranks.
        ranks_per_node: learner ranks on each node.
        gpus: GPUs that a node shows.
        device: ``"auto"`` (``"cuda"`` if there are GPUs, else ``"cpu"``), ``"cpu"``, ``"cuda"``, or
            ``"cuda:N"`` for a single rank.
        replicate: copies of the parameters; ``"node"`` keeps one on every node, so that only
            gradients cross nodes. 1 shards over all ranks.
        actors: see :data:`ACTORS`.
        actor_gpus: GPUs of each node that only policy servers use; 0: a server shares the GPU of
            its rank.
        server_groups: parts of a rank's workers that take turns at their policy server, so that
            some simulate while the policy works for the others; 1: all wait for it.

    Raises:
        ValueError: a number is out of range or two of them exclude each other; the message says
            which numbers would do.
        RuntimeError: ``device`` is CUDA and there is no GPU.
    """
    if world_size < 1 or ranks_per_node < 1 or world_size % ranks_per_node:
        raise ValueError(
            f"{world_size} ranks with {ranks_per_node} per node do not fill whole nodes; start the "
            "same number of ranks on every node (torchrun --nproc-per-node)"
        )
    device = _device(device, world_size, ranks_per_node, gpus)
    replicate = _replicate(replicate, world_size, ranks_per_node)
    _check_actors(actors, actor_gpus, device, ranks_per_node, gpus)
    if server_groups < 1:
        raise ValueError(f"server_groups is {server_groups}; it must be at least 1")
    return Layout(world_size, ranks_per_node, replicate, device, actors, actor_gpus, server_groups)


def _device(device: str, world_size: int, ranks_per_node: int, gpus: int) -> str:
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    kind, _, index = device.partition(":")
    if device != "cpu" and (kind != "cuda" or (":" in device and not index.isdigit())):
        raise ValueError(f"device is {device!r}; use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device == "cpu":
        return device
    if gpus == 0:
        raise RuntimeError(f"device is {device!r} but torch sees no GPU; use device=cpu")
    if index and world_size > 1:
        raise ValueError(
            f"device is {device!r} with {world_size} ranks, which would share one GPU; use 'cuda'"
        )
    last = int(index) if index else ranks_per_node - 1
    if last >= gpus:
        raise ValueError(
            f"a rank needs GPU {last} but a node has {gpus}; start at most {gpus} ranks per node "
            "(torchrun --nproc-per-node)"
        )
    return device


def _replicate(replicate: int | str, world_size: int, ranks_per_node: int) -> int:
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    if replicate == "node":
        return world_size // ranks_per_node
    if replicate not in divisors:
        raise ValueError(
            f"replicate is {replicate!r} with {world_size} ranks; it must divide the number of "
            f"ranks: use one of {divisors}, or 'node'"
        )
    return int(replicate)


def _check_actors(
    actors: str, actor_gpus: int, device: str, ranks_per_node: int, gpus: int
) -> None:
    if actors not in ACTORS:
        raise ValueError(f"actors is {actors!r}; use one of {list(ACTORS)}")
    if actor_gpus == 0:
        return
    if actor_gpus < 0 or actors != "server" or device != "cuda":
        raise ValueError(
            f"actor_gpus is {actor_gpus} with actors={actors!r} and device={device!r}; GPUs for "
            "actors need actors=server and device=cuda, otherwise actor_gpus=0"
        )
    if actor_gpus > ranks_per_node:
        raise ValueError(
            f"actor_gpus is {actor_gpus} with {ranks_per_node} ranks per node, each with one "
            f"server: {actor_gpus - ranks_per_node} GPUs would stay idle; use at most "
            f"{ranks_per_node}"
        )
    if ranks_per_node + actor_gpus > gpus:
        raise ValueError(
            f"{ranks_per_node} ranks and {actor_gpus} GPUs for actors need "
            f"{ranks_per_node + actor_gpus} GPUs per node but there are {gpus}; start "
            f"{max(1, gpus - actor_gpus)} ranks per node or use a smaller actor_gpus"
        )
