"""Heads that sit on a trunk's hidden states: tokens, Gaussian chunk, value, Q.

Heads are small plain modules; a trunk may be sharded, heads that a functional loss owns may not be
(see ``policies/shard.py``).
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor

from torchrl_vla import schema
from torchrl_vla.policies.distributions import ChunkTanhNormal


def mlp(in_dim: int, hidden: int, out_dim: int, *, layers: int = 2) -> nn.Sequential:
    """Return ``layers`` × (Linear, LayerNorm, SiLU) and a Linear; LayerNorm keeps Q bounded."""
    parts: list[nn.Module] = []
    for width in [in_dim] + [hidden] * (layers - 1):
        parts += [nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.SiLU()]
    return nn.Sequential(*parts, nn.Linear(hidden, out_dim))


class TokenHead(nn.Module):
    """Action-bin logits from one hidden state per chunk step.

    Args:
        width: hidden size of the trunk.
        action_dim: ``A``.
        num_bins: ``V``.
    """

    def __init__(self, width: int, action_dim: int, num_bins: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, action_dim * num_bins)
        # Near-uniform at the start: the first policy is as random as the bins allow.
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[B, H, d]`` to logits ``[B, H, A * V]``; the policy splits the last axis."""
        return self.linear(hidden)


class GaussianHead(nn.Module):
    """Location and scale of a tanh-Gaussian over the whole chunk, from pooled features.

    Args:
        feature_dim: ``F``, width of the features.
        chunk_size: ``H``.
        action_dim: ``A``.
        hidden: width of the hidden layers.
        log_std_range: bounds of the log standard deviation (before tanh).
    """

    def __init__(
        self,
        feature_dim: int,
        chunk_size: int,
        action_dim: int,
        hidden: int = 256,
        log_std_range: tuple[float, float] = (-4.0, -1.5),
    ) -> None:
        super().__init__()
        self.net = mlp(feature_dim, hidden, 2 * chunk_size * action_dim)
        self.shape, self.real = (chunk_size, 2 * action_dim), (chunk_size, action_dim)
        self.log_std_range = log_std_range

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map ``[*, F]`` to ``loc`` and ``scale``, each ``[*, H, A]``; scale > 0."""
        loc, raw = self.net(features).unflatten(-1, self.shape).chunk(2, dim=-1)
        low, high = self.log_std_range
        log_std = low + 0.5 * (high - low) * (torch.tanh(raw) + 1.0)
        return loc, log_std.exp()


class QHead(nn.Module):
    """Value of an action chunk in a state, from pooled features.

    Features pass a narrow normalised bottleneck first (as in DrQ, arXiv:2004.13649): beside
    hundreds of features the few numbers of a chunk would be a per cent of the first layer's input,
    and Q would take very long to notice what was done.

    Args:
        feature_dim: ``F``.
        chunk_size: ``H``.
        action_dim: ``A``.
        hidden: width of the hidden layers.
        bottleneck: width of the feature projection.
    """

    def __init__(
        self,
        feature_dim: int,
        chunk_size: int,
        action_dim: int,
        hidden: int = 256,
        bottleneck: int = 64,
    ) -> None:
        super().__init__()
        self.project = nn.Sequential(
            nn.Linear(feature_dim, bottleneck), nn.LayerNorm(bottleneck), nn.Tanh()
        )
        self.net = mlp(bottleneck + chunk_size * action_dim, hidden, 1)

    def forward(self, features: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
        """Map ``[*, F]`` and ``[*, H, A]`` to ``[*, 1]``.

        The chunk may have more leading dims (several candidates per state): a state is projected
        once.
        """
        state = self.project(features).expand(*chunk.shape[:-2], -1)
        return self.net(torch.cat([state, chunk.flatten(-2)], dim=-1))


class ChunkParameters(TensorDictModuleBase):
    """A Gaussian head on TensorDicts: ``"features"`` ``[*, F]`` → ``"loc"``, ``"scale"``.

    ``TensorDictModule`` would do, but per output it pays about as much as a layer of the head.

    Args:
        module: the head.
    """

    in_keys = ("features",)
    out_keys = ("loc", "scale")

    def __init__(self, module: GaussianHead) -> None:
        super().__init__()
        self.module = module

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loc`` and ``scale`` ``[*, H, A]`` into ``tensordict``."""
        loc, scale = self.module(tensordict.get("features"))
        return tensordict.set("loc", loc).set("scale", scale)


class ChunkActor(ProbabilisticActor):
    """TorchRL's actor, whose distribution comes straight from the head.

    A loss asks for it several times per update; key dispatch and keyword building would cost about
    as much as a layer of the head.
    """

    def get_dist(self, tensordict: TensorDictBase) -> ChunkTanhNormal:
        """Return the distribution at ``"features"``.

        As TorchRL's it writes ``loc`` and ``scale``; where they are written already, the head does
        not run again.
        """
        loc = tensordict.get("loc", None)
        if loc is None:
            loc = self[0](tensordict).get("loc")
        return ChunkTanhNormal(loc, tensordict.get("scale"))

    def noiseless(self, tensordict: TensorDictBase) -> Tensor:
        """Return the chunk without exploration noise ``[*, H, A]``: the squashed location."""
        loc = tensordict.get("loc", None)
        return (self[0](tensordict).get("loc") if loc is None else loc).tanh()

    def cloning_error(self, tensordict: TensorDictBase, chunk: Tensor) -> Tensor:
        """Return the squared error of the squashed location, of each number, ``[*, H, A]``."""
        return (self.noiseless(tensordict) - chunk).square()


def chunk_actor(head: GaussianHead) -> ChunkActor:
    """Wrap ``head`` as a TorchRL actor: features ``[*, F]`` → chunk ``[*, H, A]`` in (-1, 1).

    The chunk is one event (two event dims), so its log-prob is a sum over ``H`` and ``A`` and has
    shape ``[*]``.
    """
    return ChunkActor(
        ChunkParameters(head),
        in_keys=["loc", "scale"],
        out_keys=[schema.CHUNK],
        distribution_class=ChunkTanhNormal,
        default_interaction_type=InteractionType.RANDOM,
    )
