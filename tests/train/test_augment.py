from __future__ import annotations

import colorsys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch import Generator, Tensor

from t3c.errors import DataError, SpecError
from t3c.spec import ImageSpec
from t3c.train.augment import (
    AUGMENTATIONS,
    Augmentation,
    color_jitter,
    crop_and_flip,
    cutmix,
    drop_tokens,
    horizontal_flip,
    mixup,
    rand_augment,
    random_resized_crop,
    shift,
    turn_hue,
)
from t3c.train.randaugment import OPERATIONS, from_pixels, grey, to_pixels

RGB = ImageSpec(12, 16, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
GREY = ImageSpec(12, 16, mean=(0.3,), std=(0.35,))
SPECS = {1: GREY, 3: RGB}
ON_IMAGES = [name for name in AUGMENTATIONS if name != "drop_tokens"]
UNSCALED = ("autocontrast", "equalize")


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def random_pixels(n: int, channels: int = 3, size: tuple[int, int] = (12, 16)) -> Tensor:
    return torch.rand(n, channels, *size, generator=seeded(7))


def normalised(pixels: Tensor) -> Tensor:
    return from_pixels(pixels, SPECS[pixels.shape[1]], pixels)


def bytes_and_pixels(size: tuple[int, int], channels: int) -> tuple[list[Image.Image], Tensor]:
    """Random pictures of narrow and of full range, for Pillow and as pixels 0..1."""
    rng = np.random.default_rng(3)
    levels = rng.integers(0, 256, (5, *size, channels), dtype=np.uint8)
    levels[1] = 60 + levels[1] // 3
    levels[2] = rng.beta(0.5, 2, levels[2].shape) * 255
    levels[3] = 90
    levels[4, ..., 0] = 200
    pictures = [Image.fromarray(v if channels == 3 else v[..., 0]) for v in levels]
    return pictures, torch.tensor(levels).permute(0, 3, 1, 2) / 255


def of_pictures(pictures: list[Image.Image]) -> Tensor:
    arrays = [np.asarray(p).reshape(p.height, p.width, -1) for p in pictures]
    return torch.tensor(np.stack(arrays)).permute(0, 3, 1, 2).float()


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


def test_a_resized_crop_of_everything_is_the_image() -> None:
    images = random_pixels(3, 2, (9, 9))
    same = random_resized_crop(images, seeded(), area=(1.0, 1.0), aspect=(1.0, 1.0))
    torch.testing.assert_close(same, images, atol=1e-5, rtol=0)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(8, 20),
    st.integers(8, 20),
    st.floats(0.08, 0.9),
    st.floats(0.8, 1.25),
    st.integers(0, 9),
)
def test_resized_crops_have_the_area_and_aspect_asked_for(
    h: int, w: int, area: float, aspect: float, seed: int
) -> None:
    y, x = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
    places = torch.stack([x, y]).expand(16, 2, h, w)
    crop = random_resized_crop(places, seeded(seed), area=(area, area), aspect=(aspect, aspect))
    # slopes where no rim is near: how many old pixels one new pixel steps over
    wide = (crop[:, 0, h // 2, w // 2 + 1] - crop[:, 0, h // 2, w // 2 - 1]) * w / 2
    high = (crop[:, 1, h // 2 + 1, w // 2] - crop[:, 1, h // 2 - 1, w // 2]) * h / 2
    expected_wide, expected_high = (area * h * w * aspect) ** 0.5, (area * h * w / aspect) ** 0.5
    torch.testing.assert_close(
        wide, torch.full((16,), min(expected_wide, float(w))), atol=0.01, rtol=0
    )
    torch.testing.assert_close(
        high, torch.full((16,), min(expected_high, float(h))), atol=0.01, rtol=0
    )
    corners = crop[:, :, 0, 0]
    assert corners.min() >= 0.5 - 1e-4
    assert crop[:, 0, 0, -1].max() <= w - 0.5 + 1e-4
    assert crop[:, 1, -1, 0].max() <= h - 0.5 + 1e-4
    assert crop[:, 0].mean().item() == pytest.approx(w / 2, abs=w / 10)


def test_resized_crops_cover_the_ranges() -> None:
    y, x = torch.meshgrid(torch.linspace(-1, 1, 33), torch.linspace(-1, 1, 33), indexing="ij")
    crop = random_resized_crop(torch.stack([x, y]).expand(800, 2, 33, 33), seeded())
    wide = (crop[:, 0, 16, 17] - crop[:, 0, 16, 15]) * 33 / 2 / (2 * 33 / 32)
    high = (crop[:, 1, 17, 16] - crop[:, 1, 15, 16]) * 33 / 2 / (2 * 33 / 32)
    area, aspect = wide * high, wide / high
    assert 0.079 < area.min() < 0.1
    assert 0.95 < area.max() < 1.001
    assert 0.749 < aspect.min() < 0.76
    assert 1.31 < aspect.max() < 1.334
    assert aspect.log().mean().abs() < 0.02
    # areas above 3/4 are drawn again where their aspect does not fit
    assert area.mean().item() == pytest.approx(0.478, abs=0.02)


def test_jitter_of_nothing_is_nothing_and_is_even() -> None:
    pixels = 0.25 + 0.5 * random_pixels(2000, 3, (4, 4))
    images = normalised(pixels)
    still = color_jitter(images, seeded(), RGB, 0, 0, 0, 0)
    torch.testing.assert_close(still, images, atol=1e-5, rtol=1e-5)
    jittered = to_pixels(color_jitter(images, seeded(), RGB), RGB)
    levels = jittered.mean((1, 2, 3)) / pixels.mean((1, 2, 3))
    assert abs(levels.mean().item() - 1) < 0.015
    assert levels.std() > 0.15


@pytest.mark.parametrize(
    ("only", "kept"),
    [
        ("contrast", lambda x: grey(x).mean((1, 2, 3))),
        ("saturation", lambda x: grey(x)),
        ("hue", lambda x: torch.stack([x.amax(1), x.amin(1)])),
    ],
)
def test_each_jitter_changes_one_thing(only: str, kept: Callable[[Tensor], Tensor]) -> None:
    pixels = 0.35 + 0.3 * random_pixels(10)  # far enough from black and white to stay unclipped
    none = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
    strength = 0.1 if only == "hue" else 0.4
    changed = color_jitter(normalised(pixels), seeded(), RGB, **(none | {only: strength}))
    result = to_pixels(changed, RGB)
    torch.testing.assert_close(kept(result), kept(pixels), atol=1e-5, rtol=0)
    assert ((result - pixels).abs().amax((1, 2, 3)) > 1e-3).all()


def test_hue_turns_as_the_colour_circle() -> None:
    pixels = random_pixels(4, 3, (5, 5))
    pixels[0, :, 0] = 0.5  # grey has no hue
    turns = torch.tensor([0.1, -0.37, 0.5, 0.0])
    result = turn_hue(pixels, turns)
    for before, after, turn in zip(pixels, result, turns.tolist(), strict=True):
        for rgb, found in zip(before.flatten(1).T, after.flatten(1).T, strict=True):
            hue, saturation, value = colorsys.rgb_to_hsv(*rgb.tolist())
            expected = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
            assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_grey_images_have_brightness_and_contrast_only() -> None:
    images = normalised(random_pixels(5, 1))
    still = color_jitter(images, seeded(), GREY, 0, 0, saturation=0.4, hue=0.1)
    torch.testing.assert_close(still, images, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [(40, 37), (12, 16)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("name", "strength", "reference", "levels"),
    [
        ("autocontrast", 1.0, ImageOps.autocontrast, 1),
        ("equalize", 1.0, ImageOps.equalize, 0),
        ("solarize", 0.5, lambda p: ImageOps.solarize(p, 128), 0),
        ("solarize", 0.0, lambda p: ImageOps.solarize(p, 256), 0),
        ("posterize", 0.5, lambda p: ImageOps.posterize(p, 6), 0),
        ("posterize", -1.0, lambda p: ImageOps.posterize(p, 4), 0),
        ("color", -0.5, lambda p: ImageEnhance.Color(p).enhance(0.55), 1.5),
        ("contrast", 1.0, lambda p: ImageEnhance.Contrast(p).enhance(1.9), 1.5),
        ("brightness", 0.5, lambda p: ImageEnhance.Brightness(p).enhance(1.45), 1),
        ("sharpness", 1.0, lambda p: ImageEnhance.Sharpness(p).enhance(1.9), 2),
        ("sharpness", -1.0, lambda p: ImageEnhance.Sharpness(p).enhance(0.1), 2),
    ],
)
def test_operations_are_those_of_pillow(
    size: tuple[int, int],
    channels: int,
    name: str,
    strength: float,
    reference: Callable[[Image.Image], Image.Image],
    levels: float,
) -> None:
    pictures, pixels = bytes_and_pixels(size, channels)
    found = OPERATIONS[name](pixels, torch.full((5,), strength)) * 255
    difference = (found - of_pictures([reference(p) for p in pictures])).abs()
    assert difference.max() <= levels + 1e-3


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(
    ("name", "matrix"),
    [
        ("rotate", (np.cos(np.pi / 6), -np.sin(np.pi / 6), np.sin(np.pi / 6), np.cos(np.pi / 6))),
        ("shear_x", (1, 0.3, 0, 1)),
        ("shear_y", (1, 0, 0.3, 1)),
    ],
)
def test_maps_are_in_pixels_about_the_centre(
    name: str, matrix: tuple[float, ...], sign: int
) -> None:
    (picture, *_), pixels = bytes_and_pixels((31, 46), 1)
    a, b, c, d = matrix[0], sign * matrix[1], sign * matrix[2], matrix[3]
    x, y = 23, 15.5
    data = (a, b, x - a * x - b * y, c, d, y - c * x - d * y)
    affine, bilinear = Image.Transform.AFFINE, Image.Resampling.BILINEAR
    expected = of_pictures([picture.transform(picture.size, affine, data, bilinear)])[0]
    found = OPERATIONS[name](pixels[:1], torch.tensor([float(sign)]))[0] * 255
    middle = (slice(None), slice(8, -8), slice(8, -8))
    assert (found[middle] - expected[middle]).abs().max() < 1.01  # Pillow cuts off fractions


def test_translations_move_by_the_share_of_the_side() -> None:
    pixels = random_pixels(2, 3, (20, 40))
    strength = torch.tensor([1.0, -1.0])
    across = OPERATIONS["translate_x"](pixels, strength)
    down = OPERATIONS["translate_y"](pixels, strength)
    torch.testing.assert_close(across[0, :, :, :22], pixels[0, :, :, 18:], atol=1e-4, rtol=0)
    torch.testing.assert_close(across[1, :, :, 18:], pixels[1, :, :, :22], atol=1e-4, rtol=0)
    assert across[0, :, :, 23:].abs().max() == 0
    torch.testing.assert_close(down[0, :, :11], pixels[0, :, 9:], atol=1e-4, rtol=0)
    torch.testing.assert_close(down[1, :, 9:], pixels[1, :, :11], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in UNSCALED])
def test_no_strength_changes_nothing_and_more_changes_more(name: str) -> None:
    pixels = random_pixels(4)
    moved = [
        float((OPERATIONS[name](pixels, torch.full((4,), s)) - pixels).abs().mean())
        for s in (0.0, 0.25, 0.9)
    ]
    assert moved[0] < 0.5 / 255
    if name != "identity":
        assert moved[0] < moved[1] < moved[2]


def test_magnitude_is_of_ten() -> None:
    images = normalised(random_pixels(60, 3, (6, 6)))  # too few pixels for equalize
    stretched = normalised(OPERATIONS["autocontrast"](to_pixels(images, RGB), torch.ones(60)))
    weak = rand_augment(stretched, seeded(), RGB, magnitude=0)
    assert (to_pixels(weak, RGB) - to_pixels(stretched, RGB)).abs().max() < 1.1 / 255
    with pytest.raises(SpecError, match="magnitude 0 to 10"):
        rand_augment(images, seeded(), RGB, magnitude=11)


def test_every_image_gets_its_own_operation() -> None:
    pixels = random_pixels(1, 3, (20, 20)).expand(500, -1, -1, -1)
    result = to_pixels(rand_augment(normalised(pixels), seeded(), RGB, operations=1), RGB)
    signed = [(name, s) for name in OPERATIONS for s in (-0.9, 0.9)]
    counts = dict.fromkeys(OPERATIONS, 0)
    explained = torch.zeros(500, dtype=torch.bool)
    for name, strength in signed:
        # through the same rounding of the normalisation as the result
        start = to_pixels(normalised(pixels[:1]), RGB)
        single = OPERATIONS[name](start, torch.tensor([strength])).clamp(0, 1)
        hit = (result - single).abs().flatten(1).amax(1) < 1e-4
        counts[name] += int((hit & ~explained).sum())
        explained |= hit
    assert explained.all()
    assert min(counts.values()) >= 18  # of 36 expected
    assert max(counts.values()) <= 60
    twice = rand_augment(normalised(pixels), seeded(), RGB, operations=2)
    assert len({tuple(v.flatten().tolist()) for v in twice}) > 150


def test_rand_augment_does_not_brighten() -> None:
    pixels = random_pixels(1500, 3, (8, 8))
    result = to_pixels(rand_augment(normalised(pixels), seeded(), RGB), RGB)
    change = float(result.mean() - pixels.mean())
    assert -0.12 < change < 0.0  # borders are black, and half of all pixels clip at white


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.floats(0.1, 3), st.integers(0, 99))
def test_mixup_is_the_combination_its_labels_say(n: int, alpha: float, seed: int) -> None:
    images = random_pixels(n, 2, (3, 4))
    before = images.clone()
    mixed, shares = mixup(images, torch.arange(n), seeded(seed), classes=n, alpha=alpha)
    torch.testing.assert_close(shares.sum(1), torch.ones(n))
    assert shares.min() >= 0
    torch.testing.assert_close(mixed, torch.einsum("ij,jchw->ichw", shares, images))
    assert torch.equal(images, before)
    again, _ = mixup(images, torch.arange(n), seeded(seed), classes=n, alpha=alpha)
    assert torch.equal(mixed, again)


def test_mixup_draws_from_beta_for_every_image() -> None:
    n = 2000
    target = torch.eye(2)[torch.zeros(n, dtype=torch.long)]
    target[1::2] = torch.tensor([0.0, 1.0])
    _, shares = mixup(torch.zeros(n, 1, 1, 1), target, seeded(), classes=2, alpha=0.2)
    own = (shares * target).sum(1)
    others = own[own < 1]  # of those whose partner has the other class
    assert others.mean().item() == pytest.approx(0.5, abs=0.05)
    assert others.var().item() == pytest.approx(0.25 / 1.4, abs=0.02)  # 1 / (4 (2 alpha + 1))
    assert 800 < len(others) < 1100


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(0, 99))
def test_cutmix_labels_are_the_pasted_area(n: int, h: int, w: int, seed: int) -> None:
    images = torch.arange(n).float().view(n, 1, 1, 1).expand(n, 2, h, w)
    mixed, shares = cutmix(images, torch.arange(n), seeded(seed), classes=n)
    torch.testing.assert_close(shares.sum(1), torch.ones(n))
    for label in range(n):
        area = (mixed[:, 0] == label).sum((1, 2)) / (h * w)
        torch.testing.assert_close(shares[:, label], area)
    for index, result in enumerate(mixed[:, 0]):
        pasted = result != index
        rows, columns = pasted.any(1), pasted.any(0)
        assert torch.equal(pasted, rows[:, None] & columns[None, :])  # a box ...
        assert all(int(line.int().diff().abs().sum()) <= 2 for line in (rows, columns))  # one piece


def test_cutmix_pastes_from_the_same_place_and_everywhere() -> None:
    images = random_pixels(400, 1, (8, 8))
    mixed, shares = cutmix(images, torch.arange(400), seeded(), classes=400)
    pasted = mixed != images
    partner = (shares - torch.diag(shares.diag())).argmax(1)
    assert torch.equal(mixed[pasted], images[partner][pasted])
    chance = pasted.float().mean((0, 1))
    assert chance.min() > 0.15
    torch.testing.assert_close(chance, chance.flip(0), atol=0.1, rtol=0)
    torch.testing.assert_close(chance, chance.flip(1), atol=0.1, rtol=0)


def test_mixing_can_be_repeated_on_shares() -> None:
    images = random_pixels(6)
    once, shares = mixup(images, torch.arange(6), seeded(0), classes=6)
    twice, shares = mixup(once, shares, seeded(1), classes=6, alpha=1.0)
    torch.testing.assert_close(twice, torch.einsum("ij,jchw->ichw", shares, images))
    with pytest.raises(DataError, match="classes are 0 to 4, got 5"):
        cutmix(images, torch.arange(6), seeded(), classes=5)
    with pytest.raises(SpecError, match="alpha must be positive"):
        mixup(images, torch.arange(6), seeded(), classes=6, alpha=0)


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
    augment = Augmentation(("crop_and_flip", "color_jitter"), RGB)
    result = augment(images, seeded(4))
    generator = seeded(4)
    expected = color_jitter(crop_and_flip(images, generator, RGB), generator, RGB)
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
    with pytest.raises(
        SpecError, match=r"one of horizontal_flip, .*drop_tokens, mixup, cutmix, got 'blur'"
    ):
        Augmentation(("shift", "blur"))
    with pytest.raises(SpecError, match="color_jitter works on pixel values"):
        Augmentation(("color_jitter",))
    with pytest.raises(SpecError, match="ImageSpec"):
        rand_augment(random_pixels(1), seeded(), None)
    with pytest.raises(DataError, match="1 or 3 channels, got 2"):
        rand_augment(random_pixels(1, 2), seeded(), GREY)
    with pytest.raises(DataError, match="a mean of 3 channels for 1"):
        crop_and_flip(random_pixels(1, 1), seeded(), RGB)
    with pytest.raises(DataError, match=r"attention_mask \(n, t\), got input_ids"):
        drop_tokens({"input_ids": torch.ones(2, 3)}, seeded())
    with pytest.raises(DataError, match="dict with an attention_mask, got a Tensor"):
        Augmentation(("drop_tokens",))(random_pixels(1), seeded())
    with pytest.raises(SpecError, match="area in"):
        random_resized_crop(random_pixels(1), seeded(), area=(0.0, 1.0))
    with pytest.raises(SpecError, match=r"hue by 0 to 0\.5"):
        color_jitter(random_pixels(1), seeded(), RGB, hue=0.6)
