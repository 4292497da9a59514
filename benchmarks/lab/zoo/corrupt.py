"""Shifts of images (n, c, h, w), to see whether a monitor notices them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from t3c.errors import DataError, SpecError


def gaussian_noise(images: Tensor, size: float, seed: int) -> Tensor:
    """Images plus noise whose std is `size` times that of all the images together."""
    _check(images, "size", size)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(images.shape, generator=generator, dtype=images.dtype)
    return images + size * images.std(correction=0) * noise.to(images.device)


def blur(images: Tensor, sigma: float) -> Tensor:
    """Each channel convolved with a Gaussian of `sigma` pixels, reflected at the edges."""
    _check(images, "sigma", sigma)
    if sigma == 0:
        return images.clone()
    across = _blur_lines(images, sigma)
    return _blur_lines(across.mT, sigma).mT.contiguous()


def _blur_lines(images: Tensor, sigma: float) -> Tensor:
    """Images (n, c, h, w) convolved along w."""
    # A reflection leaves out the pixel at the edge, so it reaches less far than the image does.
    reach = min(math.ceil(4 * sigma), images.shape[-1] - 1)
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64)
    weights = torch.softmax(-((offsets / sigma) ** 2) / 2, dim=0).to(images)
    lines = F.pad(images.flatten(0, 2)[:, None], (reach, reach), mode="reflect")
    return F.conv1d(lines, weights[None, None]).view(images.shape)


def contrast(images: Tensor, factor: float) -> Tensor:
    """Images drawn towards their own mean for a factor under 1, away from it for one over 1."""
    _check(images, "factor", factor)
    return torch.lerp(images.mean(dim=(1, 2, 3), keepdim=True), images, factor)


# Of strengths that leave ResNet-20 right on some seven in ten of CIFAR-10's images.
CORRUPTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian_noise": partial(gaussian_noise, size=0.15, seed=0),
    "blur": partial(blur, sigma=0.7),
    "contrast": partial(contrast, factor=0.35),
}


def _check(images: Tensor, name: str, strength: float) -> None:
    if images.dim() != 4 or images.numel() == 0 or not images.is_floating_point():
        raise DataError(
            f"images are floats of shape (n, c, h, w), got {images.dtype} {tuple(images.shape)}"
        )
    if not (math.isfinite(strength) and strength >= 0):
        raise SpecError(f"{name} must be finite and not negative, got {strength}")
