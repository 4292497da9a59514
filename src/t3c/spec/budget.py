"""What a request may cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from t3c.errors import BudgetError
from t3c.spec.figures import QUANTILES


@dataclass(frozen=True)
class Budget:
    """What a request may cost, how far its answer may drift, what it may lose; None is no limit.

    `a <= b` is the partial order over the resource limits: every limit of `b` is at least as loose.
    `drift` is relative to the norm of the original's output, so 0.05 is five percent of it.
    `max_drop` is of the metric that the artifact's quality was measured by: a share of samples
    (0.005 is half a point of accuracy), of perplexity its growth (0.02 is two percent).
    `quantile` says of which latencies the limit is: p50, p90 or p99; the higher, the stricter.

    >>> Budget(latency_ms=2) <= Budget(latency_ms=3)
    True
    >>> Budget(latency_ms=2) <= Budget(latency_ms=3, size_mb=1)
    False
    >>> Budget(latency_ms=2, quantile="p90") <= Budget(latency_ms=2)
    True
    """

    latency_ms: float | None = None
    size_mb: float | None = None
    energy_mj: float | None = None
    drift: float | None = None
    max_drop: float | None = None
    quantile: str = "p50"

    def __post_init__(self) -> None:
        for name in ("latency_ms", "size_mb", "energy_mj", "drift", "max_drop"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise BudgetError(f"{name} must be a number, got {value!r}")
            if name == "max_drop" and not value >= 0:
                raise BudgetError(f"{name} must be 0 or more, got {value:g}")
            if name != "max_drop" and not value > 0:
                raise BudgetError(f"{name} must be positive, got {value:g}")
            if math.isinf(value):
                raise BudgetError(f"{name} must be finite: leave it out for no limit")
        if self.quantile not in QUANTILES:
            raise BudgetError(f"quantile must be {', '.join(QUANTILES)}, got {self.quantile!r}")

    @property
    def limits(self) -> tuple[float, float, float]:
        """(latency_ms, size_mb, energy_mj), a missing one as infinity."""
        raw = (self.latency_ms, self.size_mb, self.energy_mj)
        latency, size, energy = (math.inf if limit is None else limit for limit in raw)
        return latency, size, energy

    @property
    def limited(self) -> bool:
        """Whether any resource is limited."""
        return any(math.isfinite(limit) for limit in self.limits)

    @property
    def capped(self) -> bool:
        """Whether drift or loss is capped."""
        return self.drift is not None or self.max_drop is not None

    def __le__(self, other: Budget) -> bool:
        strict = other.latency_ms is None or self.quantile >= other.quantile
        return strict and all(a <= b for a, b in zip(self.limits, other.limits, strict=True))
