"""What columns are settled to while others make up for it: rounded, or made zero."""

from __future__ import annotations

import torch
from torch import Tensor

from t3c.errors import SpecError
from t3c.quant.compensate import Rule, Settle

SHRINKS = torch.linspace(1.0, 0.4, 31).tolist()


def rounding(scale: Tensor, top: int) -> Rule:
    """Columns rounded to integers of at most `top` times each row's scale (g, m)."""

    def rule(weights: Tensor, stiffness: Tensor) -> Settle:
        return lambda index, column: (column / scale).round().clamp(-top, top) * scale

    scale = scale.double()
    return rule


def group_rounding(top: int, scales: list[Tensor]) -> Rule:
    """Columns rounded as `rounding` has it, each block with the scales (g, m) best for what its
    columns have become by then; these are added to `scales`."""

    def rule(weights: Tensor, stiffness: Tensor) -> Settle:
        scale = clipped_scale(weights, top)
        scales.append(scale)
        return rounding(scale, top)(weights, stiffness)

    return rule


def zeroing(sparsity: float) -> Rule:
    """A share of each block's weights made zero: those whose loss costs least."""
    if not 0 <= sparsity <= 1:
        raise SpecError(f"sparsity must be in [0, 1], got {sparsity:g}")

    def rule(weights: Tensor, stiffness: Tensor) -> Settle:
        cost = (weights.square() * stiffness[:, None]).flatten()
        kept = torch.ones_like(cost)
        kept[cost.argsort(stable=True)[: round(sparsity * len(cost))]] = 0
        kept = kept.reshape(weights.shape)
        return lambda index, column: column * kept[:, :, index]

    return rule


@torch.no_grad()
def clipped_scale(weight: Tensor, top: int) -> Tensor:
    """The scale of each row of a weight (..., n) that rounds it with the least squared error."""
    widest = (weight.abs().amax(-1) / top).clamp_min(1e-12)
    best, least = widest, torch.full_like(widest, torch.inf)
    for shrink in SHRINKS:
        scale = shrink * widest
        rounded = (weight / scale[..., None]).round().clamp(-top, top) * scale[..., None]
        error = (rounded - weight).square().sum(-1)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best
