"""pi0: PaliGemma prefix and Gemma action expert of transformers, as an RL policy.

The published network is split where RL splits it: the prefix (images, prompt) is the trunk that
FSDP2 shards and that runs once per decision; the expert (state, noisy actions, time) is the
replicated actor that runs once per denoising step on the trunk's keys and values. Gradients of the
actor reach the trunk through its features.

Source: Black et al. 2024, arXiv:2410.24164; ``transformers.PI0ForConditionalGeneration``.

Legend: ``B`` rows, ``K`` cameras, ``s`` side of the image, ``L`` prefix tokens, ``S`` state, ``H``
steps per chunk, ``A`` action dims; ``H'``, ``A'``, ``S'`` are the checkpoint's padded sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PI0Config, PI0ForConditionalGeneration
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from torchrl_vla.policies.deferred import fill, is_deferring, take_pending, wait_for
from torchrl_vla.policies.families import (
    PAD,
    PromptReader,
    check_source,
    check_vocabulary,
    finish_policy,
    load_network,
    prompt_table,
    read_pixel_scale,
    resolve_checkpoint,
)
from torchrl_vla.policies.flow import FlowSchedule
from torchrl_vla.policies.flow_policy import FlowActor, FlowDecode, FlowPolicy
from torchrl_vla.policies.images import ImagePipeline, PixelScale, to_pixels
from torchrl_vla.policies.instructions import build_vocabulary, tokenize
from torchrl_vla.policies.lora import LoraSettings
from torchrl_vla.policies.pi0_checkpoint import (
    normalizer,
    published_prompts,
    read_statistics,
)
from torchrl_vla.policies.policy import Precision
from torchrl_vla.policies.prefix import Prefix, PrefixLayout, PrefixValue, make_critics
from torchrl_vla.policies.statistics import ActionSpace, fingerprint
from torchrl_vla.schema import SuiteMeta

MODEL = "model."
"""Where the prefix lies in the published network."""
TINY_FIRST_WORD = 2
"""First word id of the tiny model; 0 is unused and 1 begins a prompt."""


class PI0Trunk(nn.Module):
    """The prefix and the state value; the module that FSDP2 shards.

    Args:
        network: the whole published network; its ``vlm`` moves in here.
        prompt_tokens: ``L``, image tokens included.
        attention_heads: of the value's pool.
        pixel_scale: of the checkpoint's image processor.
    """

    recomputable = False  # a layer that runs twice appends its keys and values twice

    def __init__(
        self,
        network: PI0ForConditionalGeneration,
        prompt_tokens: int,
        *,
        attention_heads: int = 8,
        pixel_scale: PixelScale | None = None,
    ) -> None:
        super().__init__()
        self.prefix = network.model
        self.max_state_dim = network.config.max_state_dim
        text = network.config.vlm_config.text_config
        self.layout = PrefixLayout(
            layers=text.num_hidden_layers,
            kv_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            tokens=prompt_tokens,
            width=text.hidden_size,
            state_dim=self.max_state_dim,
        )
        self.value_head = PrefixValue(text.hidden_size, self.max_state_dim, attention_heads)
        self.pixel_scale = PixelScale() if pixel_scale is None else pixel_scale

    @property
    def feature_dim(self) -> int:
        """Width of the features, see ``policies/prefix.py``."""
        return self.layout.feature_dim

    @staticmethod
    def shard_plan() -> list[type[nn.Module]]:
        """Return the layer types that FSDP2 gathers one at a time; the rest is the root."""
        return [GemmaDecoderLayer, SiglipEncoderLayer]

    def forward(
        self, image: Tensor, state: Tensor, words: Tensor, outputs: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """Encode images and prompt once.

        Args:
            image: uint8 ``[B, K, 3, s, s]``.
            state: float32 ``[B, S]``, normalised; zero-padded here.
            words: int64 ``[B, L]``: image tokens, prompt, right padding (-1).
            outputs: any of ``"features"`` ``[B, F]`` and ``"value"`` ``[B, 1]``, float32.

        Raises:
            ValueError: the state has more numbers than the checkpoint takes.
        """
        if state.shape[-1] > self.max_state_dim:
            raise ValueError(
                f"the state has {state.shape[-1]} numbers, the checkpoint takes at most "
                f"max_state_dim={self.max_state_dim}"
            )
        state = functional.pad(state, (0, self.max_state_dim - state.shape[-1]))
        prefix = self._encode(image, state, words)
        out: dict[str, Tensor] = {}
        if "features" in outputs:
            out["features"] = self.layout.pack(prefix)
        if "value" in outputs:
            out["value"] = self.value_head(prefix)
        return out

    def _encode(self, image: Tensor, state: Tensor, words: Tensor) -> Prefix:
        weight = self.prefix.vlm.get_input_embeddings().weight
        pixels = to_pixels(image, [self.pixel_scale], weight.dtype)
        mask = words != PAD
        cameras = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
        embeds = self.prefix.embed_prefix(words.clamp_min(0), pixels, cameras)
        out = self.prefix.vlm(
            inputs_embeds=embeds,
            attention_mask=mask.long(),
            position_ids=mask.long().cumsum(-1) - 1,
            # 0 means "prefix" to PaliGemma: full attention among all of it.
            token_type_ids=torch.zeros_like(words),
            use_cache=True,
        )
        pairs = tuple((layer.keys, layer.values) for layer in out.cache.layers)
        return Prefix(pairs, out.last_hidden_state, mask, state)


class PI0Expert(nn.Module):
    """The action expert as a velocity head on prefix features.

    Args:
        network: the published network without its ``vlm``.
        layout: of the features.
        real: ``(H, A)`` that is executed.
    """

    def __init__(
        self, network: PI0ForConditionalGeneration, layout: PrefixLayout, real: tuple[int, int]
    ) -> None:
        super().__init__()
        self.network, self.layout, self.real = network, layout, real
        self.shape = (network.config.chunk_size, network.config.max_action_dim)
        # The expert reads embeddings of actions; its own vocabulary is never used.
        self.network.model.dit.get_input_embeddings().requires_grad_(False)

    def context(self, features: Tensor) -> Prefix:
        """Take features ``[*, F]`` apart, batch dims flattened."""
        return self.layout.unpack(features.reshape(-1, features.shape[-1]))

    def velocity(self, context: Prefix, x: Tensor, t: Tensor) -> Tensor:
        """Return the velocity ``[*, H', A']`` at ``x`` and time ``t`` ``[*]``; float32."""
        dtype = self.network.action_out_proj.weight.dtype
        # A cache of its own for every step: the suffix is appended to it and thrown away.
        cache = DynamicCache([(k.to(dtype), v.to(dtype)) for k, v in context.keys_values])
        out = self.network(
            state=context.state.to(dtype),
            noise=x.reshape(-1, *self.shape).to(dtype),
            timestep=t.reshape(-1),
            attention_mask=context.mask.long(),
            cache=cache,
        )
        return out.logits.float().reshape(x.shape)


class PI0Policy(FlowPolicy):
    """A flow policy whose critics read the prefix."""

    def make_critics(self, number: int) -> list[nn.Module]:
        """Return ``number`` Q heads that pool the prefix, 2 to 10, see :class:`PrefixQHead`."""
        trunk = self.model.model
        attention_heads = trunk.value_head.pool.attention.num_heads
        return make_critics(
            trunk.layout, *self.actor.head.real, number, attention_heads=attention_heads
        )


def split(network: PI0ForConditionalGeneration) -> PI0ForConditionalGeneration:
    """Take the action expert out of ``network``; its ``model`` keeps the prefix.

    Of a network that waits for its weights, the expert, which every rank has whole, gets them now;
    the prefix goes on waiting.

    Returns:
        A network of the same class without a ``vlm``; both share no parameter.
    """
    with torch.device("meta"):
        expert = PI0ForConditionalGeneration(network.config)
    expert.model.vlm = None
    expert.model.dit = network.model.dit
    expert.embed_action_time = network.embed_action_time
    expert.action_out_proj = network.action_out_proj
    network.model.dit = None
    pending = take_pending(network)
    if pending is not None:
        inside = {name for name in pending.names if name.startswith(MODEL)}
        names = {name.removeprefix(MODEL): pending.names[name] for name in inside}
        wait_for(network.model, pending.folder, names)
        wait_for(expert, pending.folder, pending.names)
        fill(expert)
    return expert


def tiny_network(meta: SuiteMeta, chunk_size: int) -> PI0ForConditionalGeneration:
    """Return a random network of 0.2 M parameters for ``meta``; it runs on a CPU."""
    words = len(build_vocabulary(meta.instructions)) + 1
    gemma = {
        "model_type": "gemma",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 16,
        "image_size": meta.image_size,
        "vision_use_head": False,
    }
    vocabulary = TINY_FIRST_WORD + words
    text = gemma | {"hidden_size": 64, "intermediate_size": 128, "vocab_size": vocabulary}
    settings = PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "image_token_id": vocabulary - 1,
            "projection_dim": 64,
            "text_config": text,
            "vision_config": vision,
        },
        dit_config=gemma | {"hidden_size": 32, "intermediate_size": 64},
        chunk_size=chunk_size,
        max_state_dim=meta.state_dim,
        max_action_dim=meta.action_dim,
    )
    return PI0ForConditionalGeneration(settings)


def tiny_prompts(instructions: Sequence[str]) -> list[list[int]]:
    """Return the tiny network's word ids, each prompt begun by 1."""
    vocabulary = build_vocabulary(instructions)
    longest = max(len(text.split()) for text in instructions)
    rows = tokenize(instructions, vocabulary, longest).tolist()
    return [[1] + [word - 1 + TINY_FIRST_WORD for word in row if word] for row in rows]


