"""Uniform grids with learned scales and zero points, in torch; no part of the nested code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from t3c.errors import DataError, SpecError
from t3c.spec import MAX_BITS, MIN_BITS


@dataclass(frozen=True)
class Grid:
    """A grid of `bits`-bit integers and what shares a scale: the tensor, an output row, a group."""

    bits: int
    symmetric: bool = True
    group: int | None = None
    per: Literal["tensor", "channel", "group"] = "channel"

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise SpecError(f"bits must be in {MIN_BITS}..{MAX_BITS}, got {self.bits}")
        if self.per not in ("tensor", "channel", "group"):
            raise SpecError(f"per must be 'tensor', 'channel' or 'group', got {self.per!r}")
        if (self.per == "group") != (self.group is not None):
            raise SpecError(f"per={self.per!r} does not go with group={self.group}")
        if self.group is not None and self.group < 1:
            raise SpecError(f"group must be at least 1, got {self.group}")

    @property
    def ends(self) -> tuple[int, int]:
        """The lowest and the highest integer."""
        top = 2 ** (self.bits - 1) - 1
        return (-top, top) if self.symmetric else (0, 2**self.bits - 1)

    def table(self, weight: Tensor) -> tuple[int, int]:
        """The shape of the scales of `weight`: (1 or rows, 1 or groups)."""
        if self.per == "tensor":
            return 1, 1
        inner = weight[0].numel()
        return len(weight), -(-inner // (self.group or inner))


def fit_uniform(weight: Tensor, grid: Grid, percentile: float = 100.0) -> tuple[Tensor, Tensor]:
    """Log scales and zero points, both `grid.table(weight)`, that cover `percentile` of |weight|.

    Groups run along a row's flattened input; the last one may be shorter.
    """
    if not 0 < percentile <= 100:
        raise SpecError(f"percentile must be in (0, 100], got {percentile:g}")
    if not weight.numel() or not bool(torch.isfinite(weight).all()):
        raise DataError(f"a weight of shape {tuple(weight.shape)} is empty or not finite")
    flat = weight.detach().reshape(grid.table(weight)[0], -1)
    lowest, highest = grid.ends
    scales, zeros = [], []
    for cell in torch.split(flat, grid.group or flat.shape[1], dim=1):
        bound = _percentile(cell.abs(), percentile)
        if grid.symmetric:
            low, high = -bound, bound
        else:  # zero stays inside, so that padding and pruned weights are exact
            low = torch.maximum(cell.amin(1), -bound).clamp_max(0)
            high = torch.minimum(cell.amax(1), bound).clamp_min(0)
        scale = ((high - low) / (highest - lowest)).clamp_min(1e-8)  # zeros too have a grid
        scales.append(scale.log())
        zeros.append((lowest - low / scale).round() if not grid.symmetric else 0 * scale)
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def uniform_quantize(
    weight: Tensor,
    log_scale: Tensor,
    zero: Tensor,
    grid: Grid,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`weight` (rows, ...) on the grid, as floats; a `generator` makes the rounding stochastic.

    With u = w / s and the integer n = clip(round(u) + round(zero)), the gradients are

        n not clipped:  d/dw = 1    d/ds = round(u) - u    d/dzero = 0
        n clipped:      d/dw = 0    d/ds = n - zero        d/dzero = -s

    A symmetric grid ignores `zero`.
    """
    table = grid.table(weight)
    if log_scale.shape != table or zero.shape != table:
        raise DataError(
            f"a weight of shape {tuple(weight.shape)} has scales and zero points of shape {table}, "
            f"got {tuple(log_scale.shape)} and {tuple(zero.shape)}"
        )
    flat = weight.reshape(len(weight), -1)
    size, inner = grid.group or flat.shape[1], flat.shape[1]
    scale = log_scale.exp().repeat_interleave(size, 1)[:, :inner]
    shift = zero.repeat_interleave(size, 1)[:, :inner]
    shift = torch.zeros_like(shift) if grid.symmetric else _through(shift.round(), shift)
    unit = flat / scale
    if generator is None:
        rounded = unit.round()
    else:  # not floor(unit + chance): near 127 the sum of float32 rounds up by itself
        chance = torch.rand(unit.shape, generator=generator, dtype=unit.dtype, device=unit.device)
        rounded = unit.floor() + (chance < unit - unit.floor())
    integer = (_through(rounded, unit) + shift).clamp(*grid.ends)
    return ((integer - shift) * scale).reshape(weight.shape)


def _through(exact: Tensor, value: Tensor) -> Tensor:
    """`exact`, with the gradient of `value`."""
    return exact.detach() + (value - value.detach())


def _percentile(magnitude: Tensor, percentile: float) -> Tensor:
    """The percentile of each row, interpolated; `torch.quantile` refuses more than 2^24 values."""
    count = magnitude.shape[1]
    place = (1 - percentile / 100) * (count - 1)
    top = magnitude.topk(min(count, int(place) + 2), dim=1).values
    bound = torch.lerp(top[:, int(place)], top[:, -1], place - int(place))
    return torch.where(bound > 0, bound, top[:, 0])  # mostly zeros: keep the few that are not
