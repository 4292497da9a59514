"""How an artifact is served: what clients may send, and what is held under load."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from t3c.errors import SpecError
from t3c.spec import Budget


@dataclass(frozen=True)
class Limits:
    """What a client may ask for; more is refused before it costs anything.

    `json_mb` is of a body's JSON, which holds up others while it is read, `bodies_mb` of all bodies
    that are there at once. `rows` are samples of
    one request, `waiting` requests that are neither answered nor refused yet. `rate` is of one
    client address, in requests a second, with a `burst` on top; None is no limit.
    """

    body_mb: float = 64.0
    json_mb: float = 4.0
    bodies_mb: float = 512.0
    rows: int = 64
    waiting: int = 256
    read_seconds: float = 10.0
    rate: float | None = None
    burst: int = 20

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True)
class Policy:
    """How load moves requests along the chain of profiles.

    `objective_ms` is what a request without a deadline of its own may take; a share `margin` of it
    is left for what the server does not see. A profile bears a load as long as a queue of random
    arrivals would keep all but a share `miss` of requests waiting for less than that. Load is
    counted over `window` seconds. Profiles go down at once, and up by one after `dwell` seconds,
    where the larger one is used to at most a share `easy` of what it bears. A backlog is to be
    worked off with a share `reserve` of its time to spare, for what comes meanwhile.
    """

    objective_ms: float
    margin: float = 0.1
    miss: float = 0.005
    window: float = 2.0
    dwell: float = 2.0
    easy: float = 0.85
    reserve: float = 0.5

    def __post_init__(self) -> None:
        _check_positive(self)
        for name in ("margin", "miss", "reserve"):
            if not getattr(self, name) < 1:
                raise SpecError(f"{name} must be below 1, got {getattr(self, name):g}")
        if self.easy > 1:
            raise SpecError(f"easy must be at most 1, got {self.easy:g}")

    @property
    def within_ms(self) -> float:
        """What the server itself may take."""
        return self.objective_ms * (1 - self.margin)


@dataclass(frozen=True)
class ServeConfig:
    """What `t3c serve` does. `objective_ms` None is ten times what the largest profile takes,
    and at least 50 ms.

    `lanes` is how many requests run side by side, each on the engine's `threads`. `batch` is the
    most samples that run as one; None finds out where more stop helping. `fixed` serves one
    profile whatever the load. `shadow` is the share of answers that the largest profile gives as
    well, while nothing waits, to see drift as it is. `drain_seconds` is how long the server goes
    on answering, no longer ready, once it is told to stop.
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


def _check_positive(config: Limits | Policy) -> None:
    for one in fields(config):
        value = getattr(config, one.name)
        if value is not None and not 0 < value < math.inf:
            raise SpecError(f"{one.name} must be positive, got {value:g}")
