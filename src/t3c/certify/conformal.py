"""Split conformal bounds on drift: the guarantee that is printed.

Exchangeable samples are all that is assumed. One bound per profile, all holding at once.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from t3c.certify.drift import Array
from t3c.errors import DataError


def conformal_quantile(scores: Array, delta: float) -> float:
    """The smallest score that a new exchangeable one stays under with probability >= 1 - delta."""
    if len(scores) < least_samples(delta):
        raise DataError(
            f"{len(scores)} certificate samples are too few for delta={delta:g}: "
            f"at least {least_samples(delta)} are needed"
        )
    return float(np.sort(scores)[_order(len(scores), delta) - 1])


def least_samples(delta: float) -> int:
    """The fewest samples that a bound at this delta can be made of."""
    count = max(1, math.floor(1 / delta) - 1)
    while _order(count, delta) > count:
        count += 1
    return count


def _order(count: int, delta: float) -> int:
    """Which of the sorted scores is the conformal quantile; over `count` if none is."""
    return math.ceil((count + 1) * (1 - delta) - 1e-9)


def simultaneous_bounds(scaling: Array, scores: Array, delta: float) -> Array:
    """Bounds (profiles,) that a new sample's drifts stay under all at once.

    `scaling` (m, profiles) and `scores` (n, profiles) are drifts of two disjoint slices. Each
    profile is scaled by its own quantile of the first; the largest scaled drift of a sample is its
    score in the second. Profiles go from the smallest to the largest: a bound is raised to that of
    any larger profile, which costs no coverage and makes the bounds fall along the chain.
    """
    if scaling.ndim != 2 or scores.ndim != 2 or scaling.shape[1] != scores.shape[1]:
        raise DataError(f"drifts of shape {scaling.shape} and {scores.shape} do not match")
    scale = np.maximum(np.quantile(scaling, 1 - delta, axis=0), 1e-12)
    factor = conformal_quantile((scores / scale).max(axis=1), delta)
    return np.asarray(np.maximum.accumulate((factor * scale)[::-1])[::-1])


def coverage(drifts: npt.NDArray[np.float64], bound: float) -> float:
    """The share of drifts (n,) within the bound."""
    return float(np.mean(drifts <= bound))
