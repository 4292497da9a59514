"""Augmentations of training batches (paper E.1): a new batch out, all chance from one generator.

Images are (n, c, h, w), normalised as an `ImageSpec` says; every image is changed on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from t3c.errors import DataError, SpecError
from t3c.nn.inputs import Inputs
from t3c.spec import ImageSpec

Augment = Callable[[Inputs, Generator, ImageSpec | None], Inputs]


def horizontal_flip(
    images: Tensor, generator: Generator, image: ImageSpec | None = None, share: float = 0.5
) -> Tensor:
    """Images (n, c, h, w), a share of them mirrored left to right."""
    _check_images(images)
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
    _check_images(images)
    n, c, h, w = images.shape
    padded = images.new_zeros(n, c, h + 2 * padding, w + 2 * padding)
    if image is not None:
        mean, std = _statistics(image, images)
        padded = padded - (mean / std).to(images.dtype)
    padded[:, :, padding : padding + h, padding : padding + w] = images
    top, left = (_integers(generator, 2 * padding + 1, n, images) for _ in range(2))
    return horizontal_flip(_window(padded, top, left, (h, w)), generator, share=flip)


def shift(
    images: Tensor, generator: Generator, image: ImageSpec | None = None, pixels: int = 2
) -> Tensor:
    """Images (n, c, h, w), each rolled by up to `pixels` along both sides."""
    _check_images(images)
    n, _, h, w = images.shape
    top, left = (_integers(generator, 2 * pixels + 1, n, images) - pixels for _ in range(2))
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


def _uniform(
    generator: Generator, shape: tuple[int, ...], low: float, high: float, like: Tensor
) -> Tensor:
    """Float32 of `low` to `high`, whatever the dtype of the images, on their device."""
    drawn = torch.rand(shape, generator=generator, device=generator.device)
    return (low + (high - low) * drawn).to(like.device)


def _integers(generator: Generator, below: int, count: int, like: Tensor) -> Tensor:
    """`count` integers of 0 to `below` - 1."""
    drawn = torch.randint(below, (count,), generator=generator, device=generator.device)
    return drawn.to(like.device)


def _statistics(image: ImageSpec, images: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and std, each (1, c, 1, 1) or (1, 1, 1, 1)."""
    if len(image.mean) not in (1, images.shape[1]):
        raise DataError(f"a mean of {len(image.mean)} channels for {images.shape[1]} of the images")
    wide = torch.promote_types(images.dtype, torch.float32)
    mean, std = (
        torch.tensor(values, dtype=wide, device=images.device).view(1, -1, 1, 1)
        for values in (image.mean, image.std)
    )
    return mean, std


def _check_images(images: Tensor) -> None:
    """Refuse what is no batch of normalised images."""
    if images.dim() != 4 or not images.is_floating_point():
        shape = tuple(images.shape)
        raise DataError(f"images are floats (n, c, h, w), got {images.dtype} {shape}")


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
    "drop_tokens": _of_tokens(drop_tokens),
}


@dataclass(frozen=True)
class Augmentation:
    """The named augmentations in order; with no names the inputs come back as they are."""

    names: tuple[str, ...] = ()
    image: ImageSpec | None = None

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in AUGMENTATIONS:
                known = ", ".join(AUGMENTATIONS)
                raise SpecError(f"an augmentation is one of {known}, got {name!r}")

    def __call__(self, inputs: Inputs, generator: Generator) -> Inputs:
        for name in self.names:
            inputs = AUGMENTATIONS[name](inputs, generator, self.image)
        return inputs
