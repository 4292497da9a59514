"""Corruptions keep what they should and change what they say."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.zoo.corrupt import CORRUPTIONS, blur, contrast, gaussian_noise
from t3c.errors import DataError, SpecError
from t3c.zoo import cifar10 as zoo

sides = st.integers(1, 12)
strengths = st.floats(0, 4)


def pictures(seed: int = 0, shape: tuple[int, ...] = (6, 3, 16, 20)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.5


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_changes_a_copy_and_always_the_same_way(name: str) -> None:
    images = pictures()
    before = images.clone()
    shifted = CORRUPTIONS[name](images)
    assert shifted.shape == images.shape
    assert shifted.dtype == images.dtype
    assert torch.equal(images, before)
    assert torch.equal(shifted, CORRUPTIONS[name](images))
    assert (shifted - images).flatten(1).norm(dim=1).min() > 0.1


@settings(max_examples=30)
@given(height=sides, width=sides, strength=strengths)
def test_shapes_are_kept_and_figures_stay_finite(height: int, width: int, strength: float) -> None:
    images = pictures(shape=(2, 3, height, width))
    for shifted in (
        gaussian_noise(images, strength, 0),
        blur(images, strength),
        contrast(images, strength),
    ):
        assert shifted.shape == images.shape
        assert shifted.isfinite().all()


@given(seed=st.integers(0, 1000), size=st.floats(0.01, 4))
def test_noise_is_of_its_seed_and_size(seed: int, size: float) -> None:
    images = pictures()
    noisy = gaussian_noise(images, size, seed)
    assert torch.equal(noisy, gaussian_noise(images, size, seed))
    assert not torch.equal(noisy, gaussian_noise(images, size, seed + 1))
    assert float((noisy - images).std() / images.std()) == pytest.approx(size, rel=0.1)


@given(st.integers(0, 1000))
def test_strengths_that_change_nothing(seed: int) -> None:
    images = pictures(seed)
    assert torch.equal(contrast(images, 1), images)
    assert torch.equal(blur(images, 0), images)
    assert torch.equal(gaussian_noise(images, 0, seed), images)


@given(factor=strengths)
def test_contrast_scales_what_differs_from_an_images_mean(factor: float) -> None:
    images = pictures()
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    expected = mean + factor * (images - mean)
    torch.testing.assert_close(contrast(images, factor), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=30)
@given(level=st.floats(-3, 3), sigma=strengths)
def test_blur_leaves_a_flat_image_flat(level: float, sigma: float) -> None:
    flat = torch.full((1, 3, 8, 8), level)
    torch.testing.assert_close(blur(flat, sigma), flat, atol=1e-5, rtol=0)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), sigma=st.floats(0.1, 2))
def test_blur_keeps_the_mean_of_each_channel(seed: int, sigma: float) -> None:
    images = torch.zeros(2, 3, 40, 40)
    images[..., 12:28, 12:28] = pictures(seed, (2, 3, 16, 16))  # out of the edges' reach
    blurred = blur(images, sigma)
    kept = [v.mean(dim=(2, 3)) for v in (blurred, images)]
    torch.testing.assert_close(*kept, atol=1e-5, rtol=0)
    assert blurred.std() <= images.std() + 1e-6


def test_blur_spreads_a_point_by_sigma() -> None:
    point = torch.zeros(1, 2, 41, 41, dtype=torch.float64)
    point[0, 1, 20, 20] = 1  # one channel alone: nothing leaks into the other
    spread = blur(point, 2.0)[0]
    assert not spread[0].any()
    offsets = torch.arange(-20, 21, dtype=torch.float64)
    for axis in (0, 1):
        variance = float((spread[1].sum(dim=axis) * offsets**2).sum())
        assert math.sqrt(variance) == pytest.approx(2.0, rel=0.01)
    assert torch.equal(spread[1], spread[1].T)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(DataError, match=r"got torch.float32 \(3, 8, 8\)"):
        blur(torch.zeros(3, 8, 8), 1)
    with pytest.raises(DataError, match=r"torch\.uint8"):
        contrast(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), 1)
    with pytest.raises(SpecError, match="sigma must be finite and not negative, got -1"):
        blur(pictures(), -1)
    with pytest.raises(SpecError, match="size must be finite"):
        gaussian_noise(pictures(), math.nan, 0)


def _has_all() -> bool:
    try:
        return bool(os.environ.get("T3C_DATA")) and zoo.cifar10_folder().is_dir()
    except DataError:
        return False


@pytest.mark.data
@pytest.mark.skipif(
    not _has_all(), reason="T3C_DATA is not set or t3c data get cifar10 has not run"
)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_strengths_are_moderate(name: str) -> None:
    images, labels = zoo.cifar10("test", 400)
    with torch.inference_mode():
        guessed = zoo.resnet(20)(CORRUPTIONS[name](images)).argmax(1)
    assert 0.6 < (guessed == labels).float().mean() < 0.85
