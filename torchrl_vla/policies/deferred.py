"""Weights that come after sharding, so that a large model never lies whole on one rank.

``with without_weights(): policy = make_policy(meta)`` builds a published network without storage;
``shard(model, mesh)`` splits what is not there yet; ``fill(model)`` reads from the checkpoint's
safetensors exactly the slices that this rank owns. A module that has its weights is left alone, so
loops call :func:`fill` after every :func:`~torchrl_vla.policies.shard.shard`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_deferring: ContextVar[bool] = ContextVar("deferring", default=False)
PENDING = "pending_weights"
"""Attribute of a module without storage: the folder whose safetensors hold its state dict."""


@contextmanager
def without_weights() -> Iterator[None]:
    """Let the families that can build their published networks without storage (OpenVLA)."""
    token = _deferring.set(True)
    try:
        yield
    finally:
        _deferring.reset(token)


def is_deferring() -> bool:
    """Whether :func:`without_weights` is in effect."""
    return _deferring.get()


def wait_for(module: nn.Module, folder: Path) -> None:
    """Note that the weights of ``module`` lie in ``folder`` under the names of its state dict."""
    setattr(module, PENDING, folder)


def fill(module: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Read the weights that are missing; collective if ``module`` is sharded.

    Of a sharded parameter a rank reads its own slice, of a replicated one everything. Numbers are
    converted to the parameter's dtype (float32 masters from bfloat16 files).

    Args:
        module: sharded or not; changed in place.
        device: of what is not sharded; shards lie on their mesh's.

    Raises:
        RuntimeError: the files lack a tensor (torch names it).
    """
    for part in module.modules():
        folder = part.__dict__.pop(PENDING, None)
        if folder is None:
            continue
        room = {
            key: _room(value, device) for key, value in part.state_dict().items() if value.is_meta
        }
        # An adapter's layer keeps the published one inside.
        published = {key.replace(".base_layer.", "."): value for key, value in room.items()}
        dcp.load(published, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
        # Parameters are replaced; FSDP2 takes note of that in the hook of this call.
        part.load_state_dict(room, strict=False, assign=True)
    return module


def _room(value: Tensor, device: torch.device | None) -> Tensor:
    """Return an uninitialised tensor like ``value``, with storage."""
    if not isinstance(value, DTensor):
        return torch.empty(value.shape, dtype=value.dtype, device=device or "cpu")
    local = torch.empty(
        value.to_local().shape, dtype=value.dtype, device=value.device_mesh.device_type
    )
    return DTensor.from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
