"""What profiles a model is to have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from t3c.errors import SpecError


@dataclass(frozen=True)
class Goal:
    """Say which profiles to aim at; training and export take the same value.

    `profiles` is how many; fewer are shipped where fewer are worth it. `worst_drift` is the
    first-order drift, relative to the output, that the smallest profile may have. `size_weight` is
    what bytes count for against time when points are allocated to layers.
    """

    profiles: int = 5
    worst_drift: float = 0.15
    size_weight: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.profiles, int) or self.profiles < 1:
            raise SpecError(f"profiles must be at least 1, got {self.profiles}")
        if not 0 < self.worst_drift < math.inf:
            raise SpecError(f"worst_drift must be positive, got {self.worst_drift:g}")
        if not 0 <= self.size_weight < 1:
            raise SpecError(f"size_weight must be in [0, 1), got {self.size_weight:g}")
