"""Vision towers of OpenVLA: DINOv2 with registers and SigLIP, with the published parameter names.

Own modules instead of timm's, which would bring torchvision and whole families of models for the
two that are used here, and whose releases disagree about names.

Shape legend: ``B`` batch, ``N`` images, ``P`` patches per image, ``d`` width of a tower, ``D`` of
the language model, ``s`` image side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrl_vla.policies.images import PixelScale, to_pixels

LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True)
class TowerSizes:
    """One vision transformer."""

    image_size: int
    """Side of the square input, pixels."""
    patch_size: int
    width: int
    depth: int
    """Stored blocks; the last one is stored but never run."""
    num_heads: int
    hidden: int
    """Width of the MLPs."""
    prefix_tokens: int = 0
    """Class token and registers in front of the patches (DINOv2 has 1 + 4, SigLIP none)."""
    attention_pool: bool = False
    """Whether the checkpoint stores SigLIP's pooling head (never run)."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Per channel, of pixels in [0, 1]."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def num_patches(self) -> int:
        """Patches per image (``P``)."""
        return (self.image_size // self.patch_size) ** 2


def dinov2_sizes(
    image_size: int = 224,
    *,
    patch_size: int = 14,
    width: int = 1024,
    depth: int = 24,
    num_heads: int = 16,
) -> TowerSizes:
    """Return DINOv2 with registers (ViT-L by default).

    The pixel statistics are ImageNet's rounded to bfloat16: the published processors were exported
    that way, so these are the ones that every descendant was trained with.
    """
    return TowerSizes(
        image_size,
        patch_size,
        width,
        depth,
        num_heads,
        hidden=4 * width,
        prefix_tokens=5,
        mean=(0.484375, 0.455078125, 0.40625),
        std=(0.228515625, 0.2236328125, 0.224609375),
    )


def siglip_sizes(
    image_size: int = 224,
    *,
    patch_size: int = 14,
    width: int = 1152,
    depth: int = 27,
    num_heads: int = 16,
) -> TowerSizes:
    """Return SigLIP (So400m by default)."""
    return TowerSizes(
        image_size,
        patch_size,
        width,
        depth,
        num_heads,
        hidden=int(width * 3.7362),
        attention_pool=True,
    )


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*qkv.unbind(0))
        return self.proj(attended.transpose(1, 2).flatten(-2))


class _Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        # The exact GELU in both towers, although SigLIP was pre-trained with the tanh form.
        return self.fc2(functional.gelu(self.fc1(x)))


