"""The networks of the policy families called by hand: the yardstick of ``benchmarks/policies.py``.

Each class takes the shortest way that works for equal prompts: no TensorDict, padding or checks.

Legend: ``B`` rows, ``T`` action numbers, ``V`` bins, ``L`` prompt ids, ``K`` denoising steps.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from torchrl_vla import schema
from torchrl_vla.policies.flow import PATH
from torchrl_vla.policies.images import to_pixels
from torchrl_vla.policies.openvla.model import OpenVLAModel
from torchrl_vla.policies.policy import draw_bins


class Bare(Protocol):
    """One side of a comparison."""

    def act(self, td: TensorDictBase) -> Tensor:
        """Choose actions; return their log-probs."""

    def loss(self, td: TensorDictBase) -> Tensor:
        """Return negative log-likelihood of stored actions plus squared value, differentiable."""


class BareTokens:
    """A token policy in one pass: subclasses give logits ``[B, T, V]`` and value.

    Args:
        model: shared with, or a copy of, the policy's.
        words: ``[B, L]`` without pads.
    """

    def __init__(self, model: nn.Module, words: Tensor) -> None:
        self.model, self.words = model, words

    def forward(self, td: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return logits ``[B, T, V]`` and value ``[B, 1]``."""
        raise NotImplementedError

    def act(self, td: TensorDictBase) -> Tensor:
        """Return log-probs of sampled tokens ``[B, T]``."""
        log_probs = self.forward(td)[0].log_softmax(-1)
        return log_probs.gather(-1, draw_bins(log_probs.exp())[..., None])[..., 0]

    def loss(self, td: TensorDictBase) -> Tensor:
        """Return cross-entropy of the stored tokens plus squared value."""
        logits, value = self.forward(td)
        target = td[schema.TOKENS].flatten()
        return functional.cross_entropy(logits.flatten(0, 1), target) + value.square().mean()


