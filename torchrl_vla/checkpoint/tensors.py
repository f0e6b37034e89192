"""Module and optimizer state by parameter name: what goes into the shards, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from torchrl_vla.checkpoint.files import check_plain
from torchrl_vla.policies.shard import reshard


def module_tensors(name: str, module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by the name they have in the shards."""
    reshard(module)
    tensors = {f"modules/{name}/{key}": v for key, v in get_model_state_dict(module).items()}
    if odd := [key for key, value in tensors.items() if not isinstance(value, Tensor)]:
        raise TypeError(f"{odd} are not tensors; give extra module state as 'json' or 'tensors'")
    return tensors


def _parameter_names(name: str, modules: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    names: dict[nn.Parameter, str] = {}
    for i, module in enumerate(modules):
        reshard(module)
        for key, parameter in module.named_parameters():
            names.setdefault(parameter, f"{i}.{key.replace('_orig_mod.', '')}")
    return names


def optimizer_parts(
    name: str, optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Moments by parameter name, and the rest as plain JSON.

    torch's ``get_optimizer_state_dict`` is not used: for an optimizer that has not stepped it runs
    a step, and it invents moments for parameters that never had a gradient.
    """
    names = _parameter_names(name, modules)
    groups, values, moments = [], {}, {}
    for number, group in enumerate(optimizer.param_groups):
        if odd := [tuple(p.shape) for p in group["params"] if p not in names]:
            raise ValueError(
                f"optimizer {name!r}, group {number}: parameters of shapes {odd} are in none of "
                "its modules; list the modules that own them, after they were sharded"
            )
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in group.items()}
        groups.append(plain | {"params": [names[p] for p in group["params"]]})
        for parameter in group["params"]:
            key = names[parameter]
            for field, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    moments[f"optimizers/{name}/{key}/{field}"] = value
                else:
                    values.setdefault(key, {})[field] = value
    index = {"groups": groups, "values": values}
    check_plain(index, f"optimizer {name!r}")
    return moments, index


def targets_of(
    path: Path, state: Mapping[str, Any], index: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, dict[str, dict[str, Tensor]]]]:
    """Tensors to load into, checked against the file: those of modules are the live ones."""
    metadata = dcp.FileSystemReader(path / "dcp").read_metadata().state_dict_metadata
    targets: dict[str, Tensor] = {}
    for name, module in state.get("modules", {}).items():
        tensors = module_tensors(name, module)
        stored = {key for key in metadata if key.startswith(f"modules/{name}/")}
        _check_fit(f"module {name!r}", path, tensors, {key: metadata[key] for key in stored})
        targets |= tensors
    moments: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, (optimizer, modules) in state.get("optimizers", {}).items():
        parameters = _matched_parameters(name, optimizer, modules, index, path)
        moments[name] = {}
        prefix = f"optimizers/{name}/"
        for key in (key for key in metadata if key.startswith(prefix)):
            parameter, field = key.removeprefix(prefix).rsplit("/", 1)
            targets[key] = _room_for(metadata[key], parameters[parameter])
            moments[name].setdefault(parameter, {})[field] = targets[key]
    return targets, moments


def _matched_parameters(
    name: str,
    optimizer: torch.optim.Optimizer,
    modules: Sequence[nn.Module],
    index: Mapping[str, Any],
    path: Path,
) -> dict[str, nn.Parameter]:
    if name not in index:
        raise ValueError(f"{path} has no optimizer {name!r}; it has {sorted(index)}")
    names = _parameter_names(name, modules)
    here = [[names.get(p) for p in group["params"]] for group in optimizer.param_groups]
    there = [group["params"] for group in index[name]["groups"]]
    if here != there:
        sizes = [len(group) for group in here], [len(group) for group in there]
        odd = sorted({*map(str, chain(*here))} ^ {*chain(*there)})[:5]
        raise ValueError(
            f"optimizer {name!r} has groups of {sizes[0]} parameters, {path} of {sizes[1]}; only "
            f"one of them has {odd} (5 at most shown): build it from the same modules in the same "
            "order"
        )
    return {key: parameter for parameter, key in names.items()}


def _room_for(stored: Any, parameter: nn.Parameter) -> Tensor:
    dtype = stored.properties.dtype
    if stored.size == parameter.shape and stored.size:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=dtype)


def _check_fit(what: str, path: Path, here: Mapping[str, Tensor], there: Mapping[str, Any]) -> None:
    if here.keys() != there.keys():
        raise ValueError(
            f"{what} does not fit {path}: it lacks {sorted(there.keys() - here.keys())} and "
            f"{path.name} lacks {sorted(here.keys() - there.keys())}"
        )
    for key, tensor in here.items():
        stored = there[key]
        if tensor.shape != stored.size or tensor.dtype != stored.properties.dtype:
            raise ValueError(
                f"{key} is {tuple(tensor.shape)} {tensor.dtype}, but {tuple(stored.size)} "
                f"{stored.properties.dtype} in {path}; cast after loading if a cast is wanted"
            )


def set_optimizer(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    moments: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Load hyper-parameters and moments, matched by parameter name."""
    ids, groups, state = {}, [], {}
    for group, live in zip(saved["groups"], optimizer.param_groups, strict=True):
        for name in group["params"]:
            ids[name] = len(ids)
        plain = {k: tuple(v) if isinstance(live.get(k), tuple) else v for k, v in group.items()}
        groups.append(plain | {"params": [ids[name] for name in group["params"]]})
    for name, number in ids.items():
        entry = {**saved["values"].get(name, {}), **moments.get(name, {})}
        if entry:
            state[number] = entry
    optimizer.load_state_dict({"state": state, "param_groups": groups})
