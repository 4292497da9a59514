"""The relaxed Gumbel-Top-k mask over a spectrum, and the schedule of its temperature."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from t3c.errors import SpecError


def soft_top_k(
    scores: Tensor, k: float, temperature: float, *, generator: torch.Generator | None = None
) -> Tensor:
    """A mask in (0, 1)^n of mass k over scores (n,), the logarithms of singular values.

    With a generator the scores get Gumbel noise, and as the temperature falls the mask becomes
    that of k components drawn without replacement, in proportion to their singular values;
    without one, that of the k largest. Scores of -inf are never selected: the mass is k or the
    number of the others, whichever is less. Gradients are those of the mask at constant mass.
    """
    if not (k > 0 and temperature > 0):
        raise SpecError(f"k and temperature must be positive, got {k} and {temperature}")
    alive = scores != -math.inf
    if k >= int(alive.sum()):
        return alive.to(scores.dtype)
    z = scores[alive].double()
    if generator is not None:
        drawn = torch.empty(z.shape, dtype=z.dtype, device=generator.device)
        z = z - drawn.exponential_(generator=generator).to(z.device).log()
    logits = (z - _threshold(z.detach(), k, temperature)) / temperature
    # At constant mass the threshold moves by the mean of dz, weighted by the slopes m (1 - m).
    slopes = (logits.sigmoid() * (-logits).sigmoid()).detach()
    slopes = slopes / slopes.sum().clamp_min(torch.finfo(slopes.dtype).tiny)
    moved = (slopes * (logits - logits.detach())).sum()
    mask = (logits - moved).sigmoid().to(scores.dtype)
    return torch.zeros_like(scores).masked_scatter(alive, mask)


def temperature_at(
    step: int, steps: int, start: float = 2.0, least: float = 0.3, decay: float = 0.5
) -> float:
    """The temperature at a step: a fall by the factor `decay` every `steps` (paper E.2)."""
    return max(least, start * math.pow(decay, step / steps))


def _threshold(z: Tensor, k: float, temperature: float) -> float:
    """t with sum sigmoid((z - t) / temperature) = k, 0 < k < n, by bisection."""
    share = k / len(z)
    shift = temperature * math.log(share / (1 - share))  # exact if all z were equal
    low, high = float(z.min()) - shift, float(z.max()) - shift
    while low < (middle := (low + high) / 2) < high:
        above = float(((z - middle) / temperature).sigmoid().sum()) > k
        low, high = (middle, high) if above else (low, middle)
    return high
