"""Checkpoint folders of random networks, made from configs; nothing is downloaded."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    PaliGemmaConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    SmolVLMConfig,
)

from torchrl_vla import schema
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.policies import pi0

META = TabletopSuite().meta


def save_tokenizer(folder: Path, special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of the suite's words and some template words; ids from 0."""
    words = sorted({word for text in META.instructions for word in text.split()})
    tokens = ["<unk>", "<pad>", "<bos>", "<eos>", *special, "\n", "Task", ":", "User", *words]
    inner = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    inner.add_special_tokens(["<bos>", "<eos>", "<pad>", *special])
    inner.add_tokens(["\n", ":"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def spread(module: torch.nn.Module, std: float = 0.2, seed: int = 0) -> torch.nn.Module:
    """Give every matrix opinions: fresh networks are near constant, and tests would see nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return module


def save_pi0(folder: Path, **statistics: list[float]):
    """A tiny pi0 folder as transformers writes it; returns the whole network."""
    torch.manual_seed(0)
    # a vocabulary with room for the tokenizer's own tokens
    roomy = replace(META, instructions=(*META.instructions, "a b c d e f g h i j"))
    network = spread(pi0.tiny_network(roomy, 6))
    network.save_pretrained(folder)
    save_tokenizer(folder)
    image = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.5, 0.25, 0.5]}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "processor_config.json").write_text(json.dumps(statistics))
    return network.eval()


def observations(*batch: int, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    td = TensorDict(batch_size=batch)
    image = (*batch, len(META.cameras), 3, META.image_size, META.image_size)
    td[schema.IMAGE] = torch.randint(0, 256, image, generator=generator, dtype=torch.uint8)
    td[schema.STATE] = torch.randn(*batch, META.state_dim, generator=generator)
    tasks = len(META.instructions)
    td[schema.TASK_ID] = torch.randint(0, tasks, (*batch, 1), generator=generator)
    return td


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
TOWER = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 16,
    "image_size": 64,
}
IMAGE_TOKEN = 4
"""The first special token that ``save_tokenizer`` is given."""
PROMPTS = {
    "smolvlm": "<bos> User : {images} {instruction} \n",
    "paligemma": "{images} <bos> {instruction} \n",
    "qwen2_vl": "<bos> <|vision_start|> {images} <|vision_end|> {instruction} \n",
}


def vlm_config(family: str):
    if family == "smolvlm":
        # 4 x 4 patches, 2 x 2 of them to a token: 4 tokens per image
        return SmolVLMConfig(
            text_config=TEXT | {"model_type": "llama"},
            vision_config=TOWER,
            scale_factor=2,
            image_token_id=IMAGE_TOKEN,
            pad_token_id=1,
        )
    if family == "paligemma":
        # 16 tokens per image
        return PaliGemmaConfig(
            text_config=TEXT | {"model_type": "gemma", "head_dim": 16},
            vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
            projection_dim=64,
            image_token_id=IMAGE_TOKEN,
        )
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    # 8 x 8 patches, 2 x 2 of them to a token: 16 tokens per image
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
    patches = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config=vision | patches,
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=5,
        vision_end_token_id=6,
        video_token_id=63,
    )


def save_vlm(folder: Path, family: str):
    """A small folder of a VLM family as transformers writes it; returns the network."""
    torch.manual_seed(0)
    network = spread(AutoModelForImageTextToText.from_config(vlm_config(family)), std=0.15)
    network.save_pretrained(folder)
    special = {
        "smolvlm": ("<image>", "<fake_token_around_image>", "<global-img>"),
        "paligemma": ("<image>",),
        "qwen2_vl": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    }[family]
    save_tokenizer(folder, special)
    return network.eval()
