"""The learner ranks as a process group: device mesh and the few collectives the rooms need.

One process is a topology of one and runs the same code as many: it too has a process group and a
mesh. What this room does not do: place parameters (:mod:`policies.shard`) or move weights to
actors.

Every collective must be entered by all ranks in the same order. CPU tensors travel over gloo and
CUDA tensors over NCCL, in one and the same group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchrl_vla.topology.environment import Launched, read_environment
from torchrl_vla.topology.layout import Layout, Place, plan

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
        layout: the whole split.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    layout: Layout

    @property
    def place(self) -> Place:
        """Where this rank stands: node, replica, shard and device of its actors."""
        return self.layout.place(self.rank)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what only one rank may write."""
        return self.rank == 0

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of ``tensor`` over ranks: a new tensor of its shape, dtype and device.

        ``bool`` is refused by torch: sum counts as int64.
        """
        if self.world_size == 1:
            return tensor.detach().clone()
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
        if self.world_size == 1:
            return bool(flag)
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
    replicate: int | Literal["node"] = 1,
    actors: str = "local",
    actor_gpus: int = 0,
    server_groups: int = 2,
    timeout: timedelta = TEN_MINUTES,
    threads: int = 1,
) -> Topology:
    """Check the split, join the process group and build the mesh.

    Under ``torchrun`` the ranks come from the environment. Without it this process is a topology
    of one, on a free loopback port.

    Args:
        device, replicate, actors, actor_gpus, server_groups: see :func:`~.layout.plan`.
        timeout: after which a collective that lacks a rank fails instead of hanging.
        threads: CPU threads of torch in this process.

    Raises:
        RuntimeError: a process group exists already; the environment is incomplete; CUDA is absent.
        ValueError: a setting is out of range, or the split is impossible.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has a process group already; call stop() on it first")
    if threads < 1:
        raise ValueError(f"threads is {threads}, the least is 1")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout is {timeout}, it must be positive")
    launched = read_environment()
    me = launched or Launched(0, 1, 0, 1)
    layout = plan(
        me.world_size,
        ranks_per_node=me.local_world_size,
        gpus=torch.cuda.device_count(),
        device=device,
        replicate=replicate,
        actors=actors,
        actor_gpus=actor_gpus,
        server_groups=server_groups,
    )
    own = torch.device(layout.place(me.rank).device)
    torch.set_num_threads(threads)
    _join(own, me, launched is None, timeout)
    mesh = _mesh(own, layout, timeout)
    return Topology(me.rank, me.world_size, me.local_rank, own, mesh, layout)


def backends(device: torch.device) -> str:
    """Return the process group's backends: counters stay on the CPU, gradients on the device."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _join(device: torch.device, me: Launched, alone: bool, timeout: timedelta) -> None:
    # Alone there is no rendezvous: a store on port 0 lets the kernel pick a free port, so two runs
    # on one machine cannot collide.
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout) if alone else None
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backends(device),
        store=store,
        rank=me.rank,
        world_size=me.world_size,
        timeout=timeout,
        device_id=device if cuda else None,
    )


def _mesh(device: torch.device, layout: Layout, timeout: timedelta) -> DeviceMesh:
    names, shape = tuple(layout.mesh), tuple(layout.mesh.values())
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    if len(names) > 1:
        # Sub-groups are born with torch's default timeout (30 minutes for gloo), not with ours.
        for name in names:
            dist.set_timeout(timeout, mesh.get_group(name))
    return mesh
