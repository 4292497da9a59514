"""How an artifact is served: what clients may send, and what is held under load."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from t3c.errors import SpecError
from t3c.spec import Budget


@dataclass(frozen=True)
class Limits:
    """What a client may ask for; more is refused before it costs anything.

    `body_mb` is of a body, `json_mb` of its JSON, which holds up others while it is read. `rows`
    are samples of one request, `waiting` requests that are neither answered nor refused yet.
    `rate` is of one client address, in requests a second; None is no limit.
    """

    body_mb: float = 64.0
    json_mb: float = 4.0
    rows: int = 64
    waiting: int = 256
    rate: float | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and not 0 < value < math.inf:
                raise SpecError(f"{one.name} must be positive, got {value:g}")


@dataclass(frozen=True)
class ServeConfig:
    """What `t3c serve` does. `objective_ms` None is ten times what the largest profile takes,
    and at least 50 ms.

    `lanes` is how many requests run side by side, each on the engine's `threads`. `batch` is the
    most samples that run as one; None finds out where more stop helping. `fixed` serves one
    profile whatever the load. Load lets a larger profile serve again after `dwell` seconds.
    `watch` names what else lowers profiles: thermal, cpu, battery. `shadow` is the share of answers
    that the largest profile gives as well, while nothing waits, to see drift as it is.
    `drain_seconds` is how long the server goes on answering, no longer ready, once it is told to
    stop.
    """

    objective_ms: float | None = None
    budget: Budget = field(default_factory=Budget)
    lanes: int = 1
    batch: int | None = None
    fixed: str | None = None
    dwell: float = 2.0
    shadow: float = 0.01
    watch: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    drain_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.objective_ms is not None and not 0 < self.objective_ms < math.inf:
            raise SpecError(f"objective_ms must be positive, got {self.objective_ms:g}")
        for name in ("lanes", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name} must be at least 1, got {value}")
        if self.batch is not None and self.batch & (self.batch - 1):
            raise SpecError(f"batch must be a power of two, got {self.batch}")
        if not 0 <= self.shadow <= 1:
            raise SpecError(f"shadow must be from 0 to 1, got {self.shadow:g}")
        if not 0 <= self.drain_seconds < math.inf:
            raise SpecError(f"drain_seconds must not be negative, got {self.drain_seconds:g}")
        if not 0 < self.dwell < math.inf:
            raise SpecError(f"dwell must be positive, got {self.dwell:g}")
