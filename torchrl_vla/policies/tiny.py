"""The tiny VLA: image + instruction words + proprioception → action chunk, 0.5 M parameters.

It exists so that the whole system learns a robot task on a laptop; it has the shape of a large VLA
(vision tokens, language tokens, a state token, a value token, action queries, one transformer) and
none of its knowledge. Its "pre-training" is a regression on privileged simulator labels
(``algo=ground``), named as such.

Keypoint tokens (spatial softmax) rather than a token grid: on 64-pixel images of small objects they
ground an instruction in a minute of CPU time, where a patch grid did not in several.

Shape legend: ``B`` batch, ``K`` cameras, ``P`` keypoints, ``L`` words, ``S`` state, ``H`` chunk
steps, ``A`` action dims, ``V`` bins, ``d`` width, ``F`` features.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from torchrl_vla.policies.heads import GaussianHead, TokenHead, chunk_actor
from torchrl_vla.policies.instructions import build_vocabulary
from torchrl_vla.policies.policy import (
    Decode,
    GaussianPolicy,
    Observer,
    Precision,
    TokenPolicy,
)
from torchrl_vla.policies.weights import load_weights
from torchrl_vla.schema import SuiteMeta

SHIPPED_WEIGHTS = Path(__file__).parent / "weights" / "tiny.safetensors"
"""Start weights that come with the package; their recipe is in the file's header."""


