"""Outlier channels: the few output rows of largest magnitude, kept in more bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from t3c.errors import DataError, SpecError
from t3c.spec import MAX_BITS, MIN_BITS


def outlier_channels(weight: Tensor, fraction: float) -> Tensor:
    """The mask (rows,) of the ceil(fraction * rows) rows with the largest weights."""
    if not 0 <= fraction <= 1:
        raise SpecError(f"fraction must be in 0..1, got {fraction:g}")
    rows = len(weight)
    count = math.ceil(fraction * rows - 1e-9)  # 0.07 * 100 is a little over 7
    largest = weight.detach().reshape(rows, -1).abs().amax(1)
    mask = torch.zeros(rows, dtype=torch.bool, device=weight.device)
    mask[largest.argsort(descending=True, stable=True)[:count]] = True
    return mask


def split_bits(
    weight: Tensor, mask: Tensor, quantize: Callable[[Tensor, int], Tensor], bits: int, extra: int
) -> Tensor:
    """`weight` (rows, ...) with the rows in `mask` (rows,) quantized in `extra` more bits.

    The two parts are quantized apart, so outliers do not stretch a scale shared by the others.
    """
    if mask.shape != weight.shape[:1]:
        raise DataError(f"{len(weight)} rows have no mask of shape {tuple(mask.shape)}")
    split = torch.empty_like(weight)
    for part, width in ((mask, _wider(bits, extra)), (~mask, bits)):
        if part.any():
            split[part] = quantize(weight[part], width)
    return split


def _wider(bits: int, extra: int) -> int:
    if not MIN_BITS <= bits <= MAX_BITS or extra < 0:
        raise SpecError(
            f"bits must be in {MIN_BITS}..{MAX_BITS} and extra at least 0, got {bits} and {extra}"
        )
    return min(MAX_BITS, bits + extra)
