"""Coverage and tightness of conformal bounds over many random splits of one pool of drifts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from t3c.certify.conformal import simultaneous_bounds
from t3c.certify.drift import Array
from t3c.errors import DataError, SpecError


@dataclass(frozen=True)
class Splits:
    """What bounds did on many splits of one pool: means over the splits.

    `coverage` is the share of test samples within the bounds of all profiles at once, `lowest` the
    share within its bound of the profile that has the least. `to_p95` and `to_mean` (profiles,)
    are bounds over the 95th percentile and over the mean of the test samples' drifts, None where
    these are 0. `standard_error` is how far `coverage` is from its mean over all splits of this
    pool; another pool differs by more, which no splitting of this one can show.
    """

    splits: int
    scaling: int
    calibration: int
    test: int
    coverage: float
    standard_error: float
    lowest: float
    to_p95: tuple[float | None, ...]
    to_mean: tuple[float | None, ...]


def random_splits(
    drifts: Array,
    delta: float,
    splits: int = 1000,
    seed: int = 0,
    scaling: float = 1 / 6,
    calibration: float = 1 / 2,
) -> Splits:
    """Split drifts (n, profiles) anew, each time into scaling, calibration and the rest as a test.

    Random splits make any pool exchangeable, so this checks the bounds and how tight they are; that
    the data to come are like the pool, it cannot.
    """
    first, second = _parts(drifts, splits, scaling, calibration)
    rng = np.random.default_rng(seed)
    profiles = drifts.shape[1]
    held = np.empty(splits)
    within, bounds, p95, means = (np.empty((splits, profiles)) for _ in range(4))
    for index in range(splits):
        mixed = drifts[rng.permutation(len(drifts))]
        test = mixed[first + second :]
        bounds[index] = simultaneous_bounds(mixed[:first], mixed[first : first + second], delta)
        inside = test <= bounds[index]
        held[index], within[index] = inside.all(axis=1).mean(), inside.mean(axis=0)
        p95[index], means[index] = np.quantile(test, 0.95, axis=0), test.mean(axis=0)
    return Splits(
        splits=splits,
        scaling=first,
        calibration=second,
        test=len(drifts) - first - second,
        coverage=float(held.mean()),
        standard_error=float(held.std(ddof=1) / np.sqrt(splits)),
        lowest=float(within.mean(axis=0).min()),
        to_p95=_mean_ratios(bounds, p95),
        to_mean=_mean_ratios(bounds, means),
    )


def _parts(drifts: Array, splits: int, scaling: float, calibration: float) -> tuple[int, int]:
    """Return how many samples scale and how many calibrate."""
    if drifts.ndim != 2 or not drifts.size or not np.isfinite(drifts).all():
        raise DataError(f"drifts must be (n, profiles) and finite, got shape {drifts.shape}")
    if splits < 2:
        raise SpecError(f"a standard error needs at least 2 splits, got {splits}")
    if not (scaling > 0 and calibration > 0 and scaling + calibration < 1):
        raise SpecError(f"shares {scaling:g} and {calibration:g} leave no test samples")
    first, second = max(1, int(len(drifts) * scaling)), int(len(drifts) * calibration)
    if len(drifts) <= first + second:
        raise DataError(f"{len(drifts)} samples are too few to be split")
    return first, second


def _mean_ratios(bounds: Array, of: Array) -> tuple[float | None, ...]:
    """Return the mean over splits of bounds (splits, profiles) over `of`, where that is not 0."""
    return tuple(
        float(np.mean(bound[size > 0] / size[size > 0])) if (size > 0).any() else None
        for bound, size in zip(bounds.T, of.T, strict=True)
    )
