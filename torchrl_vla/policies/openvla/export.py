"""Writes OpenVLA policies as checkpoint folders with the published names."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from torchrl_vla.policies.families import HEADS, start_export
from torchrl_vla.policies.lora import merged_state_dict

MODEL = "model.model."
BACKBONE = f"{MODEL}backbone."
EXTRAS = ("action_head", "proprio_projector")
"""Parts that OFT keeps in files of their own."""
KEPT = ("config.json", "dataset_statistics.json")


def export(policy: nn.Module, folder: Path, *, source: Path) -> None:
    """Write ``policy`` as a folder that public loaders and :func:`make_policy` read.

    Adapters are merged. The safetensors hold exactly the published keys, ``NAME--0_checkpoint.pt``
    what OFT keeps there, ``heads.safetensors`` what only we have (the state value). Loading gives
    the same bits.

    Args:
        policy: unsharded, on any device.
        folder: new or empty.
        source: the checkpoint folder that the policy was made from: its settings, statistics and
            tokenizer are copied.

    Raises:
        FileExistsError: ``folder`` holds files.
    """
    start_export(folder, source)
    for name in KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    network: dict[str, Tensor] = {}
    extras: dict[str, dict[str, Tensor]] = {name: {} for name in EXTRAS}
    heads: dict[str, Tensor] = {}
    for key, value in merged_state_dict(policy).items():
        value = value.cpu().contiguous()
        part, _, rest = key.removeprefix(MODEL).partition(".")
        if key.startswith(BACKBONE):
            network[key.removeprefix(BACKBONE)] = value
        elif key.startswith(MODEL) and part in EXTRAS:
            extras[part][rest] = value
        else:
            heads[key] = value
    save_torch_state_dict(network, folder)
    for name, state in extras.items():
        if state:
            torch.save(state, folder / f"{name}--0_checkpoint.pt")
    save_file(heads, folder / HEADS)
