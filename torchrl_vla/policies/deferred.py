"""Weights that come after sharding, so that a large model never lies whole on one rank.

``with without_weights(): policy = make_policy(meta)`` builds a published network without storage;
``shard(model, mesh)`` splits what is not there yet; ``fill(model)`` reads from the checkpoint's
safetensors exactly the slices that this rank owns. A module that has its weights is left alone, so
loops call :func:`place`, which does the last two, for every policy that they train.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchrl_vla.policies.shard import shard
from torchrl_vla.topology import Topology

_deferring: ContextVar[bool] = ContextVar("deferring", default=False)
PENDING = "pending_weights"
"""Attribute of a module without storage: its :class:`Pending`."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Pending(NamedTuple):
    """Where the weights of a module lie that has no storage yet."""

    folder: Path
    names: Mapping[str, str] | None
    """Name in the files by name in the state dict; ``None`` if they are the same."""


@contextmanager
def without_weights() -> Iterator[None]:
    """Let the families build their published networks without storage."""
    token = _deferring.set(True)
    try:
        yield
    finally:
        _deferring.reset(token)


def is_deferring() -> bool:
    """Whether :func:`without_weights` is in effect."""
    return _deferring.get()


@contextmanager
def parameters_without_storage() -> Iterator[None]:
    """Build modules whose parameters have no storage; their buffers do.

    Rotary frequencies and position ids are computed when a network is built and are in no file. On
    ``torch.device("meta")`` they would be lost.
    """
    register = nn.Module.register_parameter

    def register_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # a tied one stays the same object
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def stored_tensors(
    folder: Path, *, wanted: str = "", values: bool = True, rows: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the folder's safetensors, one at a time.

    Args:
        folder: of the checkpoint.
        wanted: beginning of the keys that are read.
        values: False gives tensors of the stored shapes without storage; no weight is read.
        rows: most rows of each tensor that are read; None for all.

    Raises:
        FileNotFoundError: neither an index nor a single file, or a shard is missing.
    """
    index = folder / INDEX
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = [SINGLE]
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {missing}; download the whole checkpoint")
    for name in files:
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                if not key.startswith(wanted):
                    continue
                if values:
                    yield key, file.get_tensor(key) if rows is None else file.get_slice(key)[:rows]
                else:
                    yield key, torch.empty(file.get_slice(key).get_shape(), device="meta")


def wait_for(module: nn.Module, folder: Path, names: Mapping[str, str] | None = None) -> None:
    """Note that the weights of ``module`` lie in ``folder``; see :class:`Pending`."""
    setattr(module, PENDING, Pending(folder, names))


def first_rows(network: nn.Module, weight: Tensor, rows: int) -> Tensor | None:
    """Return the first rows of a matrix of ``network``, from the files if it waits for them.

    ``None`` if ``weight`` has no storage and ``network`` waits for nothing.
    """
    if not weight.is_meta:
        return weight.detach()[:rows]
    pending: Pending | None = network.__dict__.get(PENDING)
    if pending is None:
        return None
    own = network.state_dict(keep_vars=True)
    keys = (key for key, value in own.items() if value is weight)
    name = next(pending.names[key] for key in keys if key in pending.names)
    found = stored_tensors(pending.folder, wanted=name, rows=rows)
    return next(value for key, value in found if key == name)


def take_pending(module: nn.Module) -> Pending | None:
    """Return what ``module`` waits for, and let it wait no longer."""
    return module.__dict__.pop(PENDING, None)


def fill(
    module: nn.Module, device: torch.device | None = None, *, offload: bool = False
) -> nn.Module:
    """Read the weights that are missing; collective if ``module`` is sharded.

    Of a sharded parameter a rank reads its own slice, of a replicated one everything. Numbers are
    converted to the parameter's dtype (float32 masters from bfloat16 files). Tied parameters are
    read once and stay tied.

    Args:
        module: sharded or not; changed in place.
        device: of what is not sharded; shards lie on their mesh's.
        offload: shards lie in host memory, see :func:`~torchrl_vla.policies.shard.shard`.

    Raises:
        RuntimeError: the files lack a tensor (torch names it).
    """
    for part in module.modules():
        pending = take_pending(part)
        if pending is None:
            continue
        missing = {k: v for k, v in part.state_dict(keep_vars=True).items() if v.is_meta}
        room = {id(value): _room(value, device, offload) for value in missing.values()}
        wanted: dict[str, Tensor] = {}
        for key, value in missing.items():
            # An adapter's layer keeps the published one inside.
            name = key.replace(".base_layer.", ".")
            name = name if pending.names is None else pending.names.get(name)
            if name is not None:  # otherwise it is the other name of a tied one
                wanted[name] = room[id(value)]
        dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(pending.folder)))
        for value in missing.values():
            if isinstance(value, nn.Parameter) and not isinstance(room[id(value)], nn.Parameter):
                room[id(value)] = nn.Parameter(room[id(value)], value.requires_grad)
        # Parameters are replaced; FSDP2 takes note of that in the hook of this call.
        given = {key: room[id(value)] for key, value in missing.items()}
        part.load_state_dict(given, strict=False, assign=True)
    return module


def place(
    policy: nn.Module,
    topology: Topology,
    *,
    sharded: bool = True,
    recompute: bool = False,
    offload: bool = False,
) -> nn.Module:
    """Bring a learner's policy to its device and read what it lacks; collective if sharded.

    Args:
        policy: whole; changed in place. ``policy.model.model`` is what FSDP2 shards.
        topology: the learner ranks.
        sharded: spread the model over the ranks; ``False`` keeps it whole on each.
        recompute, offload: see :func:`~torchrl_vla.policies.shard.shard`.

    Returns:
        The model.

    Raises:
        ValueError: activations shall be recomputed, and the family's layers may not run twice.
    """
    model = policy.model.model
    if recompute and not getattr(model, "recomputable", False):
        raise ValueError(
            f"updates.recompute=true, but layers of {type(model).__name__} may not run forward "
            "twice; set updates.recompute=false and a smaller updates.micro_batch_size"
        )
    if sharded:
        plan = {"blocks": model.shard_plan(), "recompute": recompute, "offload": offload}
        shard(model, topology.mesh, **plan)
    fill(model, topology.device, offload=sharded and offload)
    _move_unsharded(policy, topology.device)
    return model


def features_on_host(policy: nn.Module, topology: Topology) -> Callable[[TensorDictBase], Tensor]:
    """Return what maps rows of the host, ``[B]``, to their features ``[B, F]`` on the host.

    The policy, with ``features``, is where :func:`place` brought it; no gradient.
    """

    @torch.no_grad()
    def encode(rows: TensorDictBase) -> Tensor:
        return policy.features(rows.to(topology.device)).cpu()

    return encode


def _move_unsharded(module: nn.Module, device: torch.device) -> None:
    if isinstance(module, FSDPModule):
        return  # where its mesh is
    module._apply(lambda tensor: tensor.to(device), recurse=False)
    for child in module.children():
        _move_unsharded(child, device)


def _room(value: Tensor, device: torch.device | None, offload: bool) -> Tensor:
    """Return an uninitialised tensor like ``value``, with storage."""
    if not isinstance(value, DTensor):
        return torch.empty(value.shape, dtype=value.dtype, device=device or "cpu")
    where = "cpu" if offload else value.device_mesh.device_type
    local = torch.empty(value.to_local().shape, dtype=value.dtype, device=where)
    return DTensor.from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
