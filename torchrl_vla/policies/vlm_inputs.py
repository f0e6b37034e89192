"""How families of VLMs want images, positions and prompts; the only place that tells them apart.

Known: PaliGemma and the like (one stack of images), Idefics3 and SmolVLM (images per row), Qwen2-VL
(patches with a grid, three position axes). Other ``AutoModelForImageTextToText`` classes are
treated like the first; try them before trusting them.

Legend: ``B`` rows, ``K`` cameras, ``s`` side of the image, ``L`` sequence, ``d`` width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PER_ROW = ("idefics2", "idefics3", "smolvlm")
PATCHES = ("qwen2_vl", "qwen2_5_vl")
AROUND = ("<fake_token_around_image>", "<global-img>")
"""Idefics3's processor writes ``fake global image... fake`` for an image that is not cut up."""


def encode_images(base: nn.Module, settings: Any, pixels: Tensor) -> Tensor:
    """Run the vision tower and the connector.

    Args:
        base: the VLM without its language-model head.
        settings: its configuration.
        pixels: ``[B, K, 3, s, s]``, normalised.

    Returns:
        ``[B * K * tokens per image, d]``, row by row, camera by camera.
    """
    if settings.model_type in PER_ROW:
        out = base.get_image_features(pixels)
    elif settings.model_type in PATCHES:
        vision = settings.vision_config
        grid = pixels.shape[-1] // vision.patch_size
        sizes = torch.tensor([[1, grid, grid]], device=pixels.device)
        patches = to_patches(pixels.flatten(0, 1), vision)
        out = base.get_image_features(patches, sizes.expand(len(pixels) * pixels.shape[1], -1))
    else:
        out = base.get_image_features(pixels.flatten(0, 1))
    features = out.pooler_output
    return features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))


def to_patches(pixels: Tensor, vision: Any) -> Tensor:
    """Cut images ``[N, 3, s, s]`` into Qwen2-VL's patches ``[N * (s / p)^2, 3 * t * p * p]``.

    Patches of one merged cell lie next to each other; a still image is ``t`` equal frames.

    Raises:
        ValueError: the side is no multiple of the merged patch.
    """
    side, patch, merge = pixels.shape[-1], vision.patch_size, vision.spatial_merge_size
    if side % (patch * merge):
        raise ValueError(
            f"policy.image_size is {side}; it must be a multiple of {patch * merge} "
            "(patch_size x spatial_merge_size)"
        )
    cells, frames = side // (patch * merge), vision.temporal_patch_size
    split = pixels.reshape(-1, 3, cells, merge, patch, cells, merge, patch)
    ordered = split.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)
    return ordered.expand(*ordered.shape[:6], frames, patch, patch).reshape(
        -1, 3 * frames * patch * patch
    )


def image_tokens(backbone: nn.Module, side: int) -> int:
    """Return how many tokens one image of side ``s`` becomes, by trying it."""
    embed = backbone.get_input_embeddings().weight
    device = "cpu" if embed.is_meta else embed.device
    pixels = torch.full((1, 1, 3, side, side), 0.5, dtype=embed.dtype, device=device)
    with torch.no_grad(), _lent_storage(backbone):
        return len(encode_images(backbone.model, backbone.config, pixels))


@contextmanager
def _lent_storage(module: nn.Module) -> Iterator[None]:
    """Give parameters without storage an uninitialised one for a pass whose numbers do not matter.

    It is never written, so the system gives it no memory.
    """
    lent = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for part, name, parameter in lent:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        part._parameters[name] = nn.Parameter(empty, requires_grad=False)
    try:
        yield
    finally:
        for part, name, parameter in lent:
            part._parameters[name] = parameter


def positions(settings: Any, words: Tensor, mask: Tensor, image: Tensor) -> Tensor:
    """Return position ids that skip padding.

    Args:
        settings: the VLM's configuration.
        words: int64 ``[B, L]``, image tokens included.
        mask: bool ``[B, L]``, False for padding.
        image: ``[B, K, 3, s, s]``, for its size.

    Returns:
        int64 ``[B, L]``, or ``[3, B, L]`` (time, row, column) for Qwen2-VL, where an image takes
        as many positions as it has merged rows.
    """
    if settings.model_type not in PATCHES:
        return mask.long().cumsum(-1).sub(1).clamp_min(0)
    vision = settings.vision_config
    cells = image.shape[-1] // (vision.patch_size * vision.spatial_merge_size)
    is_image = (words == settings.image_token_id) & mask
    index = (is_image.long().cumsum(-1) - 1) % cells**2
    step = torch.where(is_image, torch.where(index == cells**2 - 1, cells, 0), mask.long())
    start = step.cumsum(-1) - step
    row, column = (torch.where(is_image, part, 0) for part in (index // cells, index % cells))
    return torch.stack([start, start + row, start + column])


def prompts_of(
    tokenizer: Any,
    settings: Any,
    instructions: Sequence[str],
    *,
    cameras: int,
    tokens: int,
    template: str | None,
) -> list[list[int]]:
    """Tokenise every instruction once, images expanded.

    Args:
        tokenizer: of the checkpoint.
        settings: the VLM's configuration.
        instructions: in words.
        cameras: ``K``.
        tokens: per image.
        template: with ``{images}`` and ``{instruction}``; None: the tokenizer's chat template.

    Raises:
        ValueError: there is no template, or it does not place every camera's image once.
    """
    mark = tokenizer.convert_ids_to_tokens(settings.image_token_id)
    if template is None and not tokenizer.chat_template:
        raise ValueError(
            "the checkpoint's tokenizer has no chat template: set policy.prompt, such as "
            "'{images}<bos>{instruction}\\n'"
        )
    around = [tokenizer.get_vocab()[name] for name in AROUND if name in tokenizer.get_vocab()]
    expanded = [*around, *[settings.image_token_id] * tokens, *around[:1]]
    prompts = []
    for instruction in instructions:
        if template is None:
            content = [{"type": "image"}] * cameras + [{"type": "text", "text": instruction}]
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
        else:
            text = template.format(images=mark * cameras, instruction=instruction)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = ids.count(settings.image_token_id)
        if found != cameras:
            raise ValueError(
                f"the prompt {text!r} places {found} images, the suite has {cameras} cameras: "
                f"put {{images}} into policy.prompt once; the image token is {mark!r}"
            )
        prompts.append(
            [
                i
                for token in ids
                for i in (expanded if token == settings.image_token_id else [token])
            ]
        )
    return prompts


def repeated_layers(backbone: nn.Module) -> list[type[nn.Module]]:
    """Return the types of the outermost repeated layers: decoder layers, vision blocks."""
    found: dict[type[nn.Module], None] = {}

    def visit(module: nn.Module) -> None:
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            found[type(module[0])] = None
            return
        for child in module.children():
            visit(child)

    visit(backbone)
    return list(found)
