"""OpenVLA with the heads that a policy reads; the module that FSDP2 shards.

Shape legend: ``B`` batch, ``N`` images, ``S`` state, ``H`` chunk steps, ``A`` action dims,
``T = H * A`` tokens in step order, ``V`` bins, ``D`` width, ``L`` prompt ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from torchrl_vla.policies.heads import mlp
from torchrl_vla.policies.openvla.backbone import OpenVLA
from torchrl_vla.policies.openvla.towers import VisionBlock

Decoding = Literal["parallel", "autoregressive"]


class StateProjector(nn.Module):
    """Proprioception to one token (OFT's proprio projector; published key names).

    Args:
        state_dim: ``S``.
        width: ``D``.
    """

    def __init__(self, state_dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, state: Tensor) -> Tensor:
        """Map normalised state ``[B, S]`` to ``[B, 1, D]``."""
        state = state.to(self.fc1.weight.dtype)
        return self.fc2(functional.gelu(self.fc1(state)))[:, None]


class _ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class _Regressor(nn.Module):
    def __init__(self, inputs: int, width: int, out: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(width) for _ in range(2))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1Head(nn.Module):
    """OFT's regression head: one action per chunk step (published key names).

    Args:
        width: ``D``.
        action_dim: ``A``.
    """

    def __init__(self, width: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = _Regressor(action_dim * width, width, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[B, T, D]`` to normalised actions ``[B, H, A]``; unbounded."""
        return self.model(hidden.unflatten(1, (-1, self.action_dim)).flatten(2))


class OpenVLAModel(nn.Module):
    """Trunk and heads; one call computes whatever is asked for from one pass.

    The value is read where the first action token is predicted: the last prompt token has seen
    images, state and instruction in either attention mode, and no action in the causal one.

    Args:
        backbone: the published network.
        state_dim: ``S``.
        action_dim: ``A``.
        chunk_size: ``H``.
        decoding: ``"parallel"`` (OFT: all tokens from one pass) or ``"autoregressive"`` (OpenVLA:
            one after another, causal).
        read_state: whether the state enters as a token.
        l1_head: whether there is a regression head.

    Raises:
        ValueError: autoregressive decoding with bidirectional attention, or with an L1 head.
    """

    recomputable = True

    def __init__(
        self,
        backbone: OpenVLA,
        *,
        state_dim: int,
        action_dim: int,
        chunk_size: int,
        decoding: Decoding = "parallel",
        read_state: bool = False,
        l1_head: bool = False,
    ) -> None:
        super().__init__()
        if decoding not in ("parallel", "autoregressive"):
            raise ValueError(f"decoding is {decoding!r}; use 'parallel' or 'autoregressive'")
        if decoding == "autoregressive" and backbone.attention != "causal":
            raise ValueError(
                "attention=bidirectional would show every action token the ones after it; "
                "decoding=autoregressive needs attention=causal"
            )
        if decoding == "autoregressive" and l1_head:
            raise ValueError("head=l1 reads all action positions at once: use decoding=parallel")
        width = backbone.width
        self.decoding, self.chunk_size, self.action_dim = decoding, chunk_size, action_dim
        self.feature_dim = width + state_dim
        self.backbone = backbone
        self.proprio_projector = StateProjector(state_dim, width) if read_state else None
        self.action_head = L1Head(width, action_dim) if l1_head else None
        self.value_head = mlp(width, min(width, 512), 1, layers=1)
        nn.init.zeros_(self.value_head[-1].weight)
        nn.init.zeros_(self.value_head[-1].bias)

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.backbone.language_model.model.layers

    @staticmethod
    def shard_plan() -> list[type[nn.Module]]:
        """Return the layer types that FSDP2 gathers one at a time; the rest is the root."""
        return [LlamaDecoderLayer, VisionBlock]

    @property
    def num_tokens(self) -> int:
        """Action tokens of a chunk (``T``)."""
        return self.chunk_size * self.action_dim

    def forward(
        self,
        image: Tensor,
        state: Tensor,
        words: Tensor,
        outputs: tuple[str, ...] = ("logits",),
        *,
        tokens: Tensor | None = None,
        choose: Callable[[Tensor], Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Run the trunk once and the asked-for heads on it.

        Args:
            image: uint8 ``[B, N, 3, s, s]``, already through the image pipeline.
            state: float32 ``[B, S]``, already normalised.
            words: int64 ``[B, L]`` prompt ids, pads anywhere.
            outputs: any of ``"logits"`` ``[B, H, A * V]``, ``"tokens"`` ``[B, H, A]`` (chosen by
                ``choose``), ``"actions"`` ``[B, H, A]`` (L1 head), ``"value"`` ``[B, 1]``,
                ``"features"`` ``[B, D + S]`` (mean over the action positions, and the state).
            tokens: int64 ``[B, T]`` bins, which autoregressive logits are conditioned on.
            choose: maps logits ``[B, V]`` to bins ``[B]``, for ``"tokens"``.

        Returns:
            The asked-for tensors, float32.

        Raises:
            ValueError: autoregressive logits without ``tokens``.
        """
        patches = self.backbone.encode(self.backbone.vision_backbone.normalise(image))
        token = None if self.proprio_projector is None else self.proprio_projector(state)
        out: dict[str, Tensor] = {}
        if "tokens" in outputs:
            out["tokens"], hidden = self._generate(patches, words, token, choose)
        elif self.decoding == "parallel":
            hidden = self.backbone.parallel(patches, words, token, self.num_tokens)
        else:
            hidden = self._given(patches, words, token, tokens, outputs)
        if "logits" in outputs:
            logits = self.backbone.action_logits(hidden).float()
            out["logits"] = logits.unflatten(1, (self.chunk_size, -1)).flatten(2)
        if "actions" in outputs:
            out["actions"] = self.action_head(hidden).float()
        if "value" in outputs:
            out["value"] = self.value_head(hidden[:, 0]).float()
        if "features" in outputs:
            out["features"] = torch.cat([hidden.float().mean(1), state], dim=-1)
        # FSDP2 hooks the outputs of a sharded module, which must not be views.
        return {key: value.clone() for key, value in out.items()}

    def _generate(
        self,
        patches: Tensor,
        words: Tensor,
        state: Tensor | None,
        choose: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        window = self.backbone.window
        ids, hidden = self.backbone.generate(
            patches,
            words,
            state,
            self.num_tokens,
            lambda last: choose(self.backbone.action_logits(last).float()) + window.first,
        )
        return (ids - window.first).unflatten(1, (self.chunk_size, -1)), hidden

    def _given(
        self,
        patches: Tensor,
        words: Tensor,
        state: Tensor | None,
        tokens: Tensor | None,
        outputs: tuple[str, ...],
    ) -> Tensor:
        if tokens is None:
            if set(outputs) != {"value"}:
                raise ValueError(
                    f"{list(outputs)} of an autoregressive policy depend on the action tokens; "
                    "store them with the decision, or give the chunk they encode"
                )
            tokens = words.new_zeros(len(words), 1)
        return self.backbone.teacher_forced(patches, words, state, tokens)
