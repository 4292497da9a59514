"""Augmentations of training batches (paper E.1): a new batch out, all chance from one generator.

Images are (n, c, h, w), normalised as an `ImageSpec` says; every image is changed on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from t3c.errors import DataError, SpecError
from t3c.nn.inputs import Inputs
from t3c.spec import ImageSpec
from t3c.train.losses import soft_targets
from t3c.train.randaugment import (
    blend,
    check_images,
    from_pixels,
    grey,
    integers,
    rand_augment,
    statistics,
    to_pixels,
    warp,
    widened,
)

TRIES = 10  # draws of a crop's shape before the largest that fits is taken

Augment = Callable[[Inputs, Generator, ImageSpec | None], Inputs]


def horizontal_flip(
    images: Tensor, generator: Generator, image: ImageSpec | None = None, share: float = 0.5
) -> Tensor:
    """Images (n, c, h, w), a share of them mirrored left to right."""
    check_images(images)
    mirrored = _uniform(generator, (len(images), 1, 1, 1), 0, 1, images) < share
    return torch.where(mirrored, images.flip(3), images)


def crop_and_flip(
    images: Tensor,
    generator: Generator,
    image: ImageSpec | None = None,
    padding: int = 4,
    flip: float = 0.5,
) -> Tensor:
    """Images (n, c, h, w) cut at random from themselves within a black border, a share mirrored.

    Black is the value of pixel 0, or 0 where no `image` tells the normalisation.
    """
    check_images(images)
    n, c, h, w = images.shape
    padded = images.new_zeros(n, c, h + 2 * padding, w + 2 * padding)
    if image is not None:
        mean, std = statistics(image, images)
        padded = padded - (mean / std).to(images.dtype)
    padded[:, :, padding : padding + h, padding : padding + w] = images
    top, left = (integers(generator, 2 * padding + 1, n, images) for _ in range(2))
    return horizontal_flip(_window(padded, top, left, (h, w)), generator, share=flip)


def shift(
    images: Tensor, generator: Generator, image: ImageSpec | None = None, pixels: int = 2
) -> Tensor:
    """Images (n, c, h, w), each rolled by up to `pixels` along both sides."""
    check_images(images)
    n, _, h, w = images.shape
    top, left = (integers(generator, 2 * pixels + 1, n, images) - pixels for _ in range(2))
    return _window(images, top, left, (h, w))


def _window(images: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]) -> Tensor:
    """Of each image the (h, w) window from its own corner on, wrapped around at the rims."""
    steps = (torch.arange(side, device=images.device) for side in size)
    rows, columns = (
        (first[:, None] + step) % side
        for first, step, side in zip((top, left), steps, images.shape[2:], strict=True)
    )
    each = torch.arange(len(images), device=images.device).view(-1, 1, 1)
    taken = images.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]]
    return taken.permute(0, 3, 1, 2).contiguous()


def random_resized_crop(
    images: Tensor,
    generator: Generator,
    image: ImageSpec | None = None,
    area: tuple[float, float] = (0.08, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Images (n, c, h, w), of each a part of random area and width to height, at the old size.

    A shape that does not fit is drawn again; after ten draws its longer side is cut to fit.
    """
    check_images(images)
    if not (0 < area[0] <= area[1] <= 1 and 0 < aspect[0] <= aspect[1]):
        raise SpecError(f"a crop has an area in (0, 1] and a positive aspect, got {area}, {aspect}")
    n, _, h, w = images.shape
    shares = _uniform(generator, (n, TRIES), *area, images)
    narrow, broad = map(math.log, aspect)
    ratios = _uniform(generator, (n, TRIES), narrow, broad, images).exp() * (h / w)
    sizes = torch.stack([(shares * ratios).sqrt(), (shares / ratios).sqrt()])  # of the sides
    fitting = (sizes <= 1).all(0).int().argmax(1)  # the first that fits; 0 where none does
    wide, high = sizes[:, torch.arange(n, device=images.device), fitting].clamp(max=1)
    right, down = (_uniform(generator, (n,), -1, 1, images) * (1 - side) for side in (wide, high))
    none = torch.zeros_like(wide)
    rows = torch.stack([wide, none, right, none, high, down], dim=1).view(-1, 2, 3)
    return warp(images, rows, padding="border")


