"""Safetensors files of policies: strict, named errors, no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn


def save_weights(
    path: Path,
    *,
    modules: Mapping[str, nn.Module],
    vocabulary: Sequence[str],
    recipe: Mapping[str, object],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the floating-point weights of ``modules`` as ``dtype``, with vocabulary and recipe."""
    tensors = {
        f"{name}.{key}": (value.to(dtype) if value.is_floating_point() else value).contiguous()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }
    header = {"vocabulary": json.dumps(list(vocabulary)), "recipe": json.dumps(dict(recipe))}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=header)


def read_header(path: Path) -> dict[str, object]:
    """Return ``{"vocabulary": [...], "recipe": {...}}`` of a weights file."""
    with safe_open(path, "pt") as file:
        return {key: json.loads(value) for key, value in (file.metadata() or {}).items()}


def load_weights(path: Path, *, vocabulary: Sequence[str], **modules: nn.Module) -> None:
    """Load ``modules`` from ``path``, strictly; without a ``gaussian`` part that head stays fresh.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the vocabulary, a key or a shape differs; both sides are named.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"no policy weights at {path}; use policy.weights=shipped, a safetensors file, or null"
        )
    known = read_header(path).get("vocabulary")
    if known != list(vocabulary):
        raise ValueError(f"{path} knows the words {known}, the suite uses {list(vocabulary)}")
    with safe_open(path, "pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for name, module in modules.items():
        if name == "gaussian" and not any(key.startswith("gaussian.") for key in stored):
            continue  # written before a Gaussian head was trained
        own = module.state_dict()
        part = {
            k.removeprefix(f"{name}."): v for k, v in stored.items() if k.startswith(f"{name}.")
        }
        wrong = sorted(own.keys() ^ part.keys()) or [
            f"{key}: file {tuple(part[key].shape)}, policy {tuple(own[key].shape)}"
            for key in own
            if own[key].shape != part[key].shape
        ]
        if wrong:
            raise ValueError(
                f"{path} does not fit the policy's {name}: {wrong[:4]}; the sizes in conf/policy "
                "(chunk_size, num_bins, width, layers, cameras) must be those it was trained with"
            )
        module.load_state_dict({key: value.to(own[key].dtype) for key, value in part.items()})
