"""The values that travel between the folders: frozen, validated at construction, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from t3c.errors import BudgetError, SpecError

MIN_BITS, MAX_BITS = 2, 8


@dataclass(frozen=True)
class Budget:
    """What a request may cost and how far its answer may drift; None is no limit.

    `a <= b` is the partial order over the resource limits: every limit of `b` is at least as loose.
    `drift` is relative to the norm of the original's output, so 0.05 is five percent of it.

    >>> Budget(latency_ms=2) <= Budget(latency_ms=3)
    True
    >>> Budget(latency_ms=2) <= Budget(latency_ms=3, size_mb=1)
    False
    """

    latency_ms: float | None = None
    size_mb: float | None = None
    energy_mj: float | None = None
    drift: float | None = None

    def __post_init__(self) -> None:
        for name in ("latency_ms", "size_mb", "energy_mj", "drift"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise BudgetError(f"{name} must be a number, got {value!r}")
            if not value > 0:
                raise BudgetError(f"{name} must be positive, got {value:g}")
            if math.isinf(value):
                raise BudgetError(f"{name} must be finite: leave it out for no limit")

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

    def __le__(self, other: Budget) -> bool:
        return all(a <= b for a, b in zip(self.limits, other.limits, strict=True))


@dataclass(frozen=True)
class LayerPoint:
    """The rank and the bits of one layer; `a <= b` componentwise."""

    rank: int
    bits: int

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise SpecError(f"rank must be at least 1, got {self.rank}")
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise SpecError(f"bits must be in {MIN_BITS}..{MAX_BITS}, got {self.bits}")

    def __le__(self, other: LayerPoint) -> bool:
        return self.rank <= other.rank and self.bits <= other.bits


@dataclass(frozen=True)
class Menu:
    """The points one layer may take: a chain, each componentwise >= the one before."""

    points: tuple[LayerPoint, ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise SpecError("a menu needs at least one point")
        for below, above in zip(self.points, self.points[1:], strict=False):
            if below == above or not below <= above:
                raise SpecError(f"a menu is a chain, but {above} does not stand above {below}")

    @property
    def top(self) -> LayerPoint:
        return self.points[-1]

    def __iter__(self) -> Iterator[LayerPoint]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)


@dataclass(frozen=True)
class Profile:
    """One point per layer, by layer name; `a <= b` when it holds for every layer."""

    name: str
    points: Mapping[str, LayerPoint]

    def __post_init__(self) -> None:
        if not self.points:
            raise SpecError(f"profile {self.name!r} has no layers")
        object.__setattr__(self, "points", MappingProxyType(dict(self.points)))

    def __le__(self, other: Profile) -> bool:
        if self.points.keys() != other.points.keys():
            raise SpecError(f"profiles {self.name!r} and {other.name!r} have different layers")
        return all(point <= other.points[name] for name, point in self.points.items())

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted((n, p.rank, p.bits) for n, p in self.points.items()))))


@dataclass(frozen=True)
class ProfileChain:
    """The profiles of an artifact, smallest first, each <= the next."""

    profiles: tuple[Profile, ...]

    def __post_init__(self) -> None:
        if not self.profiles:
            raise SpecError("an artifact needs at least one profile")
        names = [profile.name for profile in self.profiles]
        if len(set(names)) != len(names):
            raise SpecError(f"profile names repeat: {', '.join(names)}")
        for below, above in zip(self.profiles, self.profiles[1:], strict=False):
            if not below <= above:
                raise SpecError(f"profile {below.name!r} does not stand below {above.name!r}")

    def __iter__(self) -> Iterator[Profile]:
        return iter(self.profiles)

    def __len__(self) -> int:
        return len(self.profiles)

    def __getitem__(self, name: str) -> Profile:
        for profile in self.profiles:
            if profile.name == name:
                return profile
        raise SpecError(f"no profile {name!r}: there are {', '.join(p.name for p in self)}")

    @property
    def top(self) -> Profile:
        return self.profiles[-1]


class Form(StrEnum):
    """How an engine executes a layer point."""

    FACTORED = "factored"
    DENSE = "dense"


class Kind(StrEnum):
    """What a layer computes."""

    LINEAR = "linear"
    CONV2D = "conv2d"


class Factorization(StrEnum):
    """How a layer's weight is stored below full rank."""

    NONE = "none"  # elastic in bits alone
    SVD = "svd"
    TUCKER2 = "tucker2"


