"""RandAugment: every image goes through a few operations of its own, on pixel values 0..1.

Operations take pixels (n, c, h, w) of 1 or 3 channels and a strength (n,) of -1 to 1 for each
image, and return pixels. The sign is a direction where there is one; strength 0 changes nothing
but for `autocontrast` and `equalize`, which know no strength.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from t3c.errors import DataError, SpecError
from t3c.spec import ImageSpec

Operation = Callable[[Tensor, Tensor], Tensor]

STRONGEST = 10  # the magnitude at which an operation reaches the limits below
ROTATE = math.radians(30)
SHEAR = 0.3
TRANSLATE = 0.45  # of the side
ENHANCE = 0.9  # factors of 1 - 0.9 to 1 + 0.9
POSTERIZE = 4  # bits taken from 8
LUMA = (0.299, 0.587, 0.114)


def rand_augment(
    images: Tensor,
    generator: Generator,
    image: ImageSpec | None,
    operations: int = 2,
    magnitude: float = 9,
) -> Tensor:
    """Images (n, c, h, w), each changed by `operations` drawn for it alone (paper E.1).

    `magnitude` is on the scale of 0 to 10 that the limits of the operations are stated for.
    """
    if operations < 0 or not 0 <= magnitude <= STRONGEST:
        raise SpecError(
            f"rand_augment takes at least 0 operations of magnitude 0 to {STRONGEST}, "
            f"got {operations} of {magnitude:g}"
        )
    pixels = to_pixels(images, image)
    for _ in range(operations):
        choice = integers(generator, len(OPERATIONS), len(images), images)
        sign = integers(generator, 2, len(images), images) * 2 - 1
        pixels = _chosen(pixels, choice, (sign * magnitude / STRONGEST).to(pixels.dtype))
    return from_pixels(pixels, image, images)


def _chosen(pixels: Tensor, choice: Tensor, strength: Tensor) -> Tensor:
    """Each image by the operation its `choice` (n,) counts to."""
    result = pixels.clone()
    for index, operation in enumerate(OPERATIONS.values()):
        picked = (choice == index).nonzero().flatten()
        if len(picked):
            result[picked] = operation(pixels[picked], strength[picked]).clamp(0, 1)
    return result


def to_pixels(images: Tensor, image: ImageSpec | None) -> Tensor:
    """Normalised images as new pixel values 0..1, in at least 32 bits."""
    check_images(images)
    if image is None:
        raise SpecError("colours change on pixel values: give image=ImageSpec(...) with mean, std")
    if images.shape[1] not in (1, 3):
        raise DataError(f"colours are of 1 or 3 channels, got {images.shape[1]}")
    mean, std = statistics(image, images)
    return (widened(images) * std + mean).clamp(0, 1)


def from_pixels(pixels: Tensor, image: ImageSpec | None, like: Tensor) -> Tensor:
    """Pixel values 0..1 as normalised images of the dtype of `like`."""
    assert image is not None, "to_pixels refuses images without a mean"
    mean, std = statistics(image, like)
    return ((pixels - mean) / std).to(like.dtype)


def statistics(image: ImageSpec, images: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and std, each (1, c, 1, 1) or (1, 1, 1, 1)."""
    if len(image.mean) not in (1, images.shape[1]):
        raise DataError(f"a mean of {len(image.mean)} channels for {images.shape[1]} of the images")
    wide = torch.promote_types(images.dtype, torch.float32)
    mean, std = (
        torch.tensor(values, dtype=wide, device=images.device).view(1, -1, 1, 1)
        for values in (image.mean, image.std)
    )
    return mean, std


def check_images(images: Tensor) -> None:
    """Refuse what is no batch of normalised images."""
    if images.dim() != 4 or not images.is_floating_point():
        shape = tuple(images.shape)
        raise DataError(f"images are floats (n, c, h, w), got {images.dtype} {shape}")


def widened(images: Tensor) -> Tensor:
    """In at least 32 bits: coordinates and pixel levels are too coarse in fewer."""
    return images.to(torch.promote_types(images.dtype, torch.float32))


def integers(generator: Generator, below: int, count: int, like: Tensor) -> Tensor:
    """`count` integers of 0 to `below` - 1."""
    drawn = torch.randint(below, (count,), generator=generator, device=generator.device)
    return drawn.to(like.device)


def blend(other: Tensor, pixels: Tensor, factor: Tensor) -> Tensor:
    """`other` at factor 0, the pixels at 1, beyond them above; factors (n,), results in 0..1."""
    factor = factor.to(pixels.dtype).view(-1, 1, 1, 1)
    return (other + factor * (pixels - other)).clamp(0, 1)


def grey(pixels: Tensor) -> Tensor:
    """Lightness (n, 1, h, w) of pixels of 1 or 3 channels."""
    if pixels.shape[1] == 1:
        return pixels
    weights = torch.tensor(LUMA, dtype=pixels.dtype, device=pixels.device)
    return (pixels * weights.view(1, 3, 1, 1)).sum(1, keepdim=True)


