"""A second device on a machine that has one: computes on the CPU, refuses what a GPU would.

Tensors on ``OTHER`` (torch's name ``meta``, which nothing else in a test may use) hold their
numbers in a CPU tensor. An operation that mixes them with a CPU tensor raises as CUDA does:
0-dimensional CPU tensors and CPU indices are allowed, ``to`` and ``copy_`` copy between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

OTHER = torch.device("meta")
aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
STACKED = (aten.cat.default, aten.stack.default)


class OnOther(Tensor):
    """A tensor on ``OTHER``."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> OnOther:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=OTHER,
        )

    def __init__(self, here: Tensor) -> None:
        self.here = here

    def tolist(self) -> Any:
        return self.here.tolist()

    def __repr__(self) -> str:
        return f"OnOther({self.here})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Sees the calls that no tensor of ``OTHER`` takes part in."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _FromNumbers(TorchFunctionMode):
    """Sees tensors made of Python numbers, which torch makes without a dispatch on its ``meta``."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and "device" in kwargs:
            device = kwargs.pop("device")
            made = func(*args, **kwargs)
            return made if device is None else made.to(device)
        if func is Tensor.new_tensor and isinstance(args[0], OnOther):
            return args[0].here.new_tensor(*args[1:], **kwargs).to(OTHER)
        return func(*args, **kwargs)


@contextmanager
def other_device() -> Iterator[torch.device]:
    """Let ``OTHER`` be a device of its own."""
    with _Factories(), _FromNumbers():
        yield OTHER


def here(value: Tensor) -> Tensor:
    """Return the CPU tensor that holds the numbers of ``value``."""
    return value.here if isinstance(value, OnOther) else value


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = any(isinstance(tensor, OnOther) for tensor in tensors)
    device = kwargs.get("device")
    wanted = device is not None and torch.device(device) == OTHER
    if not there and not wanted:
        return func(*args, **kwargs)
    if there and func not in COPIES:
        _refuse_a_mix(func, args, tensors)
    inner_args, inner = tree_map_only(OnOther, lambda t: t.here, (args, kwargs))
    if device is not None:
        inner["device"] = torch.device("cpu")
    out = func(*inner_args, **inner)
    stays = there if device is None else wanted
    if func is aten.copy_.default:
        return args[0]
    if not stays:
        return out
    out = tree_map_only(Tensor, OnOther, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if there else out


def _refuse_a_mix(func: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    if func in INDEXED and isinstance(args[0], OnOther):
        tensors = [t for t in tensors if isinstance(t, OnOther) or t is args[0]]
    least = 0 if func in STACKED else 1
    strangers = [t for t in tensors if not isinstance(t, OnOther) and t.ndim >= least]
    if strangers:
        found = [(tensor.device.type, tuple(tensor.shape)) for tensor in tensors]
        raise RuntimeError(f"{func} got tensors on two devices: {found}")
