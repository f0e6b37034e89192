"""Any vision-language model of transformers as a VLA: prompt, state token, queries, our heads.

The sequence is ``[prompt with images] [state token] [1 + H query tokens]``. Which hidden states
feed the heads is a setting (``reads``, ``layer``); the language-model head is never multiplied.

Legend: ``B`` rows, ``K`` cameras, ``s`` side of the image, ``L`` prompt tokens, ``S`` state, ``H``
steps per chunk, ``A`` action dims, ``V`` bins, ``d`` width, ``F`` features.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, SmolVLMConfig

from torchrl_vla.policies.deferred import first_rows, is_deferring
from torchrl_vla.policies.families import (
    HEADS,
    PAD,
    PromptReader,
    check_source,
    check_vocabulary,
    finish_policy,
    load_network,
    load_tokenizer,
    prompt_table,
    read_pixel_scale,
    resolve_checkpoint,
    start_export,
)
from torchrl_vla.policies.flow import FlowHead, FlowSchedule
from torchrl_vla.policies.flow_policy import FlowActor, FlowDecode, FlowPolicy
from torchrl_vla.policies.heads import GaussianHead, TokenHead, chunk_actor
from torchrl_vla.policies.images import ImagePipeline, PixelScale, to_pixels
from torchrl_vla.policies.instructions import build_vocabulary, tokenize
from torchrl_vla.policies.lora import LoraSettings, merged_state_dict
from torchrl_vla.policies.policy import Decode, GaussianPolicy, Precision, TokenPolicy
from torchrl_vla.policies.vlm_inputs import (
    encode_images,
    image_tokens,
    positions,
    prompts_of,
    repeated_layers,
)
from torchrl_vla.schema import SuiteMeta

Reads = Literal["queries", "last", "mean"]
NETWORK = "model.model.backbone."
"""Where the published network lies in a policy."""
SCALE_ROWS = 4096
"""Rows of the word embedding whose spread the queries start with."""
TINY_FIRST_WORD = 3
"""First word id of the tiny model, after padding, begin and image token."""


class VLMTrunk(nn.Module):
    """A published VLM with a state token, queries and heads; the module that FSDP2 shards.

    Args:
        backbone: an ``AutoModelForImageTextToText``.
        state_dim: ``S``.
        action_dim: ``A``.
        chunk_size: ``H``.
        num_bins: ``V`` of the token head; None leaves that head out.
        reads: which hidden states feed the heads. ``"queries"``: of one learned query token per
            chunk step, and one for the value; ``"last"``: of the state token, the last that the
            VLM itself would see; ``"mean"``: averaged over prompt, images and state.
        layer: -1: after the last layer and its norm; otherwise after that many layers, no norm.
        pixel_scale: of the checkpoint's image processor.

    Raises:
        ValueError: unknown ``reads``, or a layer that does not exist.
    """

    recomputable = True

    def __init__(
        self,
        backbone: nn.Module,
        *,
        state_dim: int,
        action_dim: int,
        chunk_size: int,
        num_bins: int | None = None,
        reads: Reads = "queries",
        layer: int = -1,
        pixel_scale: PixelScale | None = None,
    ) -> None:
        super().__init__()
        text = backbone.config.get_text_config()
        if reads not in ("queries", "last", "mean"):
            raise ValueError(f"policy.reads is {reads!r}; use 'queries', 'last' or 'mean'")
        if layer != -1 and not 1 <= layer < text.num_hidden_layers:
            raise ValueError(
                f"policy.layer is {layer}; use -1 (after the last layer and its norm) or 1 to "
                f"{text.num_hidden_layers - 1}"
            )
        width = text.hidden_size
        self.backbone, self.reads, self.layer = backbone, reads, layer
        self.chunk_size = chunk_size
        self.pixel_scale = PixelScale() if pixel_scale is None else pixel_scale
        self.state_in = nn.Sequential(
            nn.Linear(state_dim, width), nn.GELU(), nn.Linear(width, width)
        )
        # Queries (or, for pooled reads, what tells the chunk's steps apart); as large as words are.
        words = first_rows(backbone, backbone.get_input_embeddings().weight, SCALE_ROWS)
        scale = torch.ones(()) if words is None else words.float().std()
        scale = scale if scale > 0 else torch.ones(())
        self.queries = nn.Parameter(scale * torch.randn(1 + chunk_size, width))
        self.value_head = nn.Linear(width, 1)
        self.token_head = None if num_bins is None else TokenHead(width, action_dim, num_bins)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        read = 1 + chunk_size if reads == "queries" else 1
        self.feature_dim = read * width + state_dim

    def shard_plan(self) -> list[type[nn.Module]]:
        """Return the layer types that FSDP2 gathers one at a time; the rest is the root."""
        return repeated_layers(self.backbone)

    def forward(
        self, image: Tensor, state: Tensor, words: Tensor, outputs: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """Run the VLM once and the asked-for heads on it.

        Args:
            image: uint8 ``[B, K, 3, s, s]``.
            state: float32 ``[B, S]``.
            words: int64 ``[B, L]``: prompt with image tokens, right padding (-1).
            outputs: any of ``"logits"`` ``[B, H, A * V]``, ``"value"`` ``[B, 1]``, ``"features"``
                ``[B, F]``, float32.
        """
        hidden, mask = self._run(image, state, words)
        if self.reads == "queries":
            read = hidden[:, -len(self.queries) :]
        elif self.reads == "last":
            read = hidden[:, -1:]
        else:
            weight = mask.to(hidden.dtype).unsqueeze(-1)
            read = ((hidden * weight).sum(1) / weight.sum(1)).unsqueeze(1)
        steps = read if self.reads == "queries" else read + self.queries.to(read.dtype)
        out: dict[str, Tensor] = {}
        if "logits" in outputs:
            out["logits"] = self.token_head(steps[:, 1:]).float()
        if "value" in outputs:
            out["value"] = self.value_head(steps[:, 0]).float()
        if "features" in outputs:
            out["features"] = torch.cat([read.flatten(1).float(), state], dim=-1)
        # FSDP2 hooks the outputs of a sharded module, which must not be views.
        return {key: value.clone() for key, value in out.items()}

    def _run(self, image: Tensor, state: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and mask of the whole sequence, ``[B, L + 1 (+ 1 + H), ...]``."""
        base, settings = self.backbone.model, self.backbone.config
        embed = self.backbone.get_input_embeddings()
        pixels = to_pixels(image, [self.pixel_scale], embed.weight.dtype)
        is_image = words == settings.image_token_id
        embeds = embed(words.masked_fill(is_image | (words == PAD), 0))
        features = encode_images(base, settings, pixels).to(embeds.dtype)
        embeds = embeds.masked_scatter(is_image.unsqueeze(-1), features)
        own = [self.state_in(state.to(embeds.dtype)).unsqueeze(1)]
        if self.reads == "queries":
            own.append(self.queries.to(embeds.dtype).expand(len(words), -1, -1))
        embeds = torch.cat([embeds, *(part.to(embeds.dtype) for part in own)], dim=1)
        added = words.new_zeros(len(words), embeds.shape[1] - words.shape[1])
        mask = torch.cat([words != PAD, added == 0], dim=1)
        extra: dict[str, Any] = {}
        if settings.model_type == "paligemma":
            # 0: the prompt, full attention as in its training; 1: causal.
            extra["token_type_ids"] = torch.cat([torch.zeros_like(words), added + 1], dim=1)
        if self.layer != -1:
            extra["output_hidden_states"] = True
        out = base(
            inputs_embeds=embeds,
            attention_mask=mask.long(),
            position_ids=positions(settings, torch.cat([words, added], dim=1), mask, image),
            use_cache=False,
            **extra,
        )
        hidden = out.last_hidden_state if self.layer == -1 else out.hidden_states[self.layer]
        return hidden, mask


