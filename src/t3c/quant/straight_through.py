"""The nested code in torch, with straight-through gradients: what training sees."""

from __future__ import annotations

import torch
from torch import Tensor

from t3c.spec import MAX_BITS, MIN_BITS

VIEWS = tuple(range(MIN_BITS, MAX_BITS + 1))  # each view has a scale of its own


def row_scale(weight: Tensor) -> Tensor:
    """The code scale (rows,) of `weight` (rows, ...): a row's largest magnitude over 127.

    Rows next to nothing beside the largest have a grid that is next to nothing, not a vanishing
    one: engines divide biases by it.
    """
    largest = weight.detach().flatten(1).abs().amax(dim=1)
    return largest.clamp_min(max(1e-4 * float(largest.max()), 1e-8)) / 127


def midpoints(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The `bits`-bit view of `weight` in units of its scale: sign * m, or sign * (k + 1/2)."""
    rows = scale.reshape(-1, *([1] * (weight.dim() - 1)))
    sign = torch.where(torch.signbit(weight), -1.0, 1.0)
    magnitude = (weight.abs() / rows).round().clamp(0, 127)
    if bits < MAX_BITS:
        magnitude = torch.floor(magnitude / 2 ** (MAX_BITS - bits)) + 0.5
    return (sign * magnitude).detach()


def fit_gains(weight: Tensor) -> Tensor:
    """Log gains (views, rows) of the views' scales over s * 2^(8-q), by least squares."""
    scale = row_scale(weight)
    gains = []
    for bits in VIEWS:
        grid = midpoints(weight, scale, bits).flatten(1)
        energy = grid.square().sum(1)  # 0 for a row of zeros in 8 bits
        fitted = (grid * weight.detach().flatten(1)).sum(1) / energy.clamp_min(1e-12)
        nominal = scale * 2 ** (MAX_BITS - bits)
        gain = torch.where(energy > 0, fitted / nominal, 1.0)
        gains.append(gain.clamp(0.25, 4.0).log())
    return torch.stack(gains)


def view_scale(weight: Tensor, gains: Tensor, bits: int) -> Tensor:
    """The scale (rows,) of the `bits`-bit view; differentiable in `gains`."""
    nominal: Tensor = row_scale(weight) * 2 ** (MAX_BITS - bits)
    return nominal * gains[VIEWS.index(bits)].exp()


def fake_quantize(weight: Tensor, gains: Tensor, bits: int) -> Tensor:
    """The `bits`-bit view of `weight` (rows, ...), as a float tensor.

    The rounding passes gradients straight through to the weight; the row scale covers the largest
    weight, so nothing is clipped. A view is linear in its scale, whose gradient is exact.
    """
    scale = view_scale(weight, gains, bits).reshape(-1, *([1] * (weight.dim() - 1)))
    rounded = midpoints(weight, row_scale(weight), bits) * scale
    return weight + (rounded - weight.detach())