def image_prompt(settings: PI0Config, cameras: int) -> list[int]:
    """Return the placeholder tokens of all cameras' patches."""
    vision = settings.vlm_config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    return [settings.vlm_config.image_token_id] * patches * cameras


def make_policy(
    meta: SuiteMeta,
    *,
    checkpoint: str | None = None,
    size: Literal["tiny"] | None = None,
    weights: str | None = None,
    head: Literal["flow"] = "flow",
    chunk_size: int = 4,
    steps: int = 10,
    noise_level: float = 0.5,
    eval_decode: FlowDecode = "ode",
    store_log_probs: bool = True,
    precision: Precision = "float32",
    attention_heads: int = 8,
    images: ImagePipeline | None = None,
    lora: LoraSettings | None = None,
) -> PI0Policy:
    """Build a pi0 policy for a suite.

    Args:
        meta: the suite's constants.
        checkpoint: folder or hub id of a transformers pi0 checkpoint, tokenizer included.
        size: ``"tiny"`` for a small random network instead.
        weights: safetensors file that training wrote (``policy.safetensors`` of a run).
        head: pi0 has one.
        chunk_size: ``H``, at most the checkpoint's own chunk.
        steps: denoising steps ``K``.
        noise_level: of the Flow-SDE, see ``flow.FlowSchedule``.
        eval_decode, store_log_probs: see ``flow_policy.FlowPolicy``.
        precision: ``"bfloat16"``: autocast of trunk and expert, in actors, learner, evaluation.
        attention_heads: of the value's pool.
        images, lora: pipeline from camera to network; adapters (the rest is frozen then).

    Raises:
        FileNotFoundError: no such checkpoint, or no tokenizer in it.
        ValueError: a setting is outside its range, or checkpoint and suite do not fit.
    """
    if head != "flow":
        raise ValueError(f"policy.head is {head!r}; pi0 acts by its flow head: policy.head=flow")
    deferred = is_deferring() and weights is None
    network, prompts, scale, entry = _source(meta, checkpoint, size, chunk_size, deferred=deferred)
    table = prompt_table([image_prompt(network.config, len(meta.cameras)) + ids for ids in prompts])
    trunk = PI0Trunk(network, table.shape[1], attention_heads=attention_heads, pixel_scale=scale)
    reader = PromptReader(
        trunk,
        table,
        image_size=network.config.vlm_config.vision_config.image_size,
        pipeline=images,
        state_normalizer=normalizer(entry, "state", meta.state_dim),
        precision=precision,
        vocabulary=build_vocabulary(meta.instructions) if size else (),
        facts={
            "checkpoint": checkpoint,
            "statistics_sha256": fingerprint(entry) if entry else None,
        },
    )
    actor = FlowActor(
        PI0Expert(split(network), trunk.layout, (chunk_size, meta.action_dim)),
        FlowSchedule(steps, noise_level),
        ActionSpace(normalizer(entry, "actions", meta.action_dim)),
        precision=precision,
    )
    policy = PI0Policy(reader, actor, eval_decode=eval_decode, store_log_probs=store_log_probs)
    return finish_policy(policy, checkpoint, weights, lora)