def color_jitter(
    images: Tensor,
    generator: Generator,
    image: ImageSpec | None,
    brightness: float = 0.4,
    contrast: float = 0.4,
    saturation: float = 0.4,
    hue: float = 0.1,
) -> Tensor:
    """Images (n, c, h, w), each with factors of its own around 1, and a turn of hue around 0.

    The order of the four changes is drawn for the batch; grey images have no saturation or hue.
    """
    pixels = to_pixels(images, image)
    n = len(images)
    limits = (brightness, contrast, saturation, hue)
    if min(limits) < 0 or max(limits[:3]) > 1 or hue > 0.5:
        raise SpecError(f"factors change by 0 to 1 and hue by 0 to 0.5, got {limits}")
    draws = [_uniform(generator, (n,), -limit, limit, images) for limit in limits]
    changes: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, by: blend(torch.zeros_like(x), x, 1 + by),
        lambda x, by: blend(grey(x).mean((2, 3), keepdim=True), x, 1 + by),
        lambda x, by: blend(grey(x), x, 1 + by),
        turn_hue,
    ]
    for index in torch.randperm(4, generator=generator, device=generator.device).tolist():
        pixels = changes[index](pixels, draws[index])
    return from_pixels(pixels, image, images)


def turn_hue(pixels: Tensor, turns: Tensor) -> Tensor:
    """Pixels (n, 3, h, w) with their hue turned by `turns` (n,) of a full circle."""
    if pixels.shape[1] == 1:
        return pixels
    value, strongest = pixels.max(1)
    chroma = value - pixels.amin(1)
    safe = chroma.where(chroma > 0, 1)
    red, green, blue = pixels.unbind(1)
    sixths = torch.stack([(green - blue), (blue - red), (red - green)], 1) / safe[:, None]
    sixths = sixths.gather(1, strongest[:, None])[:, 0] + 2 * strongest
    sixths = sixths + 6 * turns.to(pixels.dtype).view(-1, 1, 1)
    # each channel falls from the value by the chroma, as far as the hue is from its own
    distances = [(sixths + offset) % 6 for offset in (5, 3, 1)]
    falls = torch.stack([torch.minimum(d, 4 - d).clamp(0, 1) for d in distances], 1)
    return (value[:, None] - chroma[:, None] * falls).clamp(0, 1)


def drop_tokens(
    inputs: Mapping[str, Tensor], generator: Generator, share: float = 0.1
) -> dict[str, Tensor]:
    """Inputs with a share of `attention_mask` (n, t) switched off, never the first token on."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.dim() != 2:
        raise DataError(f"drop_tokens takes an attention_mask (n, t), got {', '.join(inputs)}")
    dropped = _uniform(generator, tuple(mask.shape), 0, 1, mask) < share
    first = mask.ne(0).int().argmax(1, keepdim=True)  # the padding may be on the left
    return {**inputs, "attention_mask": mask.masked_fill(dropped.scatter(1, first, False), 0)}


def mixup(
    images: Tensor, target: Tensor, generator: Generator, *, classes: int, alpha: float = 0.2
) -> tuple[Tensor, Tensor]:
    """Each image (n, c, h, w) mixed with another, and its target in shares (n, classes)."""
    check_images(images)
    partner, kept = _partners(images, generator, alpha)
    mixed = _mix(widened(images), partner, kept).to(images.dtype)
    return mixed, _mix(soft_targets(target, classes), partner, kept)


def cutmix(
    images: Tensor, target: Tensor, generator: Generator, *, classes: int, alpha: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Each image (n, c, h, w) with a box of another, and its target in shares of the area."""
    check_images(images)
    n, _, h, w = images.shape
    partner, kept = _partners(images, generator, alpha)
    inside = []
    for side in (h, w):
        length = (side * (1 - kept).sqrt()).round()
        start = (_uniform(generator, (n,), 0, side, images) - length / 2).round()
        place = torch.arange(side, device=images.device)
        inside.append((place >= start[:, None]) & (place < (start + length)[:, None]))
    box = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    outside = 1 - box.float().mean((1, 2, 3))  # the rim may have cut the box
    pasted = torch.where(box, images[partner], images)
    return pasted, _mix(soft_targets(target, classes), partner, outside)


