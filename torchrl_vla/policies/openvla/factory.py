"""Builds OpenVLA policies: from a published checkpoint, or tiny with random weights.

Shape legend: ``H`` chunk steps, ``A`` action dims, ``V`` bins, ``S`` state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from torchrl_vla.policies.action_tokens import ActionWindow, TailBins
from torchrl_vla.policies.heads import GaussianHead, chunk_actor
from torchrl_vla.policies.images import ImagePipeline
from torchrl_vla.policies.openvla.backbone import Attention, OpenVLA
from torchrl_vla.policies.openvla.checkpoint import (
    Settings,
    check_fit,
    extra_tensors,
    find_folder,
    load_backbone,
    read_settings,
)
from torchrl_vla.policies.openvla.model import Decoding, OpenVLAModel
from torchrl_vla.policies.openvla.policy import (
    LM_HEAD,
    AutoregressivePolicy,
    PromptReader,
    RegressionPolicy,
    TailTokenPolicy,
)
from torchrl_vla.policies.openvla.prompts import (
    LLAMA_VOCABULARY,
    LONE_SPACE,
    Encode,
    llama_encoder,
    prompt_table,
    word_encoder,
)
from torchrl_vla.policies.openvla.towers import dinov2_sizes, siglip_sizes
from torchrl_vla.policies.policy import Decode, GaussianPolicy, Precision
from torchrl_vla.policies.statistics import (
    ActionSpace,
    Kind,
    LiberoGripper,
    Normalizer,
    choose_statistics,
    fingerprint,
)
from torchrl_vla.policies.weights import load_weights
from torchrl_vla.schema import SuiteMeta

Head = Literal["tokens", "l1", "gaussian"]
MAX_IMAGES = 3
DEFAULT_ATTENTION: dict[Decoding, Attention] = {
    "parallel": "bidirectional",
    "autoregressive": "causal",
}
"""OFT was trained with full attention, OpenVLA with a causal mask; see ``docs/models.md``."""


@dataclass
class _Parts:
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
            "vocab_size": real + 64,  # like the real one: columns behind the vocabulary
            "pad_token_id": real,
        },
        window=ActionWindow(real, num_bins),
        norm_stats={},
        norm_stats_file=Path("config.json"),
    )


def _tiny_parts(meta: SuiteMeta, attention: Attention, num_bins: int, sizes: dict) -> _Parts:
    encode, words = word_encoder(meta.instructions)
    settings = tiny_settings(3 + len(words), meta.image_size, num_bins=num_bins, **sizes)
    backbone = OpenVLA(settings.towers, settings.language, settings.window, attention)
    return _Parts(backbone, encode, vocabulary=words, facts={"checkpoint": None})


def _loaded_parts(
    meta: SuiteMeta,
    checkpoint: str,
    attention: Attention,
    *,
    unnorm_key: str | None,
    kind: Kind,
    range_epsilon: float,
) -> _Parts:
    folder = find_folder(checkpoint)
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
    backbone, proprio = load_backbone(folder, settings, attention)
    llama = settings.window.vocabulary == LLAMA_VOCABULARY
    parts = _Parts(
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


def _check_source(checkpoint: str | None, size: str | None, sized: bool) -> None:
    if (checkpoint is None) == (size is None):
        raise ValueError(
            f"policy.checkpoint={checkpoint} and policy.size={size}: give a folder or a hub id, "
            "or policy.size=tiny for random weights"
        )
    if size not in (None, "tiny"):
        raise ValueError(f"size is {size!r}; the only size with random weights is 'tiny'")
    if checkpoint is not None and sized:
        raise ValueError("num_bins, width, layers, ... are a checkpoint's own; use size=tiny")


def make_policy(
    meta: SuiteMeta,
    *,
    checkpoint: str | None = None,
    size: Literal["tiny"] | None = None,
    decoding: Decoding = "parallel",
    attention: Attention | None = None,
    head: Head = "tokens",
    weights: str | None = None,
    chunk_size: int = 8,
    temperature: float = 1.0,
    eval_decode: Decode = "argmax",
    images: ImagePipeline | None = None,
    cameras: Sequence[str] | None = None,
    unnorm_key: str | None = None,
    statistics: Kind = "quantile",
    range_epsilon: float = 1e-8,
    gripper: Literal["libero"] | None = None,
    state_token: bool | None = None,
    precision: Precision = "float32",
    store_log_probs: bool = False,
    num_bins: int = 256,
    **sizes: int,
) -> TailTokenPolicy | RegressionPolicy | GaussianPolicy:
    """Build an OpenVLA policy for a suite.

    Args:
        meta: the suite's constants.
        checkpoint: a published checkpoint's folder, or its hub id.
        size: ``"tiny"`` for random weights instead of a checkpoint.
        decoding: ``"parallel"`` (OFT) or ``"autoregressive"`` (OpenVLA).
        attention: ``"bidirectional"`` or ``"causal"``; None for the decoding's own.
        head: ``"tokens"``, ``"l1"`` or ``"gaussian"`` (on mean action states, for SAC).
        weights: a safetensors file of an earlier run, loaded on top.
        chunk_size: ``H``.
        temperature: softmax temperature of the token heads.
        eval_decode: see the policy classes.
        images: what happens to images; plain resize if None.
        cameras: names of the suite's cameras that are read, in the model's order; None for all.
        unnorm_key: which dataset's statistics; None takes the only one.
        statistics: which of them normalise (``"min_max"`` for ALOHA).
        range_epsilon: 1e-8 for OFT, 0 for OpenVLA.
        gripper: ``"libero"`` converts the last action from 0..1 to the simulator's signs.
        state_token: whether the state is read; None: where the checkpoint can (tiny: yes).
        precision: of the model's passes, see ``Observer``; weights are float32.
        store_log_probs: see ``GaussianPolicy``; the token policies always store them.
        num_bins: ``V`` of a tiny model.
        **sizes: of a tiny model, see :func:`tiny_settings`.

    Raises:
        ValueError: settings contradict each other, the checkpoint or the suite (both named).
        FileNotFoundError: the checkpoint is not there.
    """
    mode = attention or DEFAULT_ATTENTION.get(decoding, "causal")
    _check_source(checkpoint, size, bool(sizes) or num_bins != 256)
    if checkpoint is None:
        parts = _tiny_parts(meta, mode, num_bins, sizes)
    else:
        parts = _loaded_parts(
            meta,
            checkpoint,
            mode,
            unnorm_key=unnorm_key,
            kind=statistics,
            range_epsilon=range_epsilon,
        )
    model = _model(meta, parts, decoding, head, chunk_size, state_token)
    reads_state = model.proprio_projector is not None
    space = ActionSpace(parts.action, LiberoGripper() if gripper == "libero" else None)
    bins = TailBins(parts.backbone.window.num_bins, space)
    reader = PromptReader(
        model,
        prompt_table(meta.instructions, parts.encode, parts.backbone.pad_id, parts.end_id),
        images=images or ImagePipeline(),
        cameras=_camera_rows(meta, cameras),
        bins=bins,
        state=parts.state if reads_state else None,
        vocabulary=parts.vocabulary,
        precision=precision,
        facts=parts.facts,
    )
    policy = _policy(reader, head, temperature, eval_decode, store_log_probs)
    if weights is not None:
        load_weights(Path(weights), vocabulary=reader.vocabulary, **policy.parts())
    return policy


def _model(
    meta: SuiteMeta,
    parts: _Parts,
    decoding: Decoding,
    head: Head,
    chunk_size: int,
    state_token: bool | None,
) -> OpenVLAModel:
    tiny = parts.facts["checkpoint"] is None
    known = "proprio_projector" in parts.extras
    read_state = (tiny or known) if state_token is None else state_token
    for wanted, name in ((read_state, "proprio_projector"), (head == "l1", "action_head")):
        if wanted and not tiny and name not in parts.extras:
            raise ValueError(
                f"{parts.facts['checkpoint']} has no {name}--*.pt, which "
                f"{'state_token=true' if name.startswith('p') else 'head=l1'} needs"
            )
    model = OpenVLAModel(
        parts.backbone,
        state_dim=meta.state_dim,
        action_dim=meta.action_dim,
        chunk_size=chunk_size,
        decoding=decoding,
        read_state=read_state,
        l1_head=head == "l1",
    )
    for name, stored in parts.extras.items():
        part = getattr(model, name)
        if part is not None:
            check_fit(stored, part, f"{name}--*.pt (suite {meta.name!r})")
            part.load_state_dict(stored)
    return model


def _camera_rows(meta: SuiteMeta, names: Sequence[str] | None) -> list[int]:
    chosen = list(meta.cameras if names is None else names)
    unknown = [name for name in chosen if name not in meta.cameras]
    if unknown or not 1 <= len(chosen) <= MAX_IMAGES:
        raise ValueError(
            f"cameras are {chosen}; choose 1..{MAX_IMAGES} of the suite's {list(meta.cameras)}"
        )
    return [meta.cameras.index(name) for name in chosen]


def _policy(
    reader: PromptReader,
    head: Head,
    temperature: float,
    eval_decode: Decode,
    store_log_probs: bool,
) -> TailTokenPolicy | RegressionPolicy | GaussianPolicy:
    model, bins = reader.model, reader.bins
    if head == "tokens":
        kind = TailTokenPolicy if model.decoding == "parallel" else AutoregressivePolicy
        return kind(reader, bins, temperature=temperature, eval_decode=eval_decode)
    if head == "l1":
        return RegressionPolicy(reader, bins.space)
    if head != "gaussian":
        raise ValueError(f"head is {head!r}; use 'tokens', 'l1' or 'gaussian'")
    if model.decoding != "parallel" or bins.space.normalizer or bins.space.gripper:
        raise ValueError(
            "head=gaussian acts in the simulator's units from one parallel pass; use "
            "decoding=parallel, gripper=null and no checkpoint statistics"
        )
    gaussian = chunk_actor(GaussianHead(model.feature_dim, model.chunk_size, model.action_dim))
    policy = GaussianPolicy(
        reader, gaussian, eval_decode=eval_decode, store_log_probs=store_log_probs
    )
    policy.idle = (LM_HEAD,)
    return policy