def warp(images: Tensor, rows: Tensor, padding: str = "zeros") -> Tensor:
    """Images read, bilinearly, where (n, 2, 3) `rows` put each output position of -1..1."""
    wide = widened(images)
    grid = F.affine_grid(rows.to(wide), list(images.shape), align_corners=False)
    read = F.grid_sample(wide, grid, padding_mode=padding, align_corners=False)
    return read.to(images.dtype)


def _affine(pixels: Tensor, **entries: Tensor) -> Tensor:
    """The identity map with some of its entries xx, xy, xt, yx, yy, yt replaced, in pixels."""
    height, width = pixels.shape[2:]
    ones, zeros = pixels.new_ones(len(pixels)), pixels.new_zeros(len(pixels))
    unit = {"xx": ones, "xy": zeros, "xt": zeros, "yx": zeros, "yy": ones, "yt": zeros}
    values = unit | entries
    values["xy"] = values["xy"] * (height / width)  # -1..1 spans another length on each axis
    values["yx"] = values["yx"] * (width / height)
    return warp(pixels, torch.stack(list(values.values()), dim=1).view(-1, 2, 3))


def identity(pixels: Tensor, strength: Tensor) -> Tensor:
    return pixels


def autocontrast(pixels: Tensor, strength: Tensor) -> Tensor:
    """Every channel stretched to 0..1; one of a single value stays."""
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    span = high - low
    return torch.where(span > 0, (pixels - low) / span.where(span > 0, 1), pixels)


def equalize(pixels: Tensor, strength: Tensor) -> Tensor:
    """Every channel's 256 levels spread so that each is used as often as the others.

    The brightest level in use is left out of the count, so that it maps to white; a channel with
    fewer pixels than there are levels stays.
    """
    levels = (pixels * 255).round().long().flatten(2)
    counts = levels.new_zeros(*levels.shape[:2], 256)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    brightest = counts.gather(2, levels.amax(2, keepdim=True))
    step = (levels.shape[2] - brightest) // 255
    below = counts.cumsum(2) - counts
    table = ((below + step // 2) // step.clamp_min(1)).clamp(max=255)
    spread = table.gather(2, levels).view(pixels.shape).to(pixels.dtype) / 255
    return torch.where(step[..., None] > 0, spread, pixels)


def rotate(pixels: Tensor, strength: Tensor) -> Tensor:
    cos, sin = torch.cos(strength * ROTATE), torch.sin(strength * ROTATE)
    return _affine(pixels, xx=cos, xy=-sin, yx=sin, yy=cos)


def solarize(pixels: Tensor, strength: Tensor) -> Tensor:
    """Levels from a threshold on inverted: none at strength 0, all at 1."""
    threshold = (256 * (1 - strength.abs())).view(-1, 1, 1, 1)
    return torch.where((pixels * 255).round() >= threshold, 1 - pixels, pixels)


def posterize(pixels: Tensor, strength: Tensor) -> Tensor:
    """The lowest bits of the 8-bit levels cleared, up to four of them."""
    size = (2 ** (POSTERIZE * strength.abs()).round()).view(-1, 1, 1, 1)
    return ((pixels * 255).round() / size).floor() * size / 255


def color(pixels: Tensor, strength: Tensor) -> Tensor:
    return blend(grey(pixels), pixels, 1 + ENHANCE * strength)


def contrast(pixels: Tensor, strength: Tensor) -> Tensor:
    return blend(grey(pixels).mean((2, 3), keepdim=True), pixels, 1 + ENHANCE * strength)


def brightness(pixels: Tensor, strength: Tensor) -> Tensor:
    return blend(torch.zeros_like(pixels), pixels, 1 + ENHANCE * strength)


def sharpness(pixels: Tensor, strength: Tensor) -> Tensor:
    """Away from, or towards, a 3x3 mean that counts the centre five times; the rim stays."""
    if min(pixels.shape[2:]) < 3:
        return pixels
    kernel = pixels.new_ones(3, 3)
    kernel[1, 1] = 5
    channels = pixels.shape[1]
    kernel = (kernel / kernel.sum()).expand(channels, 1, 3, 3)
    smooth = pixels.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(pixels, kernel, groups=channels)
    return blend(smooth, pixels, 1 + ENHANCE * strength)


def shear_x(pixels: Tensor, strength: Tensor) -> Tensor:
    return _affine(pixels, xy=SHEAR * strength)


def shear_y(pixels: Tensor, strength: Tensor) -> Tensor:
    return _affine(pixels, yx=SHEAR * strength)


def translate_x(pixels: Tensor, strength: Tensor) -> Tensor:
    return _affine(pixels, xt=2 * TRANSLATE * strength)


def translate_y(pixels: Tensor, strength: Tensor) -> Tensor:
    return _affine(pixels, yt=2 * TRANSLATE * strength)


OPERATIONS: dict[str, Operation] = {
    operation.__name__: operation
    for operation in (
        identity,
        autocontrast,
        equalize,
        rotate,
        solarize,
        posterize,
        color,
        contrast,
        brightness,
        sharpness,
        shear_x,
        shear_y,
        translate_x,
        translate_y,
    )
}
