"""Grids of 8 bits for activations: where a tensor's values lie, and the range that fits them best.

Rounding errs by a share of the step and clipping by what is cut off: a few outlying values are not
worth a coarser step for all others. A tensor that reaches much further on one side of zero, such as
the output of GELU, has a zero point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from t3c.quant.grid import LEAST, activation_grid

BINS = 4096  # on each side of zero; a grid of 8 bits has 127 steps there
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # of a range, tried
WORTH = 0.7  # of the squared error of a symmetric grid, for a zero point to be worth its time


@dataclass
class Spread:
    """A histogram of a tensor's values (2 * BINS,) over [-reach, reach], and their extremes."""

    low: float = math.inf
    high: float = -math.inf
    reach: float = 0.0
    counts: Tensor = field(default_factory=lambda: torch.zeros(2 * BINS))

    @property
    def seen(self) -> bool:
        """Return whether there was a value."""
        return self.low <= self.high

    def widen(self, value: Tensor) -> None:
        """Take the extremes of a tensor into account."""
        low, high = (float(bound) for bound in value.aminmax())
        self.low, self.high = min(self.low, low), max(self.high, high)

    def add(self, value: Tensor) -> None:
        """Count the values of a tensor; bins are joined in pairs where it reaches further."""
        self.widen(value)
        most = max(-self.low, self.high)
        if not 0 < most < math.inf:
            return
        if self.reach == 0.0:
            self.reach = 2.0 ** math.ceil(math.log2(most))
        while most > self.reach:
            self.reach *= 2
            joined = self.counts.view(-1, 2).sum(dim=1)
            quarter = torch.zeros(BINS // 2)
            self.counts = torch.cat([quarter, joined, quarter])
        self.counts += torch.histc(value.float(), 2 * BINS, -self.reach, self.reach)

    def fitted(self) -> tuple[float, float]:
        """Return the range (low, high) whose grid leaves the least squared error.

        It begins at 0 where no value is negative, and is symmetric where that is nearly as good.
        """
        if not self.counts.any() or max(-self.low, self.high) < LEAST:
            return self.low, self.high
        if self.low >= 0:
            return self._best([(0.0, share * self.high) for share in SHARES])[1]
        most = max(-self.low, self.high)
        even = self._best([(-share * most, share * most) for share in SHARES])
        uneven = self._best([(share * self.low, share * self.high) for share in SHARES])
        return uneven[1] if uneven[0] < WORTH * even[0] else even[1]

    def _best(self, ranges: list[tuple[float, float]]) -> tuple[float, tuple[float, float]]:
        return min((self._error(*limits), limits) for limits in ranges)

    def _error(self, low: float, high: float) -> float:
        """Return the summed squared error of rounding to the grid of a range."""
        width = self.reach / BINS
        middles = (torch.arange(2 * BINS) + 0.5) * width - self.reach
        scale, zero = activation_grid(low, high)
        step, start, limits = float(scale), int(zero), np.iinfo(zero.dtype)
        codes = ((middles / step).round() + start).clamp(limits.min, limits.max)
        rounded = (codes - start) * step
        return float(((middles - rounded).square() * self.counts).sum())
