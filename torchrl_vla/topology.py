"""Which rank is what: process group, device mesh, and the few collectives the rooms need.

This is the only reader of ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and
``MASTER_PORT``. One process is a topology of one and runs the same code as many: it too has a
process group and a mesh. What this room does not do: place parameters (:mod:`policies.shard`) or
move weights to actors.

Every collective must be entered by all ranks in the same order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
T = TypeVar("T")
_DRAIN_SECONDS = 0.1
TEN_MINUTES = timedelta(minutes=10)


@dataclass(frozen=True)
class Topology:
    """Where this process stands among the learner ranks.

    Attributes:
        rank: 0 .. world_size - 1.
        world_size: number of learner ranks.
        local_rank: index of this rank on its node.
        device: device of this rank's shard.
        mesh: ``("shard",)``, or ``("replicate", "shard")`` when parameters are kept in several
            replicas; its size is ``world_size``.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what only one rank may write."""
        return self.rank == 0

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of ``tensor`` over ranks: a new tensor of its shape, dtype and device.

        ``bool`` is refused by torch: sum counts as int64.
        """
        total = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def broadcast_object(self, obj: Any) -> Any:
        """The object that rank 0 passed (pickled on the wire, among our own ranks only)."""
        box = [obj]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather_objects(self, obj: Any) -> list[Any]:
        """What every rank passed, in rank order, on every rank (pickled on the wire)."""
        boxes: list[Any] = [None] * self.world_size
        dist.all_gather_object(boxes, obj)
        return boxes

    def any_true(self, flag: bool) -> bool:
        """Whether ``flag`` is true on at least one rank: how ranks agree to stop or to fail."""
        seen = torch.tensor([int(flag)], dtype=torch.int32, device=self.device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return bool(seen.item())

    def together(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank; if it raises on one rank, all ranks raise.

        A rank that fails keeps its own exception. The others, which would wait for it in the next
        collective until the timeout, get a RuntimeError that says which rank failed and why.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        reasons = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = {rank: reason for rank, reason in enumerate(reasons) if reason}
        if failed:
            raise RuntimeError(f"other ranks failed: {failed}")
        return result

    def barrier(self) -> None:
        """Wait until every rank is here, at most the timeout given to :func:`start`."""
        self.any_true(False)

    def stop(self) -> None:
        """Leave the process group; nothing collective works after it. Safe to call twice."""
        if not dist.is_initialized():
            return
        dist.destroy_process_group()
        if self.device.type == "cpu":
            # gloo's threads outlive the group and drop the tensors of the last collective a moment
            # after it returned, for which they need the interpreter. A process that ends in
            # between aborts with signal 6 (pytorch/pytorch#179291). No call waits for them.
            time.sleep(_DRAIN_SECONDS)


def start(
    device: str = "auto",
    *,
    replicate: int = 1,
    timeout: timedelta = TEN_MINUTES,
    threads: int = 1,
) -> Topology:
    """Join the process group and build the mesh.

    Under ``torchrun`` the ranks come from the environment. Without it this process is a topology
    of one, on a free loopback port.

    Args:
        device: ``"auto"`` (CUDA if there is one, else CPU), ``"cpu"``, ``"cuda"`` (the GPU numbered
            ``LOCAL_RANK``), or ``"cuda:1"`` (one process only).
        replicate: replicas of the parameters; each is sharded over ``world_size / replicate``
            ranks. 1 shards over all ranks.
        timeout: after which a collective that lacks a rank fails instead of hanging.
        threads: CPU threads of torch in this process.

    Raises:
        RuntimeError: a process group exists already; the environment is incomplete; CUDA is absent.
        ValueError: ``device``, ``replicate``, ``timeout`` or ``threads`` is out of range.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has a process group already; call stop() on it first")
    if threads < 1:
        raise ValueError(f"threads is {threads}, the least is 1")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout is {timeout}, it must be positive")
    rank, world_size, local_rank = _ranks()
    _check_replicate(replicate, world_size)
    place = _device(device, local_rank, world_size)
    torch.set_num_threads(threads)
    _join(place, rank, world_size, timeout)
    mesh = _mesh(place, world_size, replicate, timeout)
    return Topology(rank, world_size, local_rank, place, mesh)


def _ranks() -> tuple[int, int, int]:
    found = [name for name in _RANKS if name in os.environ]
    if not found:
        return 0, 1, 0
    missing = [name for name in (*_RANKS, *_MASTER) if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"the environment has {found} but lacks {missing}: start with torchrun, or unset "
            f"{found} to run as one process"
        )
    rank, world_size, local_rank = (int(os.environ[name]) for name in _RANKS)
    return rank, world_size, local_rank


def _check_replicate(replicate: int, world_size: int) -> None:
    if replicate < 1 or world_size % replicate:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"replicate is {replicate} with {world_size} ranks; it must divide the number of "
            f"ranks: use one of {divisors}"
        )


def _device(name: str, local_rank: int, world_size: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device is {name!r}; use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if not torch.cuda.is_available():
        raise RuntimeError(f"device is {name!r} but torch sees no GPU; use device='cpu'")
    if device.index is not None and world_size > 1:
        raise ValueError(
            f"device is {name!r} with {world_size} ranks, which would share one GPU; use 'cuda'"
        )
    index = local_rank if device.index is None else device.index
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(
            f"rank needs GPU {index} but this node has {count}; start at most {count} ranks per "
            "node (torchrun --nproc-per-node)"
        )
    return torch.device("cuda", index)


def _join(device: torch.device, rank: int, world_size: int, timeout: timedelta) -> None:
    # With RANK unset there is no rendezvous: a store on port 0 lets the kernel pick a free port,
    # so two runs on one machine cannot collide.
    store = None
    if "RANK" not in os.environ:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if cuda else None,
    )


def _mesh(device: torch.device, world_size: int, replicate: int, timeout: timedelta) -> DeviceMesh:
    if replicate == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    shape = (replicate, world_size // replicate)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    # Sub-groups are born with torch's default timeout (30 minutes for gloo), not with ours.
    for dim in ("replicate", "shard"):
        dist.set_timeout(timeout, mesh.get_group(dim))
    return mesh


def under_torchrun() -> bool:
    """Whether an elastic agent (torchrun) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
