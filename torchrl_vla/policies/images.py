"""What happens to a camera image before a vision tower, as one described pipeline.

Pixels first (:class:`ImagePipeline`, uint8 in and out), then their scale (:func:`to_pixels`).

Raw uint8 images travel from the environment to the policy; the pipeline runs inside the policy, so
that actor, learner and evaluation cannot disagree, and a video can show the same pixels.

Shape legend: ``*`` batch dims, ``h w`` image, ``s`` side of the output.

Source: the evaluation code of OpenVLA-OFT (arXiv:2502.19645) as described in its documents: turn,
JPEG, lanczos3 to the tower's size, then for checkpoints trained with augmentation a centre crop.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

Resize = Literal["bicubic", "lanczos"]


@dataclass(frozen=True)
class ImagePipeline:
    """Turn, JPEG round trip, resize, centre crop, in this order; uint8 in, uint8 out.

    Args:
        rotate: 0 or 180 degrees. LIBERO renders upside down; turn there *or* in the environment.
        jpeg_quality: 1..100 for a JPEG round trip (the LIBERO data sets were stored as JPEG); None
            for none.
        resize: ``"bicubic"``: PIL's antialiased bicubic, the processor of the checkpoints;
            ``"lanczos"``: antialiased lanczos3 in float, rounded once.
        crop_area: share of the area that a centre crop keeps, resized back bilinearly; 0.9 for
            checkpoints trained with random crops; None for no crop.

    Raises:
        ValueError: a setting is outside its range.

    Differs: the original's JPEG coder and lanczos kernel are TensorFlow's; here Pillow's. Single
    pixels may differ by a level.
    """

    rotate: int = 0
    jpeg_quality: int | None = None
    resize: Resize = "bicubic"
    crop_area: float | None = None

    def __post_init__(self) -> None:
        if self.rotate not in (0, 180):
            raise ValueError(f"rotate is {self.rotate}; use 0 or 180 (degrees)")
        if self.jpeg_quality is not None and not 1 <= self.jpeg_quality <= 100:
            raise ValueError(f"jpeg_quality is {self.jpeg_quality}; use 1..100, or null for none")
        if self.resize not in ("bicubic", "lanczos"):
            raise ValueError(f"resize is {self.resize!r}; use 'bicubic' or 'lanczos'")
        if self.crop_area is not None and not 0 < self.crop_area <= 1:
            raise ValueError(f"crop_area is {self.crop_area}; use (0, 1], or null for no crop")

    def describe(self) -> dict[str, Any]:
        """Return the steps as plain values, for checkpoints and results."""
        return asdict(self)

    def __call__(self, images: Tensor, size: int) -> Tensor:
        """Process a batch of RGB images.

        Args:
            images: uint8 ``[*, 3, h, w]``.
            size: ``s``.

        Returns:
            uint8 ``[*, 3, s, s]``, on the device of ``images``.

        Raises:
            TypeError: the images are not uint8.
            ValueError: they do not have 3 channels.
        """
        if images.dtype != torch.uint8:
            raise TypeError(f"images have dtype {images.dtype}; raw uint8 RGB is needed")
        if images.shape[-3] != 3:
            raise ValueError(f"images have shape {tuple(images.shape)}; [*, 3, h, w] is needed")
        if self.rotate == 180:
            images = images.flip(-1, -2)
        same_size = images.shape[-2:] == (size, size)
        if self.jpeg_quality is not None or not same_size:
            images = self._one_by_one(images, size)
        return images if self.crop_area is None else _crop(images, self.crop_area)

    def _one_by_one(self, images: Tensor, size: int) -> Tensor:
        flat = images.reshape(-1, *images.shape[-3:]).movedim(1, -1).cpu().numpy()
        out = np.empty((len(flat), size, size, 3), dtype=np.uint8)
        for row, pixels in enumerate(flat):
            if self.jpeg_quality is not None:
                pixels = _jpeg(pixels, self.jpeg_quality)
            out[row] = _resized(pixels, size, self.resize)
        tensor = torch.from_numpy(out).movedim(-1, 1).to(images.device)
        return tensor.reshape(*images.shape[:-2], size, size)


@dataclass(frozen=True)
class PixelScale:
    """Mean and standard deviation of normalised pixels (of values in [0, 1]), per channel."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


def to_pixels(images: Tensor, scales: Sequence[PixelScale], dtype: torch.dtype) -> Tensor:
    """Normalise images for towers that look at the same pixels.

    Args:
        images: uint8 ``[*, 3, s, s]``.
        scales: one per tower.
        dtype: of the result; computed in float32.

    Returns:
        ``[*, 3 * towers, s, s]``, the towers' channels one after another.
    """
    unit = images.to(torch.float32).div_(255.0)
    parts = [
        (unit - unit.new_tensor(scale.mean)[:, None, None])
        / unit.new_tensor(scale.std)[:, None, None]
        for scale in scales
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-3)).to(dtype)


def _jpeg(pixels: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", quality=quality)
    return np.asarray(Image.open(file))


def _resized(pixels: np.ndarray, size: int, method: Resize) -> np.ndarray:
    if pixels.shape[:2] == (size, size):
        return pixels
    if method == "bicubic":
        return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC))
    # One float channel at a time: PIL rounds a uint8 image after each of its two passes.
    channels = [
        Image.fromarray(pixels[..., c].astype(np.float32)).resize(
            (size, size), Image.Resampling.LANCZOS
        )
        for c in range(3)
    ]
    return np.stack(channels, axis=-1).round().clip(0, 255).astype(np.uint8)


def _crop(images: Tensor, area: float) -> Tensor:
    """Keep the centre with ``area`` of the pixels, resized back bilinearly (corners aligned)."""
    flat = images.reshape(-1, *images.shape[-3:]).float() / 255
    side = math.sqrt(area)
    theta = torch.tensor([[side, 0.0, 0.0], [0.0, side, 0.0]], device=images.device)
    grid = functional.affine_grid(
        theta.expand(len(flat), -1, -1), list(flat.shape), align_corners=True
    )
    cropped = functional.grid_sample(flat, grid, mode="bilinear", align_corners=True)
    # 255.5 and truncation is how the original turns unit floats into uint8.
    return (cropped.clamp(0, 1) * 255.5).to(torch.uint8).reshape(images.shape)
