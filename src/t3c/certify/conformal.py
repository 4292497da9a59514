"""Split conformal bounds on drift: the guarantee that is printed.

Exchangeable samples are all that is assumed. One bound per profile, all holding at once.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from t3c.certify.drift import Array
from t3c.errors import DataError, SpecError

# Quantiles a scale is fitted to: from the median to where a fifth of delta is left above.
LOWEST, HIGHEST, FITTED = 0.5, 0.2, 41


def conformal_quantile(scores: Array, delta: float) -> float:
    """The smallest score that a new exchangeable one stays under with probability >= 1 - delta."""
    if len(scores) < least_samples(delta):
        raise DataError(
            f"{len(scores)} certificate samples are too few for delta={delta:g}: "
            f"at least {least_samples(delta)} are needed"
        )
    if np.isnan(scores).any():
        raise DataError("a certificate cannot be made of drifts that are NaN")
    return float(np.sort(scores)[order(len(scores), delta) - 1])


def least_samples(delta: float) -> int:
    """The fewest samples that a bound at this delta can be made of."""
    if not 0 < delta < 1:
        raise SpecError(f"delta must be between 0 and 1, got {delta:g}")
    count = max(1, math.floor(1 / delta) - 1)
    while order(count, delta) > count:
        count += 1
    return count


def order(count: int, delta: float) -> int:
    """Which of `count` sorted scores, from 1, is the conformal quantile; over `count` if none."""
    return math.ceil((count + 1) * (1 - delta) - 1e-9)


def simultaneous_bounds(scaling: Array, scores: Array, delta: float) -> Array:
    """Bounds (profiles,) that a new sample's drifts stay under all at once.

    `scaling` (m, profiles) and `scores` (n, profiles) are drifts of two disjoint slices. Each
    profile is scaled by what the first says of it; the largest scaled drift of a sample is its
    score in the second. Profiles go from the smallest to the largest: a bound is raised to that of
    any larger profile, which costs no coverage and makes the bounds fall along the chain.
    """
    if scaling.ndim != 2 or scores.ndim != 2 or scaling.shape[1] != scores.shape[1]:
        raise DataError(f"drifts of shape {scaling.shape} and {scores.shape} do not match")
    if not scaling.size:
        raise DataError(f"drifts of shape {scaling.shape} cannot scale a certificate")
    if not (np.isfinite(scaling).all() and (scaling >= 0).all()):
        raise DataError("a certificate cannot be scaled by drifts that are not finite or under 0")
    scale = scales(scaling, delta)
    factor = conformal_quantile((scores / scale).max(axis=1), delta)
    return np.asarray(np.maximum.accumulate((factor * scale)[::-1])[::-1])


def scales(drifts: Array, delta: float) -> Array:
    """The size (profiles,) of each profile's drifts (m, profiles): its 1 - delta quantile.

    In proportion to these quantiles the worst ratio of a bound to its own quantile is the least
    there is, and what is left to lose is their noise: so they are read off a line through the upper
    half of the log-drifts against normal quantiles, the lines' slopes drawn together as far as
    their differences are noise. Whatever the scales are, the bounds hold.
    """
    chance = np.linspace(min(LOWEST, 1 - delta), 1 - HIGHEST * delta, FITTED)
    levels = np.quantile(drifts, chance, axis=0)
    scale = np.quantile(drifts, 1 - delta, axis=0, method="higher")
    fit = levels[0] > 0
    if fit.any():
        line = _line(np.log(levels[:, fit]), chance, delta, len(drifts))
        scale[fit] = np.clip(np.exp(line), levels[0, fit], drifts.max(axis=0)[fit])
    return _without_zeros(scale, drifts)


def _line(logs: Array, chance: Array, delta: float, samples: int) -> Array:
    """log-drift (profiles,) at 1 - delta, by lines through `logs` (quantiles, profiles)."""
    normal = np.array([NormalDist().inv_cdf(float(p)) for p in chance])
    away = normal - normal.mean()
    slope = away @ logs / (away @ away)
    noise, spread = float(np.mean(slope**2)) / samples, float(slope.var())
    keep = max(0.0, 1 - noise / spread) if spread > 0 else 0.0
    slope = slope.mean() + keep * (slope - slope.mean())
    return np.asarray(logs.mean(axis=0) + slope * (NormalDist().inv_cdf(1 - delta) - normal.mean()))


def _without_zeros(scale: Array, drifts: Array) -> Array:
    """The scales (profiles,), where one is 0 the profile's largest drift, else the least scale.

    A profile that never drifted here may do so later: a scale next to 0 would then make the
    bounds of all profiles enormous.
    """
    tiny = 1e-12 * float(drifts.max())
    scale = np.where(scale > tiny, scale, drifts.max(axis=0))
    positive = scale[scale > tiny]
    return np.where(scale > tiny, scale, positive.min() if len(positive) else 1.0)


def coverage(drifts: npt.NDArray[np.float64], bound: float) -> float:
    """The share of drifts (n,) within the bound."""
    return float(np.mean(drifts <= bound))