@dataclass(frozen=True)
class LayerSpec:
    """The geometry of one elastic layer: enough to cost, store and assemble it without torch.

    `in_size` and `out_size` are those of one sample at the example's size: height and width of a
    convolution's pictures, (tokens, 1) of a linear layer.
    """

    name: str
    kind: Kind
    factorization: Factorization
    out_channels: int
    in_channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    in_size: tuple[int, int] = (1, 1)
    out_size: tuple[int, int] = (1, 1)
    tile: int = 8

    def __post_init__(self) -> None:
        sizes = [self.out_channels, self.in_channels, self.groups, self.tile, *self.kernel]
        sizes += [*self.stride, *self.dilation, *self.in_size, *self.out_size]
        if min(sizes) < 1 or min(self.padding) < 0:
            raise SpecError(f"{self.name}: sizes, strides and groups must be positive")
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise SpecError(f"{self.name}: channels do not divide into {self.groups} groups")

    @property
    def full_rank(self) -> int:
        if self.factorization is Factorization.TUCKER2:
            return max(self.out_channels, self.in_channels)
        return min(self.out_channels, math.prod(self.dense_shape[1:]))

    @property
    def in_positions(self) -> int:
        return math.prod(self.in_size)

    @property
    def out_positions(self) -> int:
        return math.prod(self.out_size)

    @property
    def dense_shape(self) -> tuple[int, ...]:
        return self._shape(self.out_channels, self.in_channels // self.groups, self.kernel)

    def channel_ranks(self, rank: int) -> tuple[int, int]:
        """The monotone schedule k -> (r_out, r_in), whole tiles, in proportion to the channels."""
        if self.factorization is not Factorization.TUCKER2:
            return rank, rank

        def share(channels: int) -> int:
            exact = rank * channels / self.full_rank
            return min(channels, self.tile * math.ceil(exact / self.tile))

        return share(self.out_channels), share(self.in_channels)

    def stage_shapes(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Weight shapes of the factored stages at `rank`, in order of execution.

        SVD: reduce (k, in), expand (out, k). Tucker-2: reduce (r_in, in), core (r_out, r_in, h, w),
        expand (out, r_out). Elastic in bits alone: the dense weight.
        """
        if not 1 <= rank <= self.full_rank:
            raise SpecError(f"{self.name}: rank {rank} is outside 1..{self.full_rank}")
        if self.factorization is Factorization.NONE:
            return (self.dense_shape,)
        r_out, r_in = self.channel_ranks(rank)
        reduce = self._shape(r_in, self.in_channels, (1, 1))
        expand = self._shape(self.out_channels, r_out, (1, 1))
        if self.factorization is Factorization.SVD:
            return reduce, expand
        return reduce, self._shape(r_out, r_in, self.kernel), expand

    def executed_shapes(self, point: LayerPoint, form: Form) -> tuple[tuple[int, ...], ...]:
        """Weight shapes an engine multiplies by when `point` runs in `form`."""
        if form is Form.DENSE or self.stored_dense(point):
            return (self.dense_shape,)
        return self.stage_shapes(point.rank)

    def stored_dense(self, point: LayerPoint) -> bool:
        """Whether an artifact keeps this point as one dense tensor, as it does at full rank."""
        return self.factorization is Factorization.NONE or point.rank >= self.full_rank

    def strided_stage(self) -> int:
        """Which factored stage carries stride, padding and dilation."""
        return 1 if self.factorization is Factorization.TUCKER2 else 0

    def _shape(self, out: int, into: int, kernel: tuple[int, int]) -> tuple[int, ...]:
        return (out, into) if self.kind is Kind.LINEAR else (out, into, *kernel)


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
    """Quantiles of measured wall-clock times, in milliseconds; `ci95` is of the p50."""

    p50: float
    p90: float
    p99: float
    ci95: tuple[float, float]
    samples: int

    def __post_init__(self) -> None:
        if not 0 < self.p50 <= self.p90 <= self.p99 or self.samples < 1:
            raise SpecError(f"latency quantiles must be positive and rise, got {self}")


@dataclass(frozen=True)
class Certificate:
    """How far a profile's outputs are, and can be, from the original's.

    All figures are of the drift ||z' - z|| relative to ||z||, except those named `absolute_`.
    `epsilon` holds with probability at least 1 - delta for a new sample exchangeable with the
    `samples` it was calibrated on, for every profile of the artifact at once, on this engine
    executing these forms.
    """

    profile: str
    engine: str
    forms: str
    delta: float
    samples: int
    mean: float
    first_order: float
    epsilon: float
    absolute_mean: float
    absolute_epsilon: float

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise SpecError(f"delta must be between 0 and 1, got {self.delta:g}")
        figures = (self.mean, self.first_order, self.epsilon)
        if min(*figures, self.absolute_mean, self.absolute_epsilon) < 0 or self.samples < 1:
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
