"""Whether bounds on drift do what they promise: coverage on samples held out, and how tight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from t3c.certify.conformal import least_samples, order
from t3c.certify.drift import Array
from t3c.certify.risk import special
from t3c.errors import DataError, SpecError


def expected_coverage(
    n_test: int, n_calibration: int, delta: float, level: float = 0.95
) -> tuple[float, float]:
    """Where the coverage seen on `n_test` samples is expected, with probability `level` or more.

    The range of one split conformal bound, known before any coverage is seen: a bound made of
    `n_calibration` samples covers Beta(k, n + 1 - k) of all others, so the count is beta-binomial.
    That is as true of simultaneous bounds, whose score is one number a sample; ties, and bounds
    raised along the chain, can only lift the coverage above the range.
    """
    if n_test < 1 or n_calibration < least_samples(delta):
        raise DataError(
            f"no coverage to expect of {n_test} test and {n_calibration} calibration samples at "
            f"delta={delta:g}: at least 1 and {least_samples(delta)} are needed"
        )
    if not 0 < level < 1:
        raise SpecError(f"level must be between 0 and 1, got {level:g}")
    chances = _beta_binomial(n_test, order(n_calibration, delta), n_calibration)
    tail = (1 - level) / 2
    low = int(np.searchsorted(np.cumsum(chances), tail))
    high = n_test - int(np.searchsorted(np.cumsum(chances[::-1]), tail))
    return low / n_test, high / n_test


def _beta_binomial(n_test: int, k: int, n_calibration: int) -> Array:
    """The probabilities (n_test + 1,) of each count of test samples that are covered."""
    betaln = special().betaln
    count = np.arange(n_test + 1)
    ways = -np.log(n_test + 1) - betaln(n_test - count + 1, count + 1)
    rest = n_calibration + 1 - k
    return np.asarray(np.exp(ways + betaln(count + k, n_test - count + rest) - betaln(k, rest)))


@dataclass(frozen=True)
class Agreement:
    """Correlation of what was estimated with what was seen; None where there is none to speak of.

    `pearson` is of the values, `spearman` of their ranks.
    """

    pearson: float | None
    spearman: float | None


def agreement(estimates: Sequence[float] | Array, observed: Sequence[float] | Array) -> Agreement:
    """How well estimates (k,) follow observations (k,); None of fewer than 3 or of constants."""
    a, b = np.asarray(estimates, dtype=np.float64), np.asarray(observed, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape:
        raise DataError(f"estimates of shape {a.shape} do not match {b.shape} observed")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise DataError("estimates and observations must be finite")
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return Agreement(None, None)
    return Agreement(_pearson(a, b), _pearson(_ranks(a), _ranks(b)))


def _pearson(a: Array, b: Array) -> float:
    a, b = ((x - x.mean()) / np.ptp(x) for x in (a, b))
    return float(np.clip(a @ b / np.sqrt((a @ a) * (b @ b)), -1, 1))


def _ranks(values: Array) -> Array:
    """The rank of each value, equal ones all at the mean of theirs."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[where])
