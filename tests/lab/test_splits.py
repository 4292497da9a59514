from __future__ import annotations

import numpy as np
import pytest

from lab.splits import random_splits
from t3c.errors import DataError, SpecError


def drifts(rng: np.random.Generator, n: int) -> np.ndarray:
    shared = rng.lognormal(sigma=0.4, size=(n, 1))
    return shared * rng.lognormal(sigma=0.2, size=(n, 3)) * np.array([1.0, 0.3, 0.05])


def test_random_splits_cover_what_was_promised() -> None:
    pool = drifts(np.random.default_rng(0), 600)
    found = random_splits(pool, 0.1, splits=300)
    assert (found.splits, found.scaling, found.calibration, found.test) == (300, 100, 300, 200)
    assert found.coverage >= 0.9 - 3 * found.standard_error
    assert found.coverage <= 0.91 + 3 * found.standard_error
    assert 0 < found.standard_error < 0.005
    assert found.lowest >= found.coverage
    assert found == random_splits(pool, 0.1, splits=300)
    assert found != random_splits(pool, 0.1, splits=300, seed=1)


def test_random_splits_say_how_tight_bounds_are() -> None:
    pool = drifts(np.random.default_rng(0), 1200)
    found = random_splits(pool, 0.05, splits=100)
    for p95, mean, column in zip(found.to_p95, found.to_mean, pool.T, strict=True):
        assert p95 is not None
        assert mean is not None
        assert 1.0 < p95 < 1.3
        assert mean / p95 == pytest.approx(np.quantile(column, 0.95) / column.mean(), rel=0.05)


def test_a_profile_without_drift_has_no_ratio() -> None:
    pool = drifts(np.random.default_rng(0), 120)
    pool[:, 2] = 0.0
    found = random_splits(pool, 0.1, splits=10)
    assert found.to_p95[2] is None
    assert found.to_mean[2] is None
    assert found.to_p95[0] is not None


def test_a_pool_that_cannot_be_split_is_refused() -> None:
    pool = drifts(np.random.default_rng(0), 60)
    with pytest.raises(DataError, match="at least 19 are needed"):
        random_splits(pool[:30], 0.05)
    with pytest.raises(DataError, match="too few to be split"):
        random_splits(pool[:1], 0.05)
    with pytest.raises(DataError, match="finite"):
        random_splits(pool * np.nan, 0.1)
    with pytest.raises(SpecError, match="no test samples"):
        random_splits(pool, 0.1, scaling=0.5, calibration=0.5)
    with pytest.raises(SpecError, match="at least 2 splits"):
        random_splits(pool, 0.1, splits=1)
