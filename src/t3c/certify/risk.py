"""Bounds on the mean of losses between 0 and 1, such as the share of flipped answers.

Drift has conformal bounds, on single samples; these are on a profile's mean, and hold with
probability 1 - delta over the draw of the samples, which are independent (Learn-then-Test).
"""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np

from t3c.certify.drift import Array
from t3c.errors import DataError, MissingExtraError, SpecError

HALVINGS = 60  # of an interval in [0, 1]: to the last bit of a float


def risk_bound(losses: Array, delta: float) -> float:
    """An upper bound on the mean loss, from losses (n,), that holds with probability 1 - delta.

    Clopper-Pearson, which is exact, for losses that are 0 or 1; Hoeffding-Bentkus for others.
    """
    _check(losses, 1, delta)
    if np.isin(losses, (0.0, 1.0)).all():
        return upper_share(int(losses.sum()), len(losses), delta)
    low, high = float(losses.mean()), 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _hoeffding_bentkus(losses, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def risk_bounds(losses: Array, delta: float) -> Array:
    """Upper bounds (profiles,) on the mean losses of (n, profiles), all holding at once.

    Each has its part of delta. Profiles go from the smallest to the largest, and a bound is raised
    to that of any larger profile, so that bounds fall along the chain.
    """
    _check(losses, 2, delta)
    bounds = [risk_bound(column, delta / losses.shape[1]) for column in losses.T]
    return np.asarray(np.maximum.accumulate(bounds[::-1])[::-1])


def certified_within(losses: Array, cap: float, delta: float) -> list[int]:
    """Which profiles of losses (n, profiles) have a mean within `cap`: none wrongly, at 1 - delta.

    Tested from the largest, last, profile down to the first that fails. Each test has all of delta:
    to be wrong at all, the first profile over the cap in this order has to pass.
    """
    _check(losses, 2, delta)
    if not 0 < cap < 1:
        raise SpecError(f"a cap on risk must be between 0 and 1, got {cap:g}")
    first = losses.shape[1]
    while first and risk_bound(losses[:, first - 1], delta) <= cap:
        first -= 1
    return list(range(first, losses.shape[1]))


def upper_share(count: int, samples: int, delta: float) -> float:
    """The Clopper-Pearson upper bound, at 1 - delta, on a share seen `count` times."""
    if count >= samples:
        return 1.0
    return float(special().betaincinv(count + 1, samples - count, 1 - delta))


def share_interval(count: int, samples: int, level: float = 0.95) -> tuple[float, float]:
    """The two-sided Clopper-Pearson interval of a share seen `count` times in `samples`."""
    tail = (1 - level) / 2
    low = 1 - upper_share(samples - count, samples, tail)
    return low, upper_share(count, samples, tail)


def special() -> ModuleType:
    """SciPy's special functions, or what to install."""
    try:
        import scipy.special
    except ImportError as missing:
        raise MissingExtraError("scipy", "calibrate") from missing
    return scipy.special


def _hoeffding_bentkus(losses: Array, mean: float) -> float:
    """A p-value of the true mean being over `mean`, for one at or over the mean of the losses."""
    count, seen = len(losses), float(losses.mean())
    if mean >= 1:
        return 0.0
    divergence = (1 - seen) * math.log((1 - seen) / (1 - mean))
    if seen > 0:
        divergence += seen * math.log(seen / mean)
    tail = float(special().bdtr(math.ceil(float(losses.sum())), count, mean))
    return min(math.exp(-count * max(divergence, 0.0)), math.e * tail)


def _check(losses: Array, dimensions: int, delta: float) -> None:
    if not 0 < delta < 1:
        raise SpecError(f"delta must be between 0 and 1, got {delta:g}")
    if losses.ndim != dimensions or not losses.size:
        wanted = "(n,)" if dimensions == 1 else "(n, profiles)"
        raise DataError(f"losses must be {wanted} and not empty, got shape {losses.shape}")
    if not ((losses >= 0) & (losses <= 1)).all():
        raise DataError("losses must be between 0 and 1")
