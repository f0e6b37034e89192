"""Checkpoint folders of pi0 as transformers writes them: load strictly, export the same.

Source: ``transformers.PI0ForConditionalGeneration`` and ``PI0Processor``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from torchrl_vla.policies.families import HEADS, load_tokenizer, start_export
from torchrl_vla.policies.flow_policy import FlowPolicy
from torchrl_vla.policies.lora import merged_state_dict
from torchrl_vla.policies.statistics import Normalizer

PUBLISHED = {"model.model.prefix.": "model.", "actor.head.network.": ""}
"""Where the published network's parts lie in a policy, and their names there."""


def published_prompts(folder: Path, instructions: Sequence[str]) -> list[list[int]]:
    """Tokenise instructions as transformers' ``PI0Processor`` does: begin, words, newline."""
    tokenizer = load_tokenizer(folder)
    texts = [f"{tokenizer.bos_token}{text}\n" for text in instructions]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def read_statistics(folder: Path) -> Mapping[str, Any]:
    """Return the processor's ``state_mean`` ... ``actions_std``; empty without any."""
    path = folder / "processor_config.json"
    entry = json.loads(path.read_text()) if path.is_file() else {}
    return {key: value for key, value in entry.items() if key.endswith(("_mean", "_std"))}


def normalizer(entry: Mapping[str, Any], name: str, dims: int) -> Normalizer | None:
    """Return the mean-std normalizer of ``"state"`` or ``"actions"``; None if there is none.

    Raises:
        ValueError: the statistics are of another number of dims than the suite's.
    """
    if entry.get(f"{name}_mean") is None:
        return None
    fields = {"mean": entry[f"{name}_mean"], "std": entry[f"{name}_std"]}
    if len(fields["mean"]) != dims:
        raise ValueError(
            f"the checkpoint's {name} statistics have {len(fields['mean'])} numbers, the suite "
            f"{dims}: they were made on another robot; use a checkpoint of this one"
        )
    return Normalizer("mean_std", fields, name=name)


def export(policy: FlowPolicy, folder: Path, *, source: Path) -> None:
    """Write ``policy`` as a checkpoint folder that transformers and :func:`make_policy` load.

    Adapters are merged. ``model.safetensors`` and ``config.json`` are the published network's;
    ``heads.safetensors`` holds what it lacks (the state value). Loading gives the same bits.

    Args:
        policy: unsharded, on any device.
        folder: new or empty.
        source: checkpoint folder whose tokenizer and processor files are copied.

    Raises:
        FileExistsError: ``folder`` holds files.
    """
    start_export(folder, source)
    state = merged_state_dict(policy)
    network, heads = {}, {}
    for key, value in state.items():
        for part, name in PUBLISHED.items():
            if key.startswith(part):
                network[name + key.removeprefix(part)] = value.cpu().contiguous()
                break
        else:
            heads[key] = value.cpu().contiguous()
    save_file(network, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(heads, folder / HEADS)
    policy.actor.head.network.config.save_pretrained(folder)