def tiny_backbone(meta: SuiteMeta) -> nn.Module:
    """Return a random network of SmolVLM's class, 0.2 M parameters; it runs on a CPU."""
    settings = SmolVLMConfig(
        text_config={
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": TINY_FIRST_WORD + len(build_vocabulary(meta.instructions)),
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 8,
            "image_size": meta.image_size,
        },
        scale_factor=2,
        image_token_id=2,
        pad_token_id=0,
    )
    return AutoModelForImageTextToText.from_config(settings)


def tiny_prompts(meta: SuiteMeta, tokens: int) -> list[list[int]]:
    """Return the tiny network's prompts: begin, images, words."""
    vocabulary = build_vocabulary(meta.instructions)
    longest = max(len(text.split()) for text in meta.instructions)
    rows = tokenize(meta.instructions, vocabulary, longest).tolist()
    start = [1] + [2] * tokens * len(meta.cameras)
    return [start + [word - 1 + TINY_FIRST_WORD for word in row if word] for row in rows]


def make_policy(
    meta: SuiteMeta,
    *,
    checkpoint: str | None = None,
    size: Literal["tiny"] | None = None,
    weights: str | None = None,
    head: Literal["tokens", "gaussian", "flow"] = "tokens",
    reads: Reads = "queries",
    layer: int = -1,
    prompt: str | None = None,
    image_size: int | None = None,
    chunk_size: int = 4,
    num_bins: int = 256,
    temperature: float = 1.0,
    steps: int = 10,
    noise_level: float = 0.5,
    eval_decode: Decode | FlowDecode = "mean",
    store_log_probs: bool = True,
    precision: Precision = "float32",
    images: ImagePipeline | None = None,
    lora: LoraSettings | None = None,
) -> TokenPolicy | GaussianPolicy | FlowPolicy:
    """Build a policy on any VLM.

    Args:
        meta: the suite's constants.
        checkpoint, size, weights: folder or hub id with tokenizer, or ``"tiny"``: a small random
            SmolVLM; a run's ``policy.safetensors`` on top.
        head, reads, layer: what acts, and which hidden states feed it, see :class:`VLMTrunk`.
        prompt: template with ``{images}`` and ``{instruction}``; None: the chat template.
        chunk_size, num_bins, temperature: ``H``; ``V`` and temperature of the token head.
        steps, noise_level: of the flow head. eval_decode, store_log_probs: see the policies.
        image_size, images, precision, lora: ``s`` (None: the tower's), pipeline, arithmetic, LoRA.

    Raises:
        FileNotFoundError: no such checkpoint, or no tokenizer in it.
        ValueError: a setting is outside its range, or checkpoint and suite do not fit.
    """
    if head not in ("tokens", "gaussian", "flow"):
        raise ValueError(f"policy.head is {head!r}; use 'tokens', 'gaussian' or 'flow'")
    deferred = is_deferring() and weights is None
    backbone, table, scale, side = _source(
        meta, checkpoint, size, prompt, image_size, deferred=deferred
    )
    sizes = {"chunk_size": chunk_size, "action_dim": meta.action_dim}
    bins = {"num_bins": num_bins} if head == "tokens" else {}
    read = {"reads": reads, "layer": layer, "pixel_scale": scale}
    trunk = VLMTrunk(backbone, state_dim=meta.state_dim, **sizes, **bins, **read)
    words = build_vocabulary(meta.instructions) if size else ()
    given = {"image_size": side, "pipeline": images, "precision": precision, "vocabulary": words}
    facts = {"checkpoint": checkpoint, "statistics_sha256": None}
    facts |= {"reads": reads, "layer": layer, "prompt": prompt}
    reader = PromptReader(trunk, table, facts=facts, **given)
    decode = {"eval_decode": eval_decode}
    if head == "tokens":
        policy = TokenPolicy(reader, temperature=temperature, **sizes, **bins, **decode)
    elif head == "gaussian":
        actor = chunk_actor(GaussianHead(trunk.feature_dim, **sizes))
        policy = GaussianPolicy(reader, actor, store_log_probs=store_log_probs, **decode)
    else:
        flow = FlowHead(trunk.feature_dim, **sizes)
        actor = FlowActor(flow, FlowSchedule(steps, noise_level), precision=precision)
        policy = FlowPolicy(reader, actor, store_log_probs=store_log_probs, **decode)
    return finish_policy(policy, checkpoint, weights, lora)