class _LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class VisionBlock(nn.Module):
    """Pre-norm transformer block, ``[B, L, d]`` to the same; what the FSDP2 plan gathers alone."""

    def __init__(self, width: int, num_heads: int, hidden: int, *, layer_scale: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.attn = _Attention(width, num_heads)
        self.ls1 = _LayerScale(width) if layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.mlp = _Mlp(width, hidden)
        self.ls2 = _LayerScale(width) if layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, L, d]`` to ``[B, L, d]``."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class _AttentionPool(nn.Module):
    """The tensors of SigLIP's pooling head: stored in checkpoints, never run."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.mlp = _Mlp(width, hidden)


class _PatchEmbed(nn.Module):
    def __init__(self, patch_size: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch_size, stride=patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.proj(pixels).flatten(2).transpose(1, 2)


def store_only(module: nn.Module) -> None:
    """Turn the parameters of ``module`` into buffers.

    A strict load needs tensors that never influence an output. As parameters they would be without
    a gradient for ever, and every optimizer, shard plan and checkpoint would have to know.
    """
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, parameter.detach())


class VisionTower(nn.Module):
    """Images to the patch features of the second-to-last block, without the final norm.

    Args:
        sizes: which transformer.
    """

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        width = sizes.width
        self.sizes = sizes
        self.patch_embed = _PatchEmbed(sizes.patch_size, width)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, sizes.num_patches, width))
        if sizes.prefix_tokens:
            self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
            self.reg_token = nn.Parameter(0.02 * torch.randn(1, sizes.prefix_tokens - 1, width))
        self.blocks = nn.ModuleList(
            VisionBlock(width, sizes.num_heads, sizes.hidden, layer_scale=bool(sizes.prefix_tokens))
            for _ in range(sizes.depth)
        )
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        unused = [self.blocks[-1], self.norm]
        if sizes.attention_pool:
            self.attn_pool = _AttentionPool(width, sizes.hidden)
            unused.append(self.attn_pool)
        for module in unused:
            store_only(module)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map normalised pixels ``[B, 3, s, s]`` to ``[B, P, d]``, patches in row-major order."""
        x = self.patch_embed(pixels) + self.pos_embed
        prefix = self.sizes.prefix_tokens
        if prefix:
            front = torch.cat([self.cls_token, self.reg_token], dim=1)
            x = torch.cat([front.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks[:-1]:
            x = block(x)
        return x[:, prefix:]


class VisionBackbone(nn.Module):
    """One tower, or two side by side on the same images.

    Args:
        towers: sizes; the first is ``featurizer``, the second ``fused_featurizer``.

    Raises:
        ValueError: not one or two towers, or their patches do not match.
    """

    def __init__(self, towers: Sequence[TowerSizes]) -> None:
        super().__init__()
        if len(towers) not in (1, 2):
            raise ValueError(f"{len(towers)} vision towers; OpenVLA has one or two")
        if len({(t.image_size, t.num_patches) for t in towers}) != 1:
            raise ValueError(f"the towers see different images or patches: {list(towers)}")
        self.sizes = tuple(towers)
        self.featurizer = VisionTower(towers[0])
        if len(towers) == 2:
            self.fused_featurizer = VisionTower(towers[1])

    @property
    def towers(self) -> tuple[VisionTower, ...]:
        """The towers in the order of their channels."""
        if len(self.sizes) == 1:
            return (self.featurizer,)
        return self.featurizer, self.fused_featurizer

    @property
    def width(self) -> int:
        """Width of the joined features."""
        return sum(sizes.width for sizes in self.sizes)

    def normalise(self, image: Tensor) -> Tensor:
        """Map uint8 RGB ``[B, N, 3, s, s]`` to ``[B, N, 3 * towers, s, s]``, per tower.

        Raises:
            ValueError: the images do not have the towers' size.
        """
        side = self.sizes[0].image_size
        if image.shape[-2:] != (side, side):
            raise ValueError(
                f"images are {tuple(image.shape[-2:])} pixels, the vision towers read "
                f"{(side, side)}; let the image pipeline resize them"
            )
        scales = [PixelScale(sizes.mean, sizes.std) for sizes in self.sizes]
        return to_pixels(image, scales, self.featurizer.patch_embed.proj.weight.dtype)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map ``[B, N, 3 * towers, s, s]`` to ``[B, N * P, width]``, images one after another."""
        batch, images = pixels.shape[:2]
        parts = pixels.flatten(0, 1).split(3, dim=1)
        features = [tower(part) for tower, part in zip(self.towers, parts, strict=True)]
        joined = features[0] if len(features) == 1 else torch.cat(features, dim=-1)
        return joined.unflatten(0, (batch, images)).flatten(1, 2)


class Projector(nn.Module):
    """Vision features to the language model's width: two layers for one tower, three for two.

    Args:
        width: of the joined vision features.
        out: ``D``.
        fused: whether the features come from two towers.
    """

    def __init__(self, width: int, out: int, *, fused: bool) -> None:
        super().__init__()
        first = 4 * width if fused else out
        self.fc1 = nn.Linear(width, first)
        self.fc2 = nn.Linear(first, out)
        self.fc3 = nn.Linear(out, out) if fused else None

    def forward(self, features: Tensor) -> Tensor:
        """Map ``[B, L, width]`` to ``[B, L, D]``."""
        x = self.fc2(functional.gelu(self.fc1(features)))
        return x if self.fc3 is None else self.fc3(functional.gelu(x))