class KeypointTokens(nn.Module):
    """Camera images → ``P`` tokens per camera, each a learned point of interest.

    Spatial softmax after Finn et al. 2016 (arXiv:1509.06113, eq. 3), with a learned temperature,
    the peak probability as a confidence, and random Fourier features of the coordinates.
    """

    def __init__(self, width: int, keypoints: int = 16, fourier: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 4, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 48, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(48, keypoints, 1),
        )
        # PyTorch's default shrinks the signal at every layer, and flat maps have no keypoints.
        for layer in self.stem:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
        self.temperature = nn.Parameter(torch.tensor([3.0]))
        self.register_buffer("frequencies", 3.0 * torch.randn(2, fourier))
        self.embed = nn.Linear(3 + 2 * fourier, width)
        self.slot = nn.Parameter(0.1 * torch.randn(keypoints, width))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Map uint8 ``[B, K, 3, h, w]`` to ``[B, K * P, d]``."""
        batch, cameras = image.shape[:2]
        weight = self.stem[0].weight
        # In place and channels last: on a CPU the stem is a third of a forward pass, and each saves
        # one pass over the images.
        pixels = image.flatten(0, 1).to(weight.dtype, copy=True).div_(127.5).sub_(1.0)
        maps = self.stem(pixels.contiguous(memory_format=torch.channels_last))
        rows, cols = maps.shape[-2:]
        probs = (maps.flatten(2) * self.temperature).softmax(-1)
        y = torch.linspace(-1, 1, rows, dtype=probs.dtype, device=probs.device)
        x = torch.linspace(-1, 1, cols, dtype=probs.dtype, device=probs.device)
        grid = torch.stack([x.repeat(rows), y.repeat_interleave(cols)])
        point = functional.linear(probs, grid)  # [B*K, P, 2]
        phase = math.pi * point @ self.frequencies.to(point.dtype)
        peak = probs.amax(-1, keepdim=True)
        tokens = self.embed(torch.cat([point, peak, phase.sin(), phase.cos()], dim=-1)) + self.slot
        return tokens.unflatten(0, (batch, cameras)).flatten(1, 2)


class Block(nn.Module):
    """Pre-norm transformer block with full attention.

    ``num_out`` restricts the output to the last tokens of the sequence: the final block only pays
    for the tokens that a head reads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, num_out: int | None = None
    ) -> torch.Tensor:
        """Map ``[B, L, d]`` to ``[B, num_out or L, d]``; ``mask`` is bool ``[B, 1, 1, L]``."""
        y = self.norm1(x)
        if num_out is not None:
            x, queries = x[:, -num_out:], y[:, -num_out:]
        else:
            queries = y
        query = self.query(queries).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.key_value(y).chunk(2, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(functional.relu(self.up(self.norm2(x))))


class TinyModel(nn.Module):
    """Trunk and heads; the module that FSDP2 shards (``blocks`` first, then this root).

    One call computes whatever is asked for from one pass of the trunk, so policy and value never
    run it twice.

    Args:
        vocabulary_size: number of words, padding excluded.
        state_dim: ``S``.
        action_dim: ``A``.
        chunk_size: ``H``.
        num_bins: ``V``.
        cameras: ``K``.
        max_words: ``L``.
        width: ``d``.
        layers: transformer blocks.
        heads: attention heads.
        keypoints: ``P`` per camera.
    """

    recomputable = True

    def __init__(
        self,
        *,
        vocabulary_size: int,
        state_dim: int,
        action_dim: int,
        chunk_size: int,
        num_bins: int = 64,
        cameras: int = 1,
        max_words: int = 8,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        keypoints: int = 16,
    ) -> None:
        super().__init__()
        self.chunk_size = chunk_size
        self.feature_dim = (1 + chunk_size) * width + state_dim
        self.vision = KeypointTokens(width, keypoints)
        self.camera = nn.Parameter(0.02 * torch.randn(cameras, 1, width))
        self.words = nn.Embedding(vocabulary_size + 1, width, padding_idx=0)
        self.positions = nn.Parameter(0.1 * torch.randn(max_words, width))
        self.state_in = nn.Sequential(
            nn.Linear(state_dim, width), nn.ReLU(), nn.Linear(width, width)
        )
        self.queries = nn.Parameter(0.1 * torch.randn(1 + chunk_size, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.token_head = TokenHead(width, action_dim, num_bins)
        self.value_head = nn.Linear(width, 1)
        self.ground_head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 6))
        self.register_buffer("state_mean", torch.zeros(state_dim))
        self.register_buffer("state_std", torch.ones(state_dim))
        nn.init.normal_(self.words.weight, std=0.5)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @staticmethod
    def shard_plan() -> list[type[nn.Module]]:
        """Return the layer types that FSDP2 gathers one at a time."""
        return [Block]

    def forward(
        self,
        image: torch.Tensor,
        state: torch.Tensor,
        words: torch.Tensor,
        outputs: tuple[str, ...] = ("logits",),
    ) -> dict[str, torch.Tensor]:
        """Run the trunk once and the asked-for heads on it.

        Args:
            image: uint8 ``[B, K, 3, h, w]``.
            state: float32 ``[B, S]``, SI units.
            words: int64 ``[B, L]``, 0 is padding.
            outputs: any of ``"logits"`` ``[B, H, A * V]``, ``"value"`` ``[B, 1]``,
                ``"features"`` ``[B, F]``, ``"position"`` ``[B, 1 + H, 6]`` (the labels of
                ``data/grounding.py``, one estimate per output token).

        Returns:
            The asked-for tensors, float32 where they feed a distribution or a value.
        """
        state = (state - self.state_mean) / self.state_std
        hidden = self._trunk(image, state, words)
        out: dict[str, torch.Tensor] = {}
        if "logits" in outputs:
            out["logits"] = self.token_head(hidden[:, 1:]).float()
        if "value" in outputs:
            out["value"] = self.value_head(hidden[:, 0]).float()
        if "features" in outputs:
            out["features"] = torch.cat([hidden.flatten(1), state], dim=-1)
        if "position" in outputs:
            out["position"] = self.ground_head(hidden).float()
        # FSDP2 hooks the outputs of a sharded module, which must not be views.
        return {key: value.clone() for key, value in out.items()}

    def _trunk(self, image: torch.Tensor, state: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        batch = image.shape[0]
        vision = self.vision(image).unflatten(1, (image.shape[1], -1)) + self.camera
        language = self.words(words) + self.positions[: words.shape[1]]
        dtype = vision.dtype
        tokens = torch.cat(
            [
                vision.flatten(1, 2),
                language,
                self.state_in(state.to(dtype))[:, None],
                self.queries.expand(batch, -1, -1),
            ],
            dim=1,
        )
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        start = vision.shape[1] * vision.shape[2]
        mask[:, start : start + words.shape[1]] = words != 0
        mask = mask[:, None, None]
        for block in self.blocks[:-1]:
            tokens = block(tokens, mask)
        return self.norm(self.blocks[-1](tokens, mask, num_out=1 + self.chunk_size))


def make_policy(
    meta: SuiteMeta,
    *,
    head: Literal["tokens", "gaussian"] = "tokens",
    weights: str | None = "shipped",
    chunk_size: int = 4,
    num_bins: int = 64,
    temperature: float = 0.6,
    eval_decode: Decode = "mean",
    precision: Precision = "float32",
    store_log_probs: bool = False,
    **sizes: int,
) -> TokenPolicy | GaussianPolicy:
    """Build a tiny VLA for a suite.

    Args:
        meta: the suite's constants.
        head: which head acts: action tokens, or a tanh-Gaussian over the chunk.
        weights: ``"shipped"`` for the start weights in the package, a path to a safetensors file,
            or ``None`` for fresh random weights.
        chunk_size: ``H``.
        num_bins: ``V``.
        temperature: softmax temperature of the token policy.
        eval_decode: see the policy classes.
        precision: of the model's forward and backward pass, see ``Observer``.
        store_log_probs: see ``GaussianPolicy``; the token policy always stores them.
        **sizes: ``width``, ``layers``, ``heads``, ``keypoints`` of :class:`TinyModel`.

    Raises:
        ValueError: a setting is outside its range, or the weights do not fit (both named).
    """
    vocabulary = build_vocabulary(meta.instructions)
    model = TinyModel(
        vocabulary_size=len(vocabulary),
        state_dim=meta.state_dim,
        action_dim=meta.action_dim,
        cameras=len(meta.cameras),
        chunk_size=chunk_size,
        num_bins=num_bins,
        max_words=max(len(text.split()) for text in meta.instructions),
        **sizes,
    )
    gaussian = GaussianHead(model.feature_dim, chunk_size, meta.action_dim)
    if weights is not None:
        path = SHIPPED_WEIGHTS if weights == "shipped" else Path(weights)
        load_weights(path, model=model, gaussian=gaussian, vocabulary=vocabulary)
    observer = Observer(model, meta.instructions, vocabulary, precision)
    if head == "tokens":
        return TokenPolicy(
            observer,
            chunk_size=chunk_size,
            action_dim=meta.action_dim,
            num_bins=num_bins,
            temperature=temperature,
            eval_decode=eval_decode,
        )
    if head == "gaussian":
        return GaussianPolicy(
            observer,
            chunk_actor(gaussian),
            eval_decode=eval_decode,
            store_log_probs=store_log_probs,
        )
    raise ValueError(f"head is {head!r}; use 'tokens' or 'gaussian'")