class BareTiny(BareTokens):
    """The tiny VLA."""

    def forward(self, td: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Call the module itself."""
        out = self.model(td[schema.IMAGE], td[schema.STATE], self.words, ("logits", "value"))
        bins = self.model.token_head.linear.out_features // td[schema.TOKENS].shape[-1]
        return out["logits"].unflatten(-1, (-1, bins)).flatten(1, 2), out["value"]


class BareVLM(BareTokens):
    """A SmolVLM with state token, queries and token head; one image block behind the first id."""

    def forward(self, td: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Lay the sequence out by hand and run the text model."""
        model, base = self.model, self.model.backbone.model
        embed = base.get_input_embeddings()
        images = int((self.words[0] == model.backbone.config.image_token_id).sum())
        pixels = to_pixels(td[schema.IMAGE], [model.pixel_scale], embed.weight.dtype)
        seen = torch.cat(list(base.get_image_features(pixels).pooler_output))
        parts = [
            embed(self.words[:, :1]),
            seen.reshape(len(td), images, -1),
            embed(self.words[:, 1 + images :]),
            model.state_in(td[schema.STATE])[:, None],
            model.queries.expand(len(td), -1, -1),
        ]
        hidden = base.text_model(inputs_embeds=torch.cat(parts, 1), use_cache=False)
        read = hidden.last_hidden_state[:, -len(model.queries) :]
        dims = td[schema.TOKENS].shape[-1]
        logits = model.token_head(read[:, 1:]).unflatten(-1, (dims, -1)).flatten(1, 2)
        return logits, model.value_head(read[:, 0])


class BareOpenVLA(BareTokens):
    """OpenVLA-OFT's single bidirectional pass."""

    def __init__(self, model: OpenVLAModel, words: Tensor) -> None:
        super().__init__(model, words)
        self.llama = model.backbone.language_model.model
        self.rows = model.backbone.window.columns

    def prefix(self, td: TensorDictBase) -> Tensor:
        """Return the embeddings up to the last prompt token."""
        backbone = self.model.backbone
        pixels = backbone.vision_backbone.normalise(td[schema.IMAGE])
        patches = backbone.projector(backbone.vision_backbone(pixels))
        words = self.llama.embed_tokens(self.words)
        state = self.model.proprio_projector
        extra = [] if state is None else [state(td[schema.STATE])]
        return torch.cat([words[:, :1], patches, *extra, words[:, 1:]], dim=1)

    def head(self, hidden: Tensor) -> Tensor:
        """Return window logits."""
        weight = self.model.backbone.language_model.lm_head.weight
        return functional.linear(hidden, weight[self.rows])

    def forward(self, td: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return logits and value of all action tokens at once."""
        prefix, number = self.prefix(td), self.model.num_tokens
        stop = self.llama.embed_tokens.weight[self.model.backbone.stop_id]
        zeros = stop.new_zeros(len(td), number, len(stop))
        embeds = torch.cat([prefix, zeros, stop.expand(len(td), 1, -1)], dim=1)
        mask = torch.ones(len(td), 1, 1, embeds.shape[1], dtype=torch.bool)
        out = self.llama(inputs_embeds=embeds, attention_mask=mask, use_cache=False)
        hidden = out.last_hidden_state[:, -2 - number : -2]
        return self.head(hidden), self.model.value_head(hidden[:, 0])


class BareAutoregressive(BareOpenVLA):
    """OpenVLA: one causal pass over given tokens; acting token by token with a KV cache."""

    def forward(self, td: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return logits and value of one causal pass over the stored tokens."""
        ids = td[schema.TOKENS].flatten(1) + self.model.backbone.window.first
        embeds = torch.cat([self.prefix(td), self.llama.embed_tokens(ids[:, :-1])], dim=1)
        out = self.llama(inputs_embeds=embeds, use_cache=False)
        hidden = out.last_hidden_state[:, -ids.shape[1] :]
        return self.head(hidden), self.model.value_head(hidden[:, 0])

    def act(self, td: TensorDictBase) -> Tensor:
        """Return log-probs of tokens sampled one after another."""
        out = self.llama(inputs_embeds=self.prefix(td), use_cache=True)
        first, chosen = self.model.backbone.window.first, []
        for step in range(self.model.num_tokens):
            hidden = out.last_hidden_state[:, -1]
            if step == 0:
                self.model.value_head(hidden)
            log_probs = self.head(hidden).log_softmax(-1)
            token = draw_bins(log_probs.exp())[..., None]
            chosen.append(log_probs.gather(-1, token))
            if step < self.model.num_tokens - 1:
                embeds = self.llama.embed_tokens(token + first)
                out = self.llama(inputs_embeds=embeds, cache=out.cache, use_cache=True)
        return torch.cat(chosen, dim=-1)


class BarePI0:
    """pi0: prefix once, then Flow-SDE steps of the expert.

    Args:
        trunk: prefix and value head.
        expert: the action expert.
        words: ``[B, L]`` without pads.
        schedule: denoising steps ``K`` and noise.
    """

    def __init__(self, trunk: nn.Module, expert: nn.Module, words: Tensor, schedule) -> None:
        self.trunk, self.expert, self.words, self.schedule = trunk, expert, words, schedule

    def prefix(self, td: TensorDictBase) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Return keys and values, and the state's value."""
        vlm, mask = self.trunk.prefix.vlm, torch.ones_like(self.words)
        pixels = to_pixels(td[schema.IMAGE], [self.trunk.pixel_scale], torch.float32)
        cameras = torch.ones(pixels.shape[:2], dtype=torch.bool)
        out = vlm(
            inputs_embeds=self.trunk.prefix.embed_prefix(self.words, pixels, cameras),
            attention_mask=mask,
            position_ids=mask.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(self.words),
            use_cache=True,
        )
        head = self.trunk.value_head
        query = head.pool.query.expand(len(td), -1, -1)
        hidden = out.last_hidden_state
        pooled = head.pool.attention(query, hidden, hidden, need_weights=False)[0][:, 0]
        value = head.linear(torch.cat([pooled, td[schema.STATE]], -1))
        return [(layer.keys, layer.values) for layer in out.cache.layers], value

    def walk(
        self, td: TensorDictBase, pairs: list[tuple[Tensor, Tensor]], path: Tensor | None
    ) -> Tensor:
        """Return the log-prob of each number of a path that is given, or drawn, ``[B, H, A]``."""
        mask = torch.ones_like(self.words)
        x = torch.randn(len(td), *self.expert.shape) if path is None else path[:, 0]
        total = torch.zeros(())
        for step in range(self.schedule.steps):
            t, dt = self.schedule.time(step), self.schedule.dt
            sigma, std = self.schedule.sigma(step), self.schedule.std(step)
            velocity = self.expert.network(
                state=td[schema.STATE],
                noise=x,
                timestep=torch.full((len(td),), t),
                attention_mask=mask,
                cache=DynamicCache(pairs),
            ).logits
            drift = velocity + sigma**2 / (2 * t) * (x + (1 - t) * velocity)
            mean = x - dt * drift
            x = mean + std * torch.randn_like(mean) if path is None else path[:, step + 1]
            error = (x - mean) / std
            total = total - error.square() / 2 - math.log(std) - math.log(2 * math.pi) / 2
        return total

    def act(self, td: TensorDictBase) -> Tensor:
        """Return the log-probs of a fresh path."""
        pairs, _ = self.prefix(td)
        return self.walk(td, pairs, None)

    def loss(self, td: TensorDictBase) -> Tensor:
        """Return negative log-likelihood of the stored path per number, plus squared value."""
        pairs, value = self.prefix(td)
        return value.square().mean() - self.walk(td, pairs, td[PATH]).mean()
