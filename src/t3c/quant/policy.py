"""Bits tied to the rank: a layer that keeps more directions keeps them more precisely."""

from __future__ import annotations

import math
from dataclasses import dataclass

from t3c.errors import SpecError
from t3c.spec import MAX_BITS, MIN_BITS


@dataclass(frozen=True)
class RankTiedBits:
    """q(k) = min(highest, floor(a ln k + b)), never under 2 bits, monotone in k: paper B.3."""

    a: float = 1.0
    b: float = 2.0
    highest: int = MAX_BITS
    offsets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (self.a >= 0 and math.isfinite(self.a) and math.isfinite(self.b)):
            raise SpecError(f"a must be at least 0 and both finite, got a={self.a:g}, b={self.b:g}")
        if not MIN_BITS <= self.highest <= MAX_BITS:
            raise SpecError(f"highest must be in {MIN_BITS}..{MAX_BITS}, got {self.highest}")

    def bits(self, rank: int) -> int:
        """The bits of a layer at `rank`."""
        if rank < 1:
            raise SpecError(f"rank must be at least 1, got {rank}")
        return math.floor(min(max(self.a * math.log(rank) + self.b, MIN_BITS), self.highest))

    def allowed(self, rank: int, choices: tuple[int, ...]) -> int:
        """The largest choice within the bits of `rank`, or the smallest if none is."""
        if not choices:
            raise SpecError("no bits to choose from")
        bits = self.bits(rank)
        return max((choice for choice in choices if choice <= bits), default=min(choices))
