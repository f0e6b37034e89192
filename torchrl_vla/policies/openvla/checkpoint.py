"""Published checkpoint folders: settings, statistics and a strict load. No code of theirs runs.

A folder holds ``config.json``, safetensors (one file, or shards with an index), ``tokenizer.json``
and optionally ``dataset_statistics.json``, ``preprocessor_config.json`` and OFT's
``action_head--*.pt`` and ``proprio_projector--*.pt``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from torchrl_vla.policies.action_tokens import ActionWindow
from torchrl_vla.policies.deferred import stored_tensors, wait_for
from torchrl_vla.policies.openvla.backbone import Attention, OpenVLA
from torchrl_vla.policies.openvla.towers import TowerSizes, dinov2_sizes, siglip_sizes

TOWERS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": dinov2_sizes,
    "vit_so400m_patch14_siglip_224": siglip_sizes,
}
"""Vision towers by the name that ``config.json`` gives them."""
NOT_LLAMA_ARGUMENTS = {"model_type", "torch_dtype", "dtype", "architectures", "_name_or_path"}
UNSUPPORTED = {
    "vision_backbone--*.pt": "FiLM-conditioned vision",
    "noise_predictor--*.pt": "a diffusion head",
    "noisy_action_projector--*.pt": "a diffusion head",
}
PROPRIO = "proprio_projector."


@dataclass(frozen=True)
class Settings:
    """What ``config.json`` and its neighbours say."""

    towers: tuple[TowerSizes, ...]
    language: dict[str, Any]
    """Arguments of ``LlamaConfig``."""
    window: ActionWindow
    norm_stats: dict[str, Any]
    norm_stats_file: Path
    """Where the statistics come from."""


def read_settings(folder: Path) -> Settings:
    """Read a checkpoint's settings.

    ``dataset_statistics.json`` replaces the statistics in ``config.json``: the latter may be those
    of the model it was fine-tuned from.

    Raises:
        FileNotFoundError: no ``config.json``.
        ValueError: a vision tower, or a part of the checkpoint, is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no config.json")
    for pattern, what in UNSUPPORTED.items():
        if any(folder.glob(pattern)):
            raise ValueError(f"{folder} holds {pattern}: {what} is not supported")
    content = json.loads(path.read_text())
    language = {k: v for k, v in content["text_config"].items() if k not in NOT_LLAMA_ARGUMENTS}
    real = language["vocab_size"] - content.get("pad_to_multiple_of", 64)
    statistics = folder / "dataset_statistics.json"
    own = statistics.is_file()
    return Settings(
        towers=_pixel_statistics(_towers(content, path), folder),
        language=language,
        window=ActionWindow(real, content.get("n_action_bins", 256)),
        norm_stats=json.loads(statistics.read_text()) if own else content.get("norm_stats") or {},
        norm_stats_file=statistics if own else path,
    )


def _towers(content: Mapping[str, Any], path: Path) -> tuple[TowerSizes, ...]:
    if "vision_towers" in content:  # written by us, for sizes that have no published name
        return tuple(
            TowerSizes(**{k: tuple(v) if isinstance(v, list) else v for k, v in sizes.items()})
            for sizes in content["vision_towers"]
        )
    names = content["timm_model_ids"]
    unknown = [name for name in names if name not in TOWERS]
    if unknown:
        raise ValueError(f"{path} names the vision towers {unknown}; known are {sorted(TOWERS)}")
    sides = content.get("image_sizes", [224] * len(names))
    return tuple(TOWERS[name](side) for name, side in zip(names, sides, strict=True))


def _pixel_statistics(towers: tuple[TowerSizes, ...], folder: Path) -> tuple[TowerSizes, ...]:
    path = folder / "preprocessor_config.json"
    given = json.loads(path.read_text()) if path.is_file() else {}
    # "means" and "stds" of the same file are not what the published processor ends up using.
    params = given.get("tvf_normalize_params")
    if params is None:
        return towers
    return tuple(
        replace(sizes, mean=tuple(one["mean"]), std=tuple(one["std"]))
        for sizes, one in zip(towers, params, strict=True)
    )


def check_fit(stored: Mapping[str, Tensor], module: nn.Module, source: str) -> None:
    """Compare keys and shapes.

    Raises:
        ValueError: they differ; missing and unexpected keys and both shapes are named.
    """
    own = module.state_dict()
    missing, extra = sorted(own.keys() - stored.keys()), sorted(stored.keys() - own.keys())
    shapes = [
        f"{key}: file {tuple(stored[key].shape)}, model {tuple(own[key].shape)}"
        for key in sorted(own.keys() & stored.keys())
        if stored[key].shape != own[key].shape
    ]
    if missing or extra or shapes:
        raise ValueError(
            f"{source} does not fit {type(module).__name__}: {len(missing)} missing "
            f"{missing[:4]}, {len(extra)} unexpected {extra[:4]}, shapes {shapes[:4]}"
        )


def load_backbone(
    folder: Path,
    settings: Settings,
    attention: Attention,
    dtype: torch.dtype = torch.float32,
    *,
    deferred: bool = False,
) -> tuple[OpenVLA, dict[str, Tensor]]:
    """Build the network and load its tensors, strictly.

    Memory holds the model once: it is built without storage and takes the loaded tensors over.

    Args:
        folder: of the checkpoint.
        settings: of :func:`read_settings`.
        attention: see :class:`OpenVLA`.
        dtype: of the weights; float32 for training.
        deferred: leave the network without storage, checked against the files' headers, until
            :func:`~torchrl_vla.policies.deferred.fill`.

    Returns:
        The network, and a state projector that was stored with it (without prefix; may be empty).

    Raises:
        ValueError: a key is missing or unexpected, or a shape differs (named).
    """
    with torch.device("meta"):
        model = OpenVLA(settings.towers, settings.language, settings.window, attention)
    stored = {key: value.to(dtype) for key, value in stored_tensors(folder, values=not deferred)}
    proprio = {k: stored.pop(k) for k in list(stored) if k.startswith(PROPRIO)}
    check_fit(stored, model, str(folder))
    if deferred:
        wait_for(model, folder)
        proprio = dict(stored_tensors(folder, wanted=PROPRIO)) if proprio else {}
    else:
        model.load_state_dict(stored, assign=True)
    # The rotary frequencies are not in any checkpoint, and without storage they were not computed.
    llama = model.language_model
    llama.model.rotary_emb = LlamaRotaryEmbedding(config=llama.config)
    return model, {key.removeprefix(PROPRIO): value for key, value in proprio.items()}


def extra_tensors(folder: Path, name: str) -> dict[str, Tensor] | None:
    """Return the tensors of OFT's ``NAME--*.pt`` beside the checkpoint; None if there is none.

    Raises:
        ValueError: there are several.
    """
    found = sorted(folder.glob(f"{name}--*.pt"))
    if len(found) > 1:
        names = [path.name for path in found]
        raise ValueError(f"{folder} has {names}; keep the one that belongs to the checkpoint")
    if not found:
        return None
    stored = torch.load(found[0], map_location="cpu", weights_only=True)
    # Saved from inside DistributedDataParallel.
    return {key.removeprefix("module."): value.float() for key, value in stored.items()}
