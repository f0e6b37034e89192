"""Writes checkpoint folders as they are published, from the golden weights."""

import dataclasses
import json
from pathlib import Path

import torch
from openvla_fixture import TOWERS, config, part, state_dict
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from torchrl_vla.schema import SuiteMeta

SPATIAL = "pick up the black bowl between the plate and the ramekin and place it on the plate"
TEN = "put both the alphabet soup and the tomato sauce in the basket"
PIECES = {
    **{"<unk>": 0, "<s>": 1, "</s>": 2, "In": 512, ":": 29901, "What": 1724, "action": 3158},
    **{"should": 881, "the": 278, "robot": 19964, "take": 2125, "to": 304, "?": 29973, "\n": 13},
    **{"Out": 3744, "pick": 5839, "up": 701, "black": 4628, "bow": 12580, "##l": 29880},
    **{"between": 1546, "plate": 15284, "and": 322, "r": 364, "##ame": 420, "##kin": 9089},
    **{"place": 2058, "it": 372, "on": 373, "put": 1925, "both": 1716, "alphabet": 22968},
    **{"soup": 22300, "tom": 6454, "##ato": 1219, "sau": 12507, "##ce": 346, "in": 297},
    **{"basket": 25972, "stack": 5096, "blocks": 10930},
}
"""The pieces of Llama-2's vocabulary that two LIBERO prompts use."""
META = SuiteMeta(
    name="arm",
    instructions=(SPATIAL, TEN),
    task_names=("spatial", "ten"),
    cameras=("front", "wrist"),
    image_size=64,
    state_names=tuple(f"s{i}" for i in range(8)),
    action_names=tuple(f"a{i}" for i in range(7)),
    max_steps=8,
    control_hz=20.0,
)


def tokenizer(start: bool = True) -> Tokenizer:
    """Return a tokenizer that gives these prompts the ids they have in Llama-2's."""
    built = Tokenizer(models.WordPiece(PIECES, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "removed"),
            pre_tokenizers.Split(Regex("[?:\n]"), "isolated"),
        ]
    )
    if start:
        built.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return built


def write_folder(
    folder: Path,
    *,
    tensors: dict[str, torch.Tensor] | None = None,
    extras: bool = True,
    statistics: dict | None = None,
    **changes,
) -> Path:
    """Write config, two shards with an index, tokenizer, statistics, heads and foreign code."""
    folder.mkdir(parents=True, exist_ok=True)
    content = config()
    content.pop("tiny_vit_overrides")
    content["vision_towers"] = [dataclasses.asdict(sizes) for sizes in TOWERS]
    content["auto_map"] = {"AutoConfig": "modeling.Config", "AutoModelForVision2Seq": "modeling.M"}
    (folder / "config.json").write_text(json.dumps(content | changes))
    (folder / "modeling.py").write_text("raise SystemExit('foreign code ran')\n")
    stored = state_dict() if tensors is None else tensors
    names = sorted(stored)
    files = {}
    for number, keys in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({key: stored[key].contiguous() for key in keys}, folder / file)
        files |= dict.fromkeys(keys, file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    tokenizer().save(str(folder / "tokenizer.json"))
    if statistics is not None:
        (folder / "dataset_statistics.json").write_text(json.dumps(statistics))
    if extras:
        for name in ("action_head", "proprio_projector"):
            saved = {f"module.{k}": v.float() for k, v in part("weights", name).items()}
            torch.save(saved, folder / f"{name}--150000_checkpoint.pt")
    return folder
