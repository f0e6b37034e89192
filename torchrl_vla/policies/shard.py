"""FSDP2 plan: how the parameters of a policy are spread over the learner ranks.

Model files hold no parallel code; this one holds all of it. A policy is either *sharded* (its
parameters are DTensors, FSDP2 averages their gradients over ranks during backward) or *replicated*
(plain tensors, the caller averages with :func:`all_reduce_replicated_grads`). Small heads stay
replicated, so that losses that vmap or copy them keep working.

The order in one update: backward, :func:`all_reduce_replicated_grads`, :func:`clip_grad_norm`,
``optimizer.step``. Build the optimizer after :func:`shard`, which replaces the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

from torchrl_vla.topology import Topology


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    blocks: Sequence[type[nn.Module]],
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    offload: bool = False,
) -> nn.Module:
    """Shard ``module`` in place: each instance of ``blocks`` is gathered alone, then the rest.

    Call ``module(...)`` itself afterwards: FSDP2 gathers parameters in ``forward``. A loss that
    calls another method needs ``torch.distributed.fsdp.register_fsdp_forward_method``.

    Args:
        module: float32, on any device; it moves to the mesh's device.
        mesh: ``("shard",)`` or ``("replicate", "shard")``, of any size, 1 included.
        blocks: layer types, such as the decoder layer of a transformer.
        param_dtype: dtype of the gathered copies and of floating inputs in forward and backward;
            buffers keep theirs. None keeps float32.
        reduce_dtype: dtype in which gradients cross ranks; used with ``param_dtype`` only.
        recompute: activation checkpointing: a block keeps its inputs alone and runs forward once
            more in the backward pass. Names of parameters stay as they are. ``copy.deepcopy`` of
            the module would go on calling the original blocks: build copies anew.
        offload: shards, their gradients and so the optimizer live in host memory; a layer is copied
            to the device while it is used. Slower, and room for a model that does not fit.

    Returns:
        ``module``, whose parameters are now float32 DTensors.

    Raises:
        TypeError: a trainable parameter is not float32.
        ValueError: no instance of ``blocks`` in ``module``, or it is sharded already.

    Source: Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277; ``fully_shard`` of torch.
    Differs: the root is gathered and freed like a block (torch keeps it gathered after forward),
    so ``parameters()`` are shards at any time between two calls.
    """
    _check_shardable(module, blocks)
    policy = (
        MixedPrecisionPolicy()
        if param_dtype is None
        else MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    )
    found = [m for m in module.modules() if m is not module and isinstance(m, tuple(blocks))]
    if recompute:
        for block in found:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    where = OffloadPolicy()
    if offload:  # pinned memory is a GPU's
        where = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    # Inner blocks first: an outer one takes every parameter that no inner one has.
    for block in (*reversed(found), module):
        fully_shard(
            block, mesh=mesh, mp_policy=policy, reshard_after_forward=True, offload_policy=where
        )
    return module


def reshard(module: nn.Module) -> None:
    """Free gathered copies, so that ``parameters()`` and ``state_dict()`` are the shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full_weights(module: nn.Module, *, trained_only: bool = False) -> TensorDict:
    """Whole parameters and buffers of ``module``, on every rank. Collective.

    One parameter is gathered at a time, so the device holds one whole parameter beyond its shards.

    Args:
        module: sharded, replicated, or a mix.
        trained_only: leave out parameters that need no gradient (all but the adapters of LoRA).

    Returns:
        TensorDict nested like ``TensorDict.from_module(module)``: detached CPU copies in the dtype
        of the masters, sharing no memory with ``module``.
    """
    reshard(module)
    weights = TensorDict.from_module(module)
    if trained_only:
        leaves = weights.items(True, True)
        weights = weights.select(
            *(k for k, t in leaves if t.requires_grad or not isinstance(t, nn.Parameter))
        )
    return weights.data.apply(
        lambda t: _full(t).to("cpu", copy=True), filter_empty=False, device="cpu"
    )


def clip_grad_norm(params: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their joint 2-norm is at most ``max_norm``. Collective.

    Args:
        params: sharded and replicated parameters mixed; those without a gradient do not count.
            Replicated gradients must be equal on all ranks: average them first.
        max_norm: positive; ``math.inf`` measures and scales nothing.

    Returns:
        float32 scalar ``[]``: the norm before scaling, of the whole gradient and equal on all
        ranks. It is inf or nan when a gradient is; the gradients are then spoiled and the caller
        decides (skipping a step in silence is not this function's business).

    Raises:
        ValueError: ``max_norm`` is not positive, or no parameter has a gradient.
    """
    if math.isnan(max_norm) or max_norm <= 0:
        raise ValueError(f"max_norm is {max_norm}, it must be positive (math.inf to only measure)")
    with_grad = [p for p in params if p.grad is not None]
    if not with_grad:
        raise ValueError("no parameter has a gradient: call backward() before clip_grad_norm()")
    # Foreach kernels refuse a list that mixes DTensors and tensors.
    kinds = [
        [p for p in with_grad if isinstance(p.grad, DTensor)],
        [p for p in with_grad if not isinstance(p.grad, DTensor)],
    ]
    kinds = [kind for kind in kinds if kind]
    norms = [_full(get_total_norm([p.grad for p in kind])).float() for kind in kinds]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if float(total) > max_norm:
        for kind in kinds:
            clip_grads_with_norm_(kind, max_norm, total)
    return total


def all_reduce_replicated_grads(params: Iterable[nn.Parameter], topology: Topology) -> None:
    """Average the gradients of plain parameters over ranks, in float32. Collective.

    DTensors are left alone: FSDP2 averaged them. One message carries all gradients, and which of
    them exist: a parameter whose gradient some ranks lack counts as zero there, and gets the
    average on all ranks; one that no rank has a gradient for keeps ``grad=None``.

    Args:
        params: the same parameters in the same order on every rank.
        topology: whose ranks to average over.
    """
    plain = [p for p in params if p.requires_grad and not isinstance(p, DTensor)]
    if not plain:
        return
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain]
    present = torch.tensor([p.grad is not None for p in plain], device=grads[0].device)
    message = torch.cat([present.float(), *(g.detach().float().flatten() for g in grads)])
    message = topology.all_reduce_sum(message)
    counts, sums = message[: len(plain)].tolist(), message[len(plain) :]
    for p, count, total in zip(plain, counts, sums.split([p.numel() for p in plain]), strict=True):
        if count:
            p.grad = (total / topology.world_size).view_as(p).to(p.dtype)


def _check_shardable(module: nn.Module, blocks: Sequence[type[nn.Module]]) -> None:
    if any(isinstance(m, FSDPModule) for m in module.modules()):
        raise ValueError(f"{type(module).__name__} holds sharded parts already: shard it once")
    if not any(isinstance(m, tuple(blocks)) for m in module.modules()):
        kinds = sorted({type(m).__name__ for m in module.modules()})
        raise ValueError(
            f"no {[b.__name__ for b in blocks]} in {type(module).__name__}: name the repeated "
            f"layer type; it holds {kinds}"
        )
    for name, p in module.named_parameters():
        if p.requires_grad and p.dtype != torch.float32:
            raise TypeError(
                f"parameter {name!r} is {p.dtype}, masters must be torch.float32: a step of an "
                "lr such as 5e-6 is below half a unit in the last place of bfloat16 and would be "
                "rounded away. Call module.float() and pass param_dtype=torch.bfloat16"
            )


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
