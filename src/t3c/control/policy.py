"""The deployed controller: from a budget token to a point of every unit's chain, in numpy alone.

Larger budgets never find smaller points, whatever the weights: those on the path of the budget
are not negative, so every step score rises with the budget, and where the scores of all steps
rise the peak of their sums moves up (Topkis). That holds in floating point too: each operation
below rounds monotonically, sums run in one fixed order, and peaks are compared exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from t3c.control.token import RESOURCES, About, Array, Token
from t3c.errors import DataError, SpecError
from t3c.spec import Level

SUMMARY_CLIP = 4.0  # standard deviations an input summary counts at most

_TANH_END, _TANH_STEPS = 10, 1024
_TANH = np.maximum.accumulate(
    np.tanh(np.arange(-_TANH_END * _TANH_STEPS, _TANH_END * _TANH_STEPS + 1) / _TANH_STEPS)
)


@dataclass(frozen=True)
class Wish:
    """A proposal for one unit: near the levels of its chain, not yet one of them."""

    level: float
    bits: float


@dataclass(frozen=True, eq=False)
class Policy:
    """The arrays of a controller, float32, for S steps in all, U units, H hidden, R resources.

    reach (R, knots): increments of the level of each resource along an even grid of limits, whose
    least level is the reach. inward (H, R), inward_bias (H,), device (devices, H), onward (H, H)
    and onward_bias (H,) are the network. slope (S,), lift (S, H) and threshold (S,) make the score
    of each step up a chain. summary (summarized steps, features), with the summary_mean and
    summary_std of the features, adds what the input says. wish_slope (U, 2), wish_lift (U, 2, H)
    and wish_bias (U, 2) propose the share of the top's level and bits.
    """

    about: About
    reach: Array
    inward: Array
    inward_bias: Array
    device: Array
    onward: Array
    onward_bias: Array
    slope: Array
    lift: Array
    threshold: Array
    summary: Array
    summary_mean: Array
    summary_std: Array
    wish_slope: Array
    wish_lift: Array
    wish_bias: Array

    def __post_init__(self) -> None:
        shapes = _shapes(self.about, *_sizes(self))
        for name, shape in shapes.items():
            array = np.array(getattr(self, name), dtype=np.float32)
            if array.shape != shape:
                raise SpecError(f"{name} must have shape {shape}, got {array.shape}")
            if not np.isfinite(array).all():
                raise SpecError(f"{name} is not finite")
            if name in BUDGET_PATH and (array < 0).any():
                raise SpecError(f"{name} is on the path of the budget and must not be negative")
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if (self.summary_std <= 0).any():
            raise SpecError("summary_std must be positive")

    def scores(
        self, token: Token, device: str | None = None, summary: Array | None = None
    ) -> Array:
        """The score of every step of every chain (S,): it rises with the token."""
        reach, hidden = self._budget(token, device)
        scores = self.slope.astype(float) * reach + _weigh(self.lift, hidden) - self.threshold
        if summary is not None and self.summary.size:
            scores[self.about.summary_rows] += _weigh(self.summary, self._standard(summary))
        return scores

    def indices(
        self, token: Token, device: str | None = None, summary: Array | None = None
    ) -> dict[str, int]:
        """Return where the logits of each unit peak, of equals the largest."""
        scores = self.scores(token, device, summary)
        return {unit: _peak(scores[rows]) for unit, rows in self.about.rows.items()}

    def points(
        self, token: Token, device: str | None = None, summary: Array | None = None
    ) -> dict[str, Level]:
        """The point of each unit's chain where its logits peak."""
        indices = self.indices(token, device, summary)
        return {unit: self.about.units[unit][index] for unit, index in indices.items()}

    def proposals(self, token: Token, device: str | None = None) -> dict[str, Wish]:
        """The continuous proposal of each unit; `project` finds the points."""
        reach, hidden = self._budget(token, device)
        rising = self.wish_slope.astype(float) * reach + _weigh(self.wish_lift, hidden)
        shares = 0.5 + 0.5 * _tanh((rising + self.wish_bias) / 2)  # the sigmoid
        tops = ((unit, points[-1]) for unit, points in self.about.units.items())
        return {
            unit: Wish(float(level * top.level), float(bits * top.bits))
            for (unit, top), (level, bits) in zip(tops, shares, strict=True)
        }

    def project(self, wishes: Mapping[str, Wish]) -> dict[str, Level]:
        """The point of each unit's chain that is nearest to its proposal."""
        units = self.about.units.items()
        return {unit: levels[nearest(levels, wishes[unit])] for unit, levels in units}

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Every array by its name."""
        return {name: getattr(self, name) for name in ARRAYS}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Array], about: About) -> Policy:
        """The policy of these arrays, checked as any other."""
        if set(tensors) != set(ARRAYS):
            odd = ", ".join(sorted(set(tensors) ^ set(ARRAYS)))
            raise SpecError(
                f"a policy has the arrays {', '.join(ARRAYS)}; missing or unknown: {odd}"
            )
        for name, array in tensors.items():
            if array.dtype != np.float32:
                raise SpecError(f"{name} must be float32, got {array.dtype}")
        return cls(about, **tensors)

    def _budget(self, token: Token, device: str | None) -> tuple[float, Array]:
        """The reach in 0..1 and the hidden layer (H,), both rising with the token."""
        limits = token.limits()
        if self.about.token == "scalar":
            limits[:] = limits.min()
        levels = np.minimum(np.cumsum(self.reach, axis=1, dtype=float), 1.0)
        at = limits * (levels.shape[1] - 1)
        reach = min(float(_between(level, x)) for level, x in zip(levels, at, strict=True))
        known = device in self.about.devices
        # A device nobody trained for is taken as the mean of those somebody did.
        place = (
            self.device[self.about.devices.index(device)]
            if known and device
            else (self.device.mean(axis=0, dtype=float))
        )
        first = _tanh(_weigh(self.inward, limits) + self.inward_bias + place)
        return reach, _tanh(_weigh(self.onward, first) + self.onward_bias)

    def _standard(self, summary: Array) -> Array:
        """A summary (features,) in clipped standard deviations."""
        if summary.shape != self.summary_mean.shape or not np.isfinite(summary).all():
            wanted = self.summary_mean.shape
            raise DataError(f"a summary is finite of shape {wanted}, got shape {summary.shape}")
        standard = (summary - self.summary_mean.astype(float)) / self.summary_std
        clipped: Array = np.clip(standard, -SUMMARY_CLIP, SUMMARY_CLIP)
        return clipped


ARRAYS = tuple(field.name for field in fields(Policy) if field.name != "about")
BUDGET_PATH = ("reach", "inward", "onward", "slope", "lift", "wish_slope", "wish_lift")


def summarize(x: Array) -> Array:
    """What is known of a batch (n, channels, ...) before the network runs, as a vector.

    Floats: the mean and the spread of every channel. Integers, (n, length): the share that is not
    zero, and the logarithm of the length.
    """
    if x.ndim < 2 or not x.size:
        raise DataError(f"a summary needs a batch of at least two axes, got shape {x.shape}")
    if np.issubdtype(x.dtype, np.integer):
        return np.array([np.count_nonzero(x) / x.size, math.log(x.shape[1])])
    axes = (0, *range(2, x.ndim))
    found = np.concatenate([x.mean(axis=axes, dtype=float), x.std(axis=axes, dtype=float)])
    if not np.isfinite(found).all():
        raise DataError("the input to summarize is not finite")
    return found


def nearest(levels: Sequence[Level], wish: Wish) -> int:
    """Return which level minimises |k - k^| / k_top + |q - q^| / q_top; of equals the last."""
    top = levels[-1]
    # Exact, so that ties are ties and a larger wish never finds a smaller level.
    level, bits, weight = Fraction(wish.level), Fraction(wish.bits), Fraction(top.level, top.bits)

    def distance(index: int) -> Fraction:
        mine = levels[index]
        return abs(mine.level - level) + weight * abs(mine.bits - bits)

    return min(reversed(range(len(levels))), key=distance)


def nearest_profile(points: Mapping[str, Level], profiles: Sequence[Mapping[str, Level]]) -> int:
    """Return which of nested profiles is nearest, by summed shares of the top's level and bits.

    Of equals the largest.
    """
    if not profiles or any(set(profile) != set(points) for profile in profiles):
        raise SpecError("the profiles must be of the units of the points, and at least one")
    for below, above in itertools.pairwise(profiles):
        if not all(below[unit] <= above[unit] for unit in points):
            raise SpecError("the profiles are not nested")
    top = profiles[-1]

    # |k - k'| - |k - k''| with k' >= k'' never rises with k, so what a larger profile loses against
    # a smaller one only falls as points grow. Exact, so that ties are ties.
    def distance(index: int) -> Fraction:
        return sum(
            (
                Fraction(
                    abs(getattr(p, axis) - getattr(points[unit], axis)), getattr(top[unit], axis)
                )
                for unit, p in profiles[index].items()
                for axis in ("level", "bits")
            ),
            Fraction(0),
        )

    return min(reversed(range(len(profiles))), key=distance)


def _peak(scores: Array) -> int:
    """Where 0 and the running sums of scores (J - 1,) peak; sums are exact, of equals the last."""
    best, steps = 0, scores.tolist()
    for index in range(1, len(steps) + 1):
        if math.fsum(steps[best:index]) >= 0:
            best = index
    return best


def _weigh(weights: Array, values: Array) -> Array:
    """weights (..., n) times values (n,), summed in the order they stand, which a BLAS may not."""
    if not values.size:
        return np.zeros(weights.shape[:-1])
    return np.cumsum(weights * values.astype(float), axis=-1)[..., -1]


def _tanh(x: Array) -> Array:
    """tanh to 1e-7, by a table: library versions need not round monotonically."""
    return _between(_TANH, (x + _TANH_END) * _TANH_STEPS)


def _between(levels: Array, position: Array) -> Array:
    """Linear between rising levels (n,) at positions in 0..n-1, rising to the last bit."""
    position = np.clip(position, 0, len(levels) - 1)
    below = np.minimum(position.astype(int), len(levels) - 2)
    low, high = levels[below], levels[below + 1]
    found: Array = np.minimum(low + (position - below) * (high - low), high)
    return found


def _sizes(policy: Policy) -> tuple[int, int, int]:
    """(knots, hidden, features) as the arrays have them."""
    sizes = [np.shape(array)[-1:] for array in (policy.reach, policy.inward_bias, policy.summary)]
    knots, hidden, features = (size[0] if size else 0 for size in sizes)
    if knots < 2 or hidden < 1:
        raise SpecError(f"reach needs 2 knots or more and a hidden unit, got {knots} and {hidden}")
    return knots, hidden, features


def _shapes(about: About, knots: int, hidden: int, features: int) -> dict[str, tuple[int, ...]]:
    units, steps = len(about.units), about.steps
    return {
        "reach": (len(RESOURCES), knots),
        "inward": (hidden, len(RESOURCES)),
        "inward_bias": (hidden,),
        "device": (len(about.devices), hidden),
        "onward": (hidden, hidden),
        "onward_bias": (hidden,),
        "slope": (steps,),
        "lift": (steps, hidden),
        "threshold": (steps,),
        "summary": (len(about.summary_rows), features),
        "summary_mean": (features,),
        "summary_std": (features,),
        "wish_slope": (units, 2),
        "wish_lift": (units, 2, hidden),
        "wish_bias": (units, 2),
    }