def _source(
    meta: SuiteMeta,
    checkpoint: str | None,
    size: str | None,
    prompt: str | None,
    image_size: int | None,
    *,
    deferred: bool,
) -> tuple[nn.Module, Tensor, PixelScale, int]:
    """Return backbone, prompt table, pixel scale and image side."""
    check_source(checkpoint, size)
    if checkpoint is None:
        backbone = tiny_backbone(meta)
        prompts = tiny_prompts(meta, image_tokens(backbone, meta.image_size))
        return backbone, prompt_table(prompts), PixelScale(), meta.image_size
    folder = resolve_checkpoint(checkpoint)
    backbone = load_network(AutoModelForImageTextToText, folder, deferred=deferred)
    side = image_size or getattr(backbone.config.vision_config, "image_size", None)
    if side is None:
        raise ValueError(
            f"the vision tower of {folder} takes images of any size: set policy.image_size"
        )
    prompts = prompts_of(
        load_tokenizer(folder),
        backbone.config,
        meta.instructions,
        cameras=len(meta.cameras),
        tokens=image_tokens(backbone, side),
        template=prompt,
    )
    texts = [[i for i in ids if i != backbone.config.image_token_id] for ids in prompts]
    check_vocabulary(texts, backbone.config.get_text_config().vocab_size, folder)
    return backbone, prompt_table(prompts), read_pixel_scale(folder), side


def export(policy: nn.Module, folder: Path, *, source: Path) -> None:
    """Write ``policy`` as a checkpoint folder that transformers and :func:`make_policy` load.

    Adapters are merged; our heads go to ``heads.safetensors``. Loading gives the same bits.

    Args:
        policy: unsharded.
        folder: new or empty.
        source: checkpoint folder whose tokenizer and processor files are copied.

    Raises:
        FileExistsError: ``folder`` holds files.
    """
    start_export(folder, source)
    state = merged_state_dict(policy)
    network = {k.removeprefix(NETWORK): v for k, v in state.items() if k.startswith(NETWORK)}
    heads = {k: v.cpu().contiguous() for k, v in state.items() if not k.startswith(NETWORK)}
    policy.model.model.backbone.save_pretrained(folder, state_dict=network)
    save_file(heads, folder / HEADS)
