"""Statistics against hand-worked numbers."""

import numpy as np
import pytest

from torchrl_vla.data.lerobot_statistics import describe, describe_pixels, histogram


def test_numbers():
    values = np.array([[0, 10], [1, 10], [2, 10], [3, 30]], np.float32)
    stats = describe(values)
    assert stats["min"] == [0.0, 10.0]
    assert stats["max"] == [3.0, 30.0]
    assert stats["mean"] == [1.5, 15.0]
    # Population: squares about 1.5 are 2.25, 0.25, 0.25, 2.25, mean 1.25.
    assert stats["std"] == pytest.approx([1.25**0.5, 75**0.5])
    assert stats["q50"] == [1.5, 10.0]
    # The 10 % point of 4 values lies at position 0.3, so at 0.3.
    assert stats["q10"] == pytest.approx([0.3, 10.0])
    assert stats["count"] == [4]


def test_integers_keep_their_extremes():
    stats = describe(np.array([10**15, 10**15 + 1]))
    assert stats["min"] == [10**15]
    assert all(isinstance(value, int) for value in stats["min"] + stats["max"])


def test_pixels_equal_the_statistics_of_the_picture():
    image = np.random.default_rng(0).integers(0, 256, (3, 3, 8, 8), dtype=np.uint8)
    image[:, 2] = 51
    stats = describe_pixels(histogram(image), 3)
    scaled = image.transpose(1, 0, 2, 3).reshape(3, -1) / 255
    for name, want in (
        ("mean", scaled.mean(axis=1)),
        ("std", scaled.std(axis=1)),
        ("min", scaled.min(axis=1)),
        ("max", scaled.max(axis=1)),
        ("q10", np.quantile(scaled, 0.1, axis=1, method="inverted_cdf")),
        ("q99", np.quantile(scaled, 0.99, axis=1, method="inverted_cdf")),
    ):
        assert np.shape(stats[name]) == (3, 1, 1)
        assert np.allclose(np.ravel(stats[name]), want), name
    assert np.ravel(stats["q50"])[2] == pytest.approx(0.2)  # 51 / 255
    assert stats["count"] == [3]
