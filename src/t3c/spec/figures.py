"""What is counted, measured and certified, and what pictures and texts are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from t3c.errors import SpecError

QUANTILES = ("p50", "p90", "p99")
LONGEST = 1e15  # ms


class Metric(StrEnum):
    """The metric of a task's quality; of agreement and neighbours, beside the original's own."""

    ACCURACY = "accuracy"
    AGREEMENT = "agreement"
    PERPLEXITY = "perplexity"
    NEIGHBOURS = "neighbours"


@dataclass(frozen=True)
class Cost:
    """Work of one inference at batch 1. `size_bytes` is what has to be stored to run it."""

    flops: int = 0
    moved_bytes: int = 0
    launches: int = 0
    size_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.launches + other.launches,
            self.size_bytes + other.size_bytes,
        )


@dataclass(frozen=True)
class Latency:
    """Quantiles of measured wall-clock times, in milliseconds; `ci95` is of the p50.

    `spread` is how far above the p50 that of the slowest block of rounds was, as a share of it.
    """

    p50: float
    p90: float
    p99: float
    ci95: tuple[float, float]
    samples: int
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.p50 <= self.p90 <= self.p99 or self.samples < 1:
            raise SpecError(f"latency quantiles must be positive and rise, got {self}")
        if not self.spread >= 0:
            raise SpecError(f"a latency's spread cannot be negative, got {self.spread:g}")
        if max(self.p99, self.spread) > LONGEST:
            raise SpecError(f"a latency must be at most {LONGEST:g} ms, got {self}")

    def at(self, quantile: str) -> float:
        """The latency at "p50", "p90" or "p99"."""
        if quantile not in QUANTILES:
            raise SpecError(f"a latency has the quantiles p50, p90 and p99, not {quantile!r}")
        return dict(zip(QUANTILES, (self.p50, self.p90, self.p99), strict=True))[quantile]


@dataclass(frozen=True)
class Bound:
    """Drift by one measure: its mean over the samples, and what is guaranteed of it.

    `epsilon` bounds the drift of a new sample, of the `flip` measure its mean.
    """

    mean: float
    epsilon: float

    def __post_init__(self) -> None:
        if not (self.mean >= 0 and self.epsilon >= 0):
            raise SpecError(f"drifts cannot be negative, got {self}")


@dataclass(frozen=True)
class Certificate:
    """How far a profile's outputs are, and can be, from the original's.

    Figures are of the drift ||z' - z|| relative to ||z||. `epsilon` is the guarantee: it holds with
    probability at least 1 - delta for a new sample exchangeable with the `samples` it was made of,
    for every profile of the artifact at once, on this engine executing these forms. `first_order`
    and `spectral` are estimates from some of the samples: the mean of the change that
    differentiation predicts, and the paper's sum of gains, residuals and activations, in its RMS
    form and, `spectral_pointwise`, for the sample it is largest for. `worst_case` is a bound for
    every input it was evaluated at, the largest of them here. What is not available is None, and
    `unavailable` says why. `measures` holds other measures of drift.
    """

    profile: str
    engine: str
    forms: str
    delta: float
    samples: int
    mean: float
    p95: float
    epsilon: float
    first_order: float | None = None
    spectral: float | None = None
    spectral_pointwise: float | None = None
    worst_case: float | None = None
    unavailable: str = ""
    measures: Mapping[str, Bound] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise SpecError(f"delta must be between 0 and 1, got {self.delta:g}")
        figures = [self.mean, self.p95, self.epsilon]
        estimates = (self.first_order, self.spectral, self.spectral_pointwise, self.worst_case)
        figures += [figure for figure in estimates if figure is not None]
        if min(figures) < 0 or self.samples < 1:
            raise SpecError(f"profile {self.profile!r}: drifts cannot be negative")


@dataclass(frozen=True)
class ImageSpec:
    """How a picture becomes the model's input: resized, scaled to 0..1, (value - mean) / std."""

    height: int
    width: int
    mean: tuple[float, ...] = field(default=(0.0,))
    std: tuple[float, ...] = field(default=(1.0,))

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise SpecError("an image has 1 or 3 channels, with a mean and a std for each")
        if not all(0 < side <= 8192 for side in (self.height, self.width)):
            raise SpecError(f"an image has sides of 1 to 8192, got {self.height}x{self.width}")
        if min(self.std) <= 0:
            raise SpecError("an image has positive stds")


@dataclass(frozen=True)
class TextSpec:
    """Which tokens a text begins with and ends at: `bos` is put before a prompt that does not
    begin with it, and none is written behind one of `stop`."""

    bos: int | None = None
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        given = self.stop if self.bos is None else (self.bos, *self.stop)
        if any(not 0 <= token < 2**31 for token in given):
            raise SpecError(f"tokens are whole numbers from 0, got {given}")
