"""The image pipeline: turned once, exact where the reference is known, the same everywhere."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from torchrl_vla.policies.images import ImagePipeline


def frame() -> torch.Tensor:
    """4 x 4, 16 distinct pixels, the red corner at [0, 0]."""
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)
    image[2] = torch.arange(16, dtype=torch.uint8).view(4, 4) * 10
    image[:, 0, 0] = torch.tensor([255, 0, 0], dtype=torch.uint8)
    return image


def photograph(h: int, w: int, seed: int = 0) -> torch.Tensor:
    """Smooth colours with some noise, as JPEG expects."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:h, 0:w] / max(h, w)
    base = np.stack([200 * x, 150 * y, 120 * (1 - x)], axis=0) + rng.normal(0, 6, (3, h, w))
    return torch.from_numpy(base.clip(0, 255).astype(np.uint8))


def test_turned_exactly_once():
    image = frame()
    out = ImagePipeline(rotate=180)(image, 4)
    assert torch.equal(out, image.flip(-1, -2))
    assert out[:, 3, 3].tolist() == [255, 0, 0]
    assert out[:, 0, 0].tolist() == [0, 0, 150]
    # and not at all by default, whatever the batch dims
    assert torch.equal(ImagePipeline()(image.expand(2, 3, 3, 4, 4), 4)[1, 2], image)


def test_nothing_to_do_leaves_pixels_alone():
    image = photograph(8, 8)
    assert ImagePipeline(resize="lanczos")(image, 8) is image


def test_resize_keeps_channels_and_rows():
    image = photograph(20, 32)
    out = ImagePipeline()(image.expand(2, 2, 3, 20, 32), 8)
    reference = Image.fromarray(image.movedim(0, -1).numpy()).resize((8, 8), Image.BICUBIC)
    assert out.shape == (2, 2, 3, 8, 8)
    assert torch.equal(out[1, 0].movedim(0, -1), torch.from_numpy(np.array(reference)))


def lanczos3(values: np.ndarray, size: int) -> np.ndarray:
    """Antialiased lanczos3 of the last axis by its definition."""
    scale = values.shape[-1] / size
    out = np.zeros((*values.shape[:-1], size))
    for i in range(size):
        x = (np.arange(values.shape[-1]) + 0.5 - (i + 0.5) * scale) / scale
        weights = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)
        out[..., i] = values @ (weights / weights.sum())
    return out


def test_lanczos_is_lanczos():
    image = photograph(24, 30)
    ours = ImagePipeline(resize="lanczos")(image, 10).numpy().astype(float)
    wide = lanczos3(image.numpy().astype(float), 10)
    exact = lanczos3(wide.swapaxes(-1, -2), 10).swapaxes(-1, -2)
    # rounded once, at the end
    assert np.abs(ours - exact.clip(0, 255)).max() <= 0.5 + 1e-3


def test_jpeg_round_trip():
    image = photograph(32, 32)
    out = ImagePipeline(jpeg_quality=95)(image, 32)
    file = io.BytesIO()
    Image.fromarray(image.movedim(0, -1).numpy()).save(file, format="JPEG", quality=95)
    assert torch.equal(out.movedim(0, -1), torch.from_numpy(np.array(Image.open(file))))
    difference = (out.float() - image.float()).abs()
    assert 0 < difference.mean() < 5
    worse = (ImagePipeline(jpeg_quality=20)(image, 32).float() - image.float()).abs()
    assert worse.mean() > difference.mean()


def test_centre_crop_by_hand():
    # A ramp of 0, 10, ..., 40 over 5 columns; area 0.25 keeps half of each side.
    ramp = (torch.arange(5) * 10).to(torch.uint8).expand(3, 5, 5)
    out = ImagePipeline(crop_area=0.25)(ramp, 5)
    # corners aligned: columns at 1, 1.5, 2, 2.5, 3 -> 10, 15, 20, 25, 30
    assert out[0, 2].tolist() == [10, 15, 20, 25, 30]
    # 0.9 of the area: 2 -+ 2 sqrt(0.9) = 0.10263, 1.05132, 2, ...; 255.5 and truncation
    out = ImagePipeline(crop_area=0.9)(ramp, 5)
    assert out[0, 2].tolist() == [1, 10, 20, 29, 39]
    assert torch.equal(ImagePipeline(crop_area=1.0)(ramp, 5), ramp)


def test_one_image_at_a_time_equals_the_batch():
    batch = torch.stack([photograph(20, 20, seed) for seed in range(3)])
    pipeline = ImagePipeline(rotate=180, jpeg_quality=95, resize="lanczos", crop_area=0.9)
    whole = pipeline(batch, 14)
    assert all(torch.equal(whole[i], pipeline(batch[i], 14)) for i in range(3))
    assert whole.dtype == torch.uint8


def test_described():
    pipeline = ImagePipeline(rotate=180, jpeg_quality=95, resize="lanczos", crop_area=0.9)
    assert pipeline.describe() == {
        "rotate": 180,
        "jpeg_quality": 95,
        "resize": "lanczos",
        "crop_area": 0.9,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rotate": 90}, "rotate is 90"),
        ({"jpeg_quality": 0}, "jpeg_quality is 0"),
        ({"resize": "nearest"}, "resize is 'nearest'"),
        ({"crop_area": 1.5}, "crop_area is 1.5"),
    ],
)
def test_settings_out_of_range(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ImagePipeline(**settings)


def test_images_that_are_not_raw():
    with pytest.raises(TypeError, match="float32; raw uint8"):
        ImagePipeline()(torch.zeros(3, 4, 4), 4)
    with pytest.raises(ValueError, match=r"\(4, 4, 3\)"):
        ImagePipeline()(torch.zeros(4, 4, 3, dtype=torch.uint8), 4)
