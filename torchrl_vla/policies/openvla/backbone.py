"""The network of OpenVLA and OpenVLA-OFT: vision towers, projector, Llama, and the token layout.

The state dict is that of the published checkpoints, key for key. Heads that other files hold are in
``model.py``.

Shape legend: ``B`` batch, ``N`` images, ``P`` patches per image, ``L`` prompt ids, ``T`` action
tokens (``H * A``), ``Q`` positions of a sequence, ``D`` width of the language model, ``V`` bins.

Layout of a sequence (OFT)::

    <s> | N * P patches | state token, if any | prompt ids 1.. | T zero vectors | </s> | pads

Source: Kim et al. 2024, "OpenVLA", arXiv:2406.09246; Kim et al. 2025, "Fine-Tuning VLA Models",
arXiv:2502.19645 (parallel decoding, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from torchrl_vla.policies.action_tokens import ActionWindow
from torchrl_vla.policies.openvla.towers import Projector, TowerSizes, VisionBackbone

Attention = Literal["bidirectional", "causal"]
ATTENTION: tuple[Attention, ...] = ("bidirectional", "causal")


class TokenSequence(NamedTuple):
    """What the language model reads."""

    embeds: Tensor
    """``[B, Q, D]``, pads last."""
    real: Tensor
    """bool ``[B, Q]``, False for pads."""
    first: Tensor
    """int64 ``[B]``: position of the last prompt id, which predicts action token 0."""


def pads_last(ids: Tensor, pad_id: int) -> Tensor:
    """Move the pads of each row behind its other ids, ``[B, L]`` to the same."""
    order = (ids == pad_id).to(torch.uint8).argsort(dim=1, stable=True)
    return ids.gather(1, order)


class OpenVLA(nn.Module):
    """Images and a prompt to hidden states at the action positions.

    Args:
        towers: one or two vision towers.
        language: arguments of transformers' ``LlamaConfig``; its defaults are Llama-2-7B with an
            RMSNorm epsilon of 1e-6, as the checkpoints were trained.
        window: where the action bins lie in the vocabulary.
        attention: ``"bidirectional"`` (every token sees every other, the stop token included) or
            ``"causal"``; see ``docs/models.md`` for which checkpoint needs which.

    Raises:
        ValueError: unknown attention, or the vocabulary does not hold the window.
    """

    def __init__(
        self,
        towers: Sequence[TowerSizes],
        language: Mapping[str, Any],
        window: ActionWindow,
        attention: Attention,
    ) -> None:
        super().__init__()
        llama = LlamaConfig(**language, attn_implementation="sdpa")
        if window.vocabulary > llama.vocab_size:
            raise ValueError(
                f"the vocabulary has {window.vocabulary} real ids, but the language model only "
                f"{llama.vocab_size} columns; check pad_to_multiple_of in config.json"
            )
        if llama.pad_token_id is None:
            raise ValueError("text_config.pad_token_id is missing: prompts cannot be padded")
        self.window = window
        self.attention = attention
        self.pad_id, self.stop_id = int(llama.pad_token_id), int(llama.eos_token_id)
        self.vision_backbone = VisionBackbone(towers)
        self.projector = Projector(
            self.vision_backbone.width, llama.hidden_size, fused=len(towers) == 2
        )
        self.language_model = LlamaForCausalLM(llama)

    @property
    def attention(self) -> Attention:
        """Which tokens a token sees; may be changed at any time."""
        return self._attention

    @attention.setter
    def attention(self, mode: Attention) -> None:
        if mode not in ATTENTION:
            raise ValueError(f"attention is {mode!r}; use 'bidirectional' or 'causal'")
        self._attention = mode

    @property
    def width(self) -> int:
        """Width of the hidden states (``D``)."""
        return self.language_model.config.hidden_size

    def encode(self, pixels: Tensor) -> Tensor:
        """Map pixels ``[B, N, 3 * towers, s, s]`` to patch embeddings ``[B, N * P, D]``."""
        return self.projector(self.vision_backbone(pixels))

    def prompt(
        self, patches: Tensor, words: Tensor, state: Tensor | None, tail: Tensor
    ) -> TokenSequence:
        """Lay out a sequence.

        Args:
            patches: ``[B, N * P, D]``.
            words: int64 ``[B, L]``, first real id ``<s>``; pads anywhere.
            state: ``[B, 1, D]`` proprioception, or ``None``.
            tail: ``[B, K, D]`` what follows the prompt.

        Returns:
            The sequence of ``Q = 1 + N * P + (1) + L - 1 + K`` positions. Pads move behind the
            tail, so real tokens have the positions they have without padding.
        """
        words = pads_last(words, self.pad_id)
        present = words != self.pad_id
        ids = self.language_model.model.embed_tokens(words)
        real = torch.cat([present[:, 1:], present.new_ones(tail.shape[:2])], dim=1)
        order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
        rest = torch.cat([ids[:, 1:], tail], dim=1)
        rest = rest.gather(1, order[..., None].expand_as(rest))
        front = [ids[:, :1], patches] + ([] if state is None else [state])
        length = sum(part.shape[1] for part in front)
        return TokenSequence(
            torch.cat([*front, rest], dim=1),
            torch.cat([real.new_ones(len(words), length), real.gather(1, order)], dim=1),
            present.sum(1) + length - 2,
        )

    def placeholders(self, batch: int, number: int) -> Tensor:
        """Return OFT's tail: ``number`` zero vectors and the stop token, ``[B, number + 1, D]``."""
        stop = self.language_model.model.embed_tokens.weight[self.stop_id]
        zeros = stop.new_zeros(batch, number, len(stop))
        return torch.cat([zeros, stop.expand(batch, 1, -1)], dim=1)

    def hidden(self, sequence: TokenSequence) -> Tensor:
        """Return final hidden states (after the last norm) of all positions, ``[B, Q, D]``."""
        # With a causal mask nothing real sees the pads, which come last.
        mask = sequence.real[:, None, None] if self.attention == "bidirectional" else None
        return self.language_model.model(
            inputs_embeds=sequence.embeds, attention_mask=mask, use_cache=False
        ).last_hidden_state

    def at_actions(self, hidden: Tensor, first: Tensor, number: int) -> Tensor:
        """Pick the states that predict action tokens 0..number-1, ``[B, number, D]``."""
        index = first[:, None] + torch.arange(number, device=first.device)
        return hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1]))

    def action_logits(self, hidden: Tensor) -> Tensor:
        """Map ``[*, D]`` to logits of the action bins ``[*, V]``; no other column is computed."""
        rows = self.language_model.lm_head.weight[self.window.columns]
        return functional.linear(hidden, rows)

    def parallel(self, patches: Tensor, words: Tensor, state: Tensor | None, number: int) -> Tensor:
        """Return the states of all ``number`` action tokens from one pass, ``[B, number, D]``."""
        sequence = self.prompt(patches, words, state, self.placeholders(len(words), number))
        return self.at_actions(self.hidden(sequence), sequence.first, number)

    def teacher_forced(
        self, patches: Tensor, words: Tensor, state: Tensor | None, tokens: Tensor
    ) -> Tensor:
        """Return the states that predict given action tokens one after another.

        Args:
            patches: ``[B, N * P, D]``.
            words: int64 ``[B, L]``.
            state: ``[B, 1, D]`` or ``None``.
            tokens: int64 ``[B, T]`` bins.

        Returns:
            ``[B, T, D]``; state ``t`` has seen the tokens before ``t``.
        """
        tail = self.language_model.model.embed_tokens(self.window.ids(tokens[:, :-1]))
        sequence = self.prompt(patches, words, state, tail)
        return self.at_actions(self.hidden(sequence), sequence.first, tokens.shape[1])

    def generate(
        self,
        patches: Tensor,
        words: Tensor,
        state: Tensor | None,
        number: int,
        choose: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Choose ``number`` tokens one after another; the prefix is computed once (KV cache).

        Args:
            patches: ``[B, N * P, D]``.
            words: int64 ``[B, L]``.
            state: ``[B, 1, D]`` or ``None``.
            number: tokens to choose.
            choose: maps hidden states ``[B, D]`` to vocabulary ids ``[B]``.

        Returns:
            ids int64 ``[B, number]`` and the states they were chosen from ``[B, number, D]``.
        """
        llama = self.language_model.model
        embeds, real, first = self.prompt(
            patches, words, state, patches.new_zeros(len(words), 0, self.width)
        )
        out = llama(inputs_embeds=embeds, use_cache=True)
        states = [self.at_actions(out.last_hidden_state, first, 1)[:, 0]]
        ids = [choose(states[0])]
        for step in range(1, number):
            # Rows have prompts of different length: pads stay in the cache and are hidden.
            real = torch.cat([real, real.new_ones(len(real), 1)], dim=1)
            out = llama(
                inputs_embeds=llama.embed_tokens(ids[-1])[:, None],
                attention_mask=real[:, None, None],
                position_ids=(first + step)[:, None],
                cache=out.cache,
                use_cache=True,
            )
            states.append(out.last_hidden_state[:, 0])
            ids.append(choose(states[-1]))
        return torch.stack(ids, dim=1), torch.stack(states, dim=1)
