from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from t3c.errors import DataError, SpecError
from t3c.spec import ImageSpec
from t3c.train.augment import (
    AUGMENTATIONS,
    Augmentation,
    crop_and_flip,
    drop_tokens,
    horizontal_flip,
    shift,
)

RGB = ImageSpec(12, 16, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
GREY = ImageSpec(12, 16, mean=(0.3,), std=(0.35,))
SPECS = {1: GREY, 3: RGB}
ON_IMAGES = [name for name in AUGMENTATIONS if name != "drop_tokens"]


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def random_pixels(n: int, channels: int = 3, size: tuple[int, int] = (12, 16)) -> Tensor:
    return torch.rand(n, channels, *size, generator=seeded(7))


def normalised(pixels: Tensor) -> Tensor:
    spec = SPECS[pixels.shape[1]]
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (spec.mean, spec.std))
    return (pixels - mean) / std


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ON_IMAGES)
def test_every_augmentation_of_images(name: str, channels: int) -> None:
    pixels = random_pixels(24, channels)
    images = normalised(pixels)
    before = images.clone()
    augment = Augmentation((name,), SPECS[channels])
    state = torch.get_rng_state()
    result = augment(images, seeded(1))
    assert isinstance(result, Tensor)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images, before)
    assert result.shape == images.shape
    assert torch.equal(result, augment(images, seeded(1)))
    assert not torch.equal(result, augment(images, seeded(2)))
    values = result * torch.tensor(SPECS[channels].std).view(-1, 1, 1)
    values = values + torch.tensor(SPECS[channels].mean).view(-1, 1, 1)
    assert values.min() >= -1e-6
    assert values.max() <= 1 + 1e-6
    same = augment(images[:1].expand(24, -1, -1, -1), seeded(1))
    assert isinstance(same, Tensor)
    kinds = {tuple(v.flatten().tolist()) for v in same}
    assert len(kinds) > (1 if name == "horizontal_flip" else 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ON_IMAGES)
def test_dtypes_are_kept_and_draws_do_not_depend_on_them(name: str, dtype: torch.dtype) -> None:
    # levels that bfloat16 holds exactly: no operation that looks at levels tips over
    images = normalised(random_pixels(6).mul(2).round().div(2)).bfloat16()
    augment = Augmentation((name,), RGB)
    result, plain = (augment(images.to(d), seeded(1)) for d in (dtype, torch.float32))
    assert isinstance(result, Tensor)
    assert isinstance(plain, Tensor)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), plain, atol=0.02, rtol=0.01)


def test_flips_flip() -> None:
    images = random_pixels(400, 1, (2, 3))
    result = horizontal_flip(images, seeded())
    flipped = (result == images.flip(3)).flatten(1).all(1)
    assert torch.equal(flipped, ~(result == images).flatten(1).all(1))
    assert 160 < int(flipped.sum()) < 240
    assert torch.equal(horizontal_flip(images, seeded(), share=1.0), images.flip(3))
    assert torch.equal(horizontal_flip(images, seeded(), share=0.0), images)


def test_crops_are_windows_of_the_image_in_black() -> None:
    images = normalised(random_pixels(600, 3, (5, 6)))
    black = normalised(torch.zeros(1, 3, 1, 1))
    result = crop_and_flip(images, seeded(), RGB, padding=2, flip=0.0)
    padded = black.expand(600, 3, 9, 10).clone()
    padded[:, :, 2:-2, 2:-2] = images
    hits = torch.zeros(600, 5, 5)
    for top in range(5):
        for left in range(5):
            window = padded[:, :, top : top + 5, left : left + 6]
            hits[:, top, left] = (window - result).abs().flatten(1).amax(1) < 1e-6
    assert torch.equal(hits.sum((1, 2)), torch.ones(600))
    assert hits.sum(0).min() >= 8  # of 24 expected: every window comes up
    assert torch.equal(crop_and_flip(images, seeded(), RGB, padding=0, flip=0.0), images)
    mirrored = crop_and_flip(images, seeded(), RGB, padding=2, flip=1.0)
    assert torch.equal(mirrored, result.flip(3))
    plain = crop_and_flip(torch.ones(50, 1, 4, 4), seeded())
    assert set(plain.flatten().tolist()) == {0.0, 1.0}


def test_shifts_are_rolls() -> None:
    images = random_pixels(300, 2, (7, 8))
    result = shift(images, seeded(), pixels=1)
    moves = [
        (images.roll((down, right), (2, 3)) == result).flatten(1).all(1)
        for down in (-1, 0, 1)
        for right in (-1, 0, 1)
    ]
    counts = torch.stack(moves).sum(1)
    assert counts.sum() == 300
    assert counts.min() >= 15


def test_tokens_are_switched_off_but_never_the_first() -> None:
    mask = torch.ones(200, 12, dtype=torch.long)
    mask[:100, :3] = 0  # padded on the left
    mask[100:, 8:] = 0
    inputs = {"input_ids": torch.arange(2400).view(200, 12), "attention_mask": mask.clone()}
    result = drop_tokens(inputs, seeded(), share=0.3)
    kept = result["attention_mask"]
    assert kept.dtype == mask.dtype
    assert torch.equal(inputs["attention_mask"], mask)
    assert result["input_ids"] is inputs["input_ids"]
    assert (kept <= mask).all()
    assert kept[:100, 3].all()
    assert kept[100:, 0].all()
    free = mask.sum() - 200
    assert float((mask - kept).sum() / free) == pytest.approx(0.3, abs=0.04)
    assert torch.equal(kept, drop_tokens(inputs, seeded(), share=0.3)["attention_mask"])
    assert torch.equal(
        drop_tokens(inputs, seeded(), share=1.0)["attention_mask"].sum(1), mask[:, 5]
    )


def test_augmentations_are_applied_in_order() -> None:
    images = normalised(random_pixels(8))
    augment = Augmentation(("crop_and_flip", "shift"), RGB)
    result = augment(images, seeded(4))
    generator = seeded(4)
    expected = shift(crop_and_flip(images, generator, RGB), generator, RGB)
    assert isinstance(result, Tensor)
    assert torch.equal(result, expected)
    assert Augmentation()(images, seeded()) is images
    tokens = {"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3)}
    assert Augmentation()(tokens, seeded()) is tokens
    dropped = Augmentation(("drop_tokens",))(tokens, seeded())
    assert isinstance(dropped, dict)
    assert list(dropped) == list(tokens)


@pytest.mark.parametrize("name", ON_IMAGES)
def test_augmentation_is_for_images(name: str) -> None:
    augment = Augmentation((name,), RGB)
    tokens = {"input_ids": torch.ones(2, 3)}
    with pytest.raises(DataError, match="augmentation is for images"):
        augment(tokens, seeded())
    with pytest.raises(DataError, match=r"floats \(n, c, h, w\), got torch.float32 \(2, 3\)"):
        augment(torch.ones(2, 3), seeded())
    with pytest.raises(DataError, match=r"got torch\.uint8"):
        augment(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), seeded())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match=r"one of horizontal_flip, .*drop_tokens, got 'blur'"):
        Augmentation(("shift", "blur"))
    with pytest.raises(DataError, match="a mean of 3 channels for 1"):
        crop_and_flip(random_pixels(1, 1), seeded(), RGB)
    with pytest.raises(DataError, match=r"attention_mask \(n, t\), got input_ids"):
        drop_tokens({"input_ids": torch.ones(2, 3)}, seeded())
    with pytest.raises(DataError, match="dict with an attention_mask, got a Tensor"):
        Augmentation(("drop_tokens",))(random_pixels(1), seeded())