def _source(
    meta: SuiteMeta,
    checkpoint: str | None,
    size: str | None,
    chunk_size: int,
    *,
    deferred: bool,
) -> tuple[PI0ForConditionalGeneration, list[list[int]], PixelScale, Mapping[str, Any]]:
    """Return network, prompts, pixel scale and statistics, from a folder or tiny and random."""
    check_source(checkpoint, size)
    if checkpoint is None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; a chunk has at least 1 step")
        return tiny_network(meta, chunk_size), tiny_prompts(meta.instructions), PixelScale(), {}
    folder = resolve_checkpoint(checkpoint)
    network = load_network(PI0ForConditionalGeneration, folder, deferred=deferred)
    limits = {
        "chunk_size": (chunk_size, network.config.chunk_size),
        "the suite's action dims": (meta.action_dim, network.config.max_action_dim),
        "the suite's state": (meta.state_dim, network.config.max_state_dim),
    }
    for name, (value, limit) in limits.items():
        if not 1 <= value <= limit:
            raise ValueError(f"{name}: {value}, the checkpoint {folder} takes 1 to {limit}")
    prompts = published_prompts(folder, meta.instructions)
    check_vocabulary(prompts, network.config.vlm_config.text_config.vocab_size, folder)
    return network, prompts, read_pixel_scale(folder), read_statistics(folder)
