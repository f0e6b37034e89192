"""The network of an OpenVLA policy and what belongs to it: loaded, or tiny with random weights.

Shape legend: ``V`` bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchrl_vla.policies.action_tokens import ActionWindow
from torchrl_vla.policies.families import FETCHED, check_source, resolve_checkpoint
from torchrl_vla.policies.openvla.backbone import Attention, OpenVLA
from torchrl_vla.policies.openvla.checkpoint import (
    Settings,
    extra_tensors,
    load_backbone,
    read_settings,
)
from torchrl_vla.policies.openvla.prompts import (
    LLAMA_VOCABULARY,
    LONE_SPACE,
    Encode,
    llama_encoder,
    word_encoder,
)
from torchrl_vla.policies.openvla.towers import dinov2_sizes, siglip_sizes
from torchrl_vla.policies.statistics import Kind, Normalizer, choose_statistics, fingerprint
from torchrl_vla.schema import SuiteMeta


@dataclass
class Parts:
    """A network and what belongs to it."""

    backbone: OpenVLA
    encode: Encode
    end_id: int | None = None
    vocabulary: tuple[str, ...] = ()
    action: Normalizer | None = None
    state: Normalizer | None = None
    extras: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Tensors of ``action_head`` and ``proprio_projector``, where the checkpoint has them."""
    facts: dict[str, Any] = field(default_factory=dict)


def tiny_settings(
    vocabulary_size: int,
    image_size: int,
    *,
    num_bins: int = 256,
    patch_size: int = 8,
    vision_width: int = 48,
    vision_depth: int = 3,
    width: int = 96,
    layers: int = 2,
    heads: int = 4,
    initializer_range: float = 0.02,
) -> Settings:
    """Return the settings of a two-tower OpenVLA with random weights.

    Args:
        vocabulary_size: words, the three special ids included.
        image_size: of the suite, so that nothing is resized; a multiple of ``patch_size``.
        num_bins: ``V``.
        patch_size: side of a patch, pixels.
        vision_width: of each tower; ``vision_depth`` blocks are stored and one fewer are run.
        vision_depth: see ``vision_width``.
        width: of the language model.
        layers: of the language model.
        heads: attention heads, in the towers and in the language model.
        initializer_range: standard deviation of the language model's fresh matrices. Llama's 0.02
            is for a width of thousands; below ``width ** -0.5`` attention begins flat.

    Raises:
        ValueError: patches do not tile the image.
    """
    if image_size % patch_size:
        raise ValueError(f"image_size {image_size} is no multiple of patch_size {patch_size}")
    real = vocabulary_size + num_bins
    vision = {
        "patch_size": patch_size,
        "width": vision_width,
        "depth": vision_depth,
        "num_heads": heads,
    }
    return Settings(
        towers=(dinov2_sizes(image_size, **vision), siglip_sizes(image_size, **vision)),
        language={
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "initializer_range": initializer_range,
            "vocab_size": real + 64,  # like the real one: columns behind the vocabulary
            "pad_token_id": real,
        },
        window=ActionWindow(real, num_bins),
        norm_stats={},
        norm_stats_file=Path("config.json"),
    )


def _tiny_parts(
    meta: SuiteMeta,
    attention: Attention,
    sizes: Mapping[str, int | float],
    position_std: float | None = None,
) -> Parts:
    encode, words = word_encoder(meta.instructions)
    settings = tiny_settings(3 + len(words), meta.image_size, **sizes)
    backbone = OpenVLA(settings.towers, settings.language, settings.window, attention)
    if position_std is not None:
        for tower in backbone.vision_backbone.towers:
            nn.init.normal_(tower.pos_embed, std=position_std)
    facts = {"checkpoint": None, "statistics_sha256": None}
    return Parts(backbone, encode, vocabulary=words, facts=facts)


def _loaded_parts(
    meta: SuiteMeta,
    checkpoint: str,
    attention: Attention,
    *,
    unnorm_key: str | None,
    kind: Kind,
    range_epsilon: float,
    deferred: bool,
) -> Parts:
    folder = resolve_checkpoint(checkpoint, (*FETCHED, ".pt"))
    settings = read_settings(folder)
    name, entry = choose_statistics(
        settings.norm_stats, unnorm_key, source=str(settings.norm_stats_file)
    )
    action = Normalizer(kind, entry["action"], range_epsilon=range_epsilon)
    if len(action.offset) != meta.action_dim:
        raise ValueError(
            f"statistics {name!r} are of {len(action.offset)} action numbers, the suite "
            f"{meta.name!r} has {meta.action_dim}: {list(meta.action_names)}"
        )
    backbone, proprio = load_backbone(folder, settings, attention, deferred=deferred)
    llama = settings.window.vocabulary == LLAMA_VOCABULARY
    parts = Parts(
        backbone,
        llama_encoder(folder),
        end_id=LONE_SPACE if llama else None,
        action=action,
        facts={
            "checkpoint": str(checkpoint),
            "unnorm_key": name,
            "statistics_sha256": fingerprint(entry),
        },
    )
    head = extra_tensors(folder, "action_head")
    proprio = proprio or extra_tensors(folder, "proprio_projector")
    if head is not None:
        parts.extras["action_head"] = head
    if proprio:
        parts.extras["proprio_projector"] = proprio
        parts.state = Normalizer(
            kind, entry["proprio"], range_epsilon=range_epsilon, clip=True, name="proprio"
        )
    return parts


def make_parts(
    meta: SuiteMeta,
    attention: Attention,
    *,
    checkpoint: str | None = None,
    size: Literal["tiny"] | None = None,
    unnorm_key: str | None = None,
    statistics: Kind = "quantile",
    range_epsilon: float = 1e-8,
    deferred: bool = False,
    position_std: float | None = None,
    **sizes: int | float,
) -> Parts:
    """Load a checkpoint, or make a tiny network with random weights.

    Args:
        meta: the suite's constants.
        attention: see :class:`OpenVLA`.
        checkpoint: a published checkpoint's folder, or its hub id.
        size: ``"tiny"`` for random weights instead of a checkpoint.
        unnorm_key: which dataset's statistics; None takes the only one.
        statistics: which of them normalise (``"min_max"`` for ALOHA).
        range_epsilon: 1e-8 for OFT, 0 for OpenVLA.
        deferred: leave a checkpoint's network without storage, see ``policies/deferred.py``.
        position_std: standard deviation of a tiny model's fresh position embeddings; None: 0.02.
            Beside patches of its own scale a fresh tower soon knows where it looks.
        **sizes: of a tiny model, see :func:`tiny_settings`.

    Raises:
        ValueError: settings contradict each other, the checkpoint or the suite (both named).
        FileNotFoundError: the checkpoint is not there.
    """
    check_source(checkpoint, size)
    if checkpoint is None:
        return _tiny_parts(meta, attention, sizes, position_std)
    sizes |= {} if position_std is None else {"position_std": position_std}
    if sizes:
        raise ValueError(f"{sorted(sizes)} are no settings of a checkpoint; only of size=tiny")
    return _loaded_parts(
        meta,
        checkpoint,
        attention,
        unnorm_key=unnorm_key,
        kind=statistics,
        range_epsilon=range_epsilon,
        deferred=deferred,
    )
