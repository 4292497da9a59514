"""The nested code in torch, with straight-through gradients: what training sees."""

from __future__ import annotations

from itertools import repeat

import torch
from torch import Generator, Tensor

from t3c.quant.groups import STEPS
from t3c.spec import MAX_BITS, MIN_BITS

VIEWS = tuple(range(MIN_BITS, MAX_BITS + 1))  # each view has a scale of its own
CHUNK = 1 << 22  # weights whose views are fitted at once
TOLERANCE = 1e-3  # of a step: a group that reaches just over one keeps it


def row_scale(weight: Tensor, clip: Tensor | None = None) -> Tensor:
    """The code scale (rows,) of `weight` (rows, ...): a row's largest magnitude over 127.

    `clip` (rows,) in (0, 1] is the share of that magnitude the codes reach to. Rows next to nothing
    beside the largest have a grid that is next to nothing, not a vanishing one: engines divide
    biases by it.
    """
    largest = weight.detach().flatten(1).abs().amax(dim=1)
    floored = largest.clamp_min(max(1e-4 * float(largest.max()), 1e-8))
    return (floored if clip is None else floored * clip) / 127


def group_shares(weight: Tensor, group: int) -> Tensor:
    """Return how much of its row's grid each group of columns has: (rows, groups) of 1 to 255."""
    reach = 127 * row_scale(weight)[:, None]
    largest = weight.detach().reshape(len(weight), -1, group).abs().amax(dim=2)
    shares: Tensor = (STEPS * largest / reach - TOLERANCE).ceil().clamp(1, STEPS)
    return shares


def group_levels(weight: Tensor, group: int) -> Tensor:
    """Return the shares of the columns' grids, from 1/255 to 1, as (rows, columns)."""
    return (group_shares(weight, group) / STEPS).repeat_interleave(group, dim=1)


def midpoints(
    weight: Tensor, scale: Tensor, bits: int, generator: Generator | None = None
) -> Tensor:
    """The `bits`-bit view of `weight` in units of its scale: sign * m, or sign * (k + 1/2).

    With a generator the rounding is stochastic, between the two nearest values of the view.
    """
    rows = scale.reshape(-1, *([1] * (weight.dim() - 1)))
    weight = weight.detach()
    step, shift = 2.0 ** (MAX_BITS - bits), 0.5 if bits < MAX_BITS else 0.0
    level = (weight / rows).abs_()  # in place from here on: every weight passes here in every step
    if generator is None:
        level.round_().clamp_(max=127)
        if bits < MAX_BITS:
            level.div_(step).floor_()
    else:
        noise = torch.rand(weight.shape, generator=generator, device=generator.device)
        level.div_(step).sub_(shift).add_(noise.to(weight.device)).floor_()
        level.clamp_(0, 127 // int(step))
    return level.add_(shift).copysign_(weight)


def fit_gains(weight: Tensor, clip: Tensor | None = None, group: int | None = None) -> Tensor:
    """Log gains (views, rows) of the views' scales over s * 2^(8-q), by least squares."""
    weight = weight.detach()
    levels = None if group is None else group_levels(weight, group)
    even = weight if levels is None else weight / levels
    size = max(1, CHUNK // max(1, weight[0].numel()))
    parts = zip(torch.split(even, size), torch.split(row_scale(even, clip), size), strict=True)
    shares = repeat(None) if levels is None else torch.split(levels, size)
    fits = [_fit(r.flatten(1), s, x) for (r, s), x in zip(parts, shares, strict=False)]
    return torch.cat(fits, dim=1)


def _fit(weight: Tensor, scale: Tensor, levels: Tensor | None) -> Tensor:
    """Gains of all views from one count of each row's code magnitudes and of what they stand for.

    Signs cancel: a view's value and its weight have the same. Errors of weights that were divided
    by `levels` (rows, columns) count by their squares.
    """
    size = weight.abs()
    counts = torch.ones_like(size) if levels is None else levels.square()
    magnitude = (size / scale[:, None]).round().clamp(0, 127).long()
    rows = torch.arange(len(weight), device=weight.device)
    cell = (magnitude + 128 * rows[:, None]).flatten()
    count, total = (
        torch.bincount(cell, each.flatten().double(), minlength=128 * len(weight)).view(-1, 128)
        for each in (counts, counts * size)
    )
    gains = []
    for bits in VIEWS:
        step = 2 ** (MAX_BITS - bits)
        level = torch.arange(128, dtype=torch.float64, device=weight.device)
        if bits < MAX_BITS:
            level = torch.floor(level / step) + 0.5
        energy = count @ level.square()  # 0 for a row of zeros in 8 bits
        fitted = (total @ level) / energy.clamp_min(1e-12)
        gain = torch.where(energy > 0, fitted / (scale.double() * step), 1.0)
        gains.append(gain.clamp(0.25, 4.0).log())
    return torch.stack(gains).to(weight.dtype)


def view_scale(weight: Tensor, gains: Tensor, bits: int, clip: Tensor | None = None) -> Tensor:
    """The scale (rows,) of the `bits`-bit view; differentiable in `gains`."""
    nominal: Tensor = row_scale(weight, clip) * 2 ** (MAX_BITS - bits)
    return nominal * gains[VIEWS.index(bits)].exp()


def fake_quantize(
    weight: Tensor,
    gains: Tensor,
    bits: int,
    clip: Tensor | None = None,
    generator: Generator | None = None,
    group: int | None = None,
) -> Tensor:
    """The `bits`-bit view of `weight` (rows, ...), as a float tensor.

    The rounding passes gradients straight through to the weights the codes reach, and none to
    those that are clipped. A view is linear in its scale, whose gradient is exact on both. With a
    `group` so many columns of a matrix have a grid of their own.
    """
    if group is not None:
        levels = group_levels(weight, group)
        return fake_quantize(weight / levels, gains, bits, clip, generator) * levels
    rows = (-1, *([1] * (weight.dim() - 1)))
    code_scale = row_scale(weight, clip)
    scale = view_scale(weight, gains, bits, clip).reshape(rows)
    rounded = midpoints(weight, code_scale, bits, generator) * scale
    if clip is None:
        return rounded.sub_(weight.detach()).add_(weight)
    reached = weight.detach().abs() <= 127.5 * code_scale.reshape(rows)
    return torch.where(reached, weight + (rounded - weight.detach()), rounded)


def rounded_rows(weight: Tensor, bits: int) -> Tensor:
    """The `bits`-bit view of a weight (rows, ...) whose scale is the nominal one.

    Gradients go straight through.
    """
    scale = row_scale(weight)
    rows = scale.reshape(-1, *([1] * (weight.dim() - 1))) * 2 ** (MAX_BITS - bits)
    rounded: Tensor = midpoints(weight, scale, bits) * rows
    return rounded.sub_(weight.detach()).add_(weight)
