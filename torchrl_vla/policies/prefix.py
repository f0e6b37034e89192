"""The prefix of a VLA with an action expert: computed once per decision, read by everybody.

A trunk returns one flat feature vector per state. Here that vector *is* the prefix: keys and values
of every layer (for the expert), hidden states with their mask (for value and critics), and the
state. So it travels through replay, losses and batch dims like any other features.

Legend: ``*`` batch dims, ``B`` rows, ``L`` prefix tokens, ``d`` width of the hidden states, ``S``
state, ``H`` steps per chunk, ``A`` action dims, ``F`` features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchrl_vla.policies.heads import mlp


class Prefix(NamedTuple):
    """A prefix taken apart; every tensor is float32."""

    keys_values: tuple[tuple[Tensor, Tensor], ...]
    """Per layer ``[*, kv heads, L, head dim]`` twice."""
    hidden: Tensor
    """``[*, L, d]``, after the last layer."""
    mask: Tensor
    """``[*, L]`` bool, True for real tokens."""
    state: Tensor
    """``[*, S]``, normalised."""


@dataclass(frozen=True)
class PrefixLayout:
    """Where things lie in a feature vector."""

    layers: int
    kv_heads: int
    head_dim: int
    tokens: int
    """``L``."""
    width: int
    """``d``."""
    state_dim: int
    """``S``."""

    @property
    def _cache_shape(self) -> tuple[int, ...]:
        return (self.layers, 2, self.kv_heads, self.tokens, self.head_dim)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Numbers of the cache, the hidden states, the mask and the state."""
        cache = 2 * self.layers * self.kv_heads * self.tokens * self.head_dim
        return cache, self.tokens * self.width, self.tokens, self.state_dim

    @property
    def feature_dim(self) -> int:
        """``F``."""
        return sum(self.sizes)

    def pack(self, prefix: Prefix) -> Tensor:
        """Lay a prefix out as features ``[B, F]`` float32."""
        cache = torch.stack([torch.stack(pair, 1) for pair in prefix.keys_values], 1)
        parts = (cache, prefix.hidden, prefix.mask, prefix.state)
        return torch.cat([part.flatten(1).float() for part in parts], dim=-1)

    def unpack(self, features: Tensor) -> Prefix:
        """Take features ``[*, F]`` apart; the parts are views.

        Raises:
            ValueError: the features have another width.
        """
        if features.shape[-1] != self.feature_dim:
            raise ValueError(
                f"features have {features.shape[-1]} numbers, this layout {self.feature_dim}: "
                "they come from another policy or another set of instructions"
            )
        cache, hidden, mask, state = features.split(self.sizes, dim=-1)
        layers = cache.unflatten(-1, self._cache_shape).movedim(features.ndim - 1, 0)
        pairs = tuple(tuple(layer.unbind(features.ndim - 1)) for layer in layers)
        return Prefix(pairs, hidden.unflatten(-1, (self.tokens, self.width)), mask > 0.5, state)


class PrefixPool(nn.Module):
    """Pools hidden states by the attention of one learned query, ``[*, L, d]`` → ``[*, d]``.

    Args:
        width: ``d``.
        heads: attention heads, a divisor of ``d``.

    Raises:
        ValueError: ``heads`` does not divide ``width``.
    """

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"attention heads is {heads}; it must divide the width {width}")
        self.query = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Pool the states that ``mask`` ``[*, L]`` says are real."""
        flat, real = hidden.flatten(0, -3), mask.flatten(0, -2)
        query = self.query.expand(len(flat), -1, -1)
        pooled, _ = self.attention(query, flat, flat, key_padding_mask=~real, need_weights=False)
        return pooled.reshape(*hidden.shape[:-2], hidden.shape[-1])


class PrefixValue(nn.Module):
    """State value from pooled hidden states and the state; 0 at the start.

    Args:
        width: ``d``.
        state_dim: ``S``.
        heads: attention heads of the pool.
    """

    def __init__(self, width: int, state_dim: int, heads: int = 8) -> None:
        super().__init__()
        self.pool = PrefixPool(width, heads)
        self.linear = nn.Linear(width + state_dim, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, prefix: Prefix) -> Tensor:
        """Return ``[*, 1]`` float32."""
        pooled = self.pool(prefix.hidden.to(self.linear.weight.dtype), prefix.mask)
        state = prefix.state.to(pooled.dtype)
        return self.linear(torch.cat([pooled, state], -1)).float()


class PrefixQHead(nn.Module):
    """Value of a chunk in a state: learned query attention over the prefix, state, chunk → MLP.

    Differs: the reference system shares one pool among all heads; a pool per head keeps the members
    of an ensemble independent, and TorchRL's losses copy the members' parameters anyway.

    Args:
        layout: of the features.
        chunk_size: ``H``.
        action_dim: ``A``.
        hidden: width of the MLP.
        attention_heads: of the pool.
    """

    def __init__(
        self,
        layout: PrefixLayout,
        chunk_size: int,
        action_dim: int,
        hidden: int = 256,
        attention_heads: int = 8,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.pool = PrefixPool(layout.width, attention_heads)
        self.norm = nn.LayerNorm(layout.width + layout.state_dim)
        numbers = layout.width + layout.state_dim + chunk_size * action_dim
        self.net = mlp(numbers, hidden, 1)

    def forward(self, features: Tensor, chunk: Tensor) -> Tensor:
        """Map features ``[*, F]`` and chunks ``[*, H, A]`` to ``[*, 1]``.

        The chunk may have more leading dims (several candidates per state): a prefix is pooled
        once.
        """
        prefix = self.layout.unpack(features)
        pooled = self.pool(prefix.hidden, prefix.mask)
        seen = self.norm(torch.cat([pooled, prefix.state], dim=-1))
        seen = seen.expand(*chunk.shape[:-2], -1)
        return self.net(torch.cat([seen, chunk.flatten(-2)], dim=-1))


def make_critics(
    layout: PrefixLayout, chunk_size: int, action_dim: int, heads: int = 2, **sizes: int
) -> list[PrefixQHead]:
    """Return an ensemble of independently initialised Q heads.

    Args:
        layout: of the features.
        chunk_size: ``H``.
        action_dim: ``A``.
        heads: members, 2 to 10.
        **sizes: ``hidden`` and ``attention_heads`` of :class:`PrefixQHead`.

    Raises:
        ValueError: the number of heads is outside its range.
    """
    if not 2 <= heads <= 10:
        raise ValueError(f"critic heads is {heads}; use 2 to 10")
    return [PrefixQHead(layout, chunk_size, action_dim, **sizes) for _ in range(heads)]