def _partners(images: Tensor, generator: Generator, alpha: float) -> tuple[Tensor, Tensor]:
    """For each image another's index, and from Beta(alpha, alpha) the share it keeps: (n,) each."""
    if not (alpha > 0 and math.isfinite(alpha)):
        raise SpecError(f"alpha must be positive, got {alpha:g}")
    partner = torch.randperm(len(images), generator=generator, device=generator.device)
    # torch draws from Beta with the global generator only
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    kept = torch.from_numpy(np.random.default_rng(seed).beta(alpha, alpha, len(images))).float()
    return partner.to(images.device), kept.to(images.device)


def _mix(values: Tensor, partner: Tensor, kept: Tensor) -> Tensor:
    kept = kept.view(-1, *[1] * (values.dim() - 1))
    return kept * values + (1 - kept) * values[partner]


def _uniform(
    generator: Generator, shape: tuple[int, ...], low: float, high: float, like: Tensor
) -> Tensor:
    """Float32 of `low` to `high`, whatever the dtype of the images, on their device."""
    drawn = torch.rand(shape, generator=generator, device=generator.device)
    return (low + (high - low) * drawn).to(like.device)


def _of_images(change: Callable[[Tensor, Generator, ImageSpec | None], Tensor]) -> Augment:
    def augment(inputs: Inputs, generator: Generator, image: ImageSpec | None) -> Tensor:
        if not isinstance(inputs, Tensor):
            kind = type(inputs).__name__
            raise DataError(f"augmentation is for images, one tensor (n, c, h, w), got a {kind}")
        return change(inputs, generator, image)

    return augment


def _of_tokens(change: Callable[[Mapping[str, Tensor], Generator], dict[str, Tensor]]) -> Augment:
    def augment(inputs: Inputs, generator: Generator, image: ImageSpec | None) -> dict[str, Tensor]:
        if not isinstance(inputs, Mapping):
            kind = type(inputs).__name__
            raise DataError(f"dropping tokens is for a dict with an attention_mask, got a {kind}")
        return change(inputs, generator)

    return augment


AUGMENTATIONS: dict[str, Augment] = {
    "horizontal_flip": _of_images(horizontal_flip),
    "crop_and_flip": _of_images(crop_and_flip),
    "shift": _of_images(shift),
    "random_resized_crop": _of_images(random_resized_crop),
    "color_jitter": _of_images(color_jitter),
    "rand_augment": _of_images(rand_augment),
    "drop_tokens": _of_tokens(drop_tokens),
}
MIXING = {"mixup": mixup, "cutmix": cutmix}  # these make a batch of a batch, labels with it
COLOURS = ("color_jitter", "rand_augment")  # these must know what is black and what is white


@dataclass(frozen=True)
class Augmentation:
    """The named augmentations in order; with no names the inputs come back as they are.

    Of the names in MIXING one is drawn for each batch; `__call__` leaves them to its caller.
    """

    names: tuple[str, ...] = ()
    image: ImageSpec | None = None

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in (*AUGMENTATIONS, *MIXING):
                known = ", ".join((*AUGMENTATIONS, *MIXING))
                raise SpecError(f"an augmentation is one of {known}, got {name!r}")
            if name in COLOURS and self.image is None:
                raise SpecError(f"{name} works on pixel values: give image=ImageSpec(...)")

    @property
    def single(self) -> tuple[str, ...]:
        """Return the names of those that change every sample on its own."""
        return tuple(name for name in self.names if name not in MIXING)

    @property
    def mixing(self) -> tuple[str, ...]:
        """Return the names of those that mix samples and their labels."""
        return tuple(name for name in self.names if name in MIXING)

    def __call__(self, inputs: Inputs, generator: Generator) -> Inputs:
        for name in self.single:
            inputs = AUGMENTATIONS[name](inputs, generator, self.image)
        return inputs
