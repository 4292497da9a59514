from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.certify.conformal import (
    conformal_quantile,
    coverage,
    least_samples,
    simultaneous_bounds,
)
from t3c.certify.drift import absolute_drift, relative_drift
from t3c.errors import DataError


def drifts(rng: np.random.Generator, n: int) -> np.ndarray:
    """Heavy-tailed drifts of three profiles that share a sample's difficulty."""
    shared = rng.lognormal(sigma=0.8, size=(n, 1))
    return shared * rng.lognormal(sigma=0.4, size=(n, 3)) * np.array([1.0, 0.3, 0.05])


def test_bounds_hold_for_all_profiles_at_once() -> None:
    rng = np.random.default_rng(0)
    held = []
    for _ in range(400):
        bounds = simultaneous_bounds(drifts(rng, 60), drifts(rng, 99), delta=0.1)
        held.append(np.mean((drifts(rng, 200) <= bounds).all(axis=1)))
    error = np.std(held) / np.sqrt(len(held))
    assert np.mean(held) >= 0.9 - 3 * error
    assert np.mean(held) <= 0.95


@given(st.integers(0, 10_000))
def test_bounds_fall_along_the_chain(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shuffled = drifts(rng, 60)[:, rng.permutation(3)]
    bounds = simultaneous_bounds(shuffled[:30], shuffled[30:], delta=0.2)
    assert np.all(np.diff(bounds) <= 0)


def test_the_quantile_is_the_conformal_one() -> None:
    scores = np.arange(1.0, 20.0)
    assert conformal_quantile(scores, 0.05) == 19.0
    assert conformal_quantile(scores, 0.1) == 18.0
    with pytest.raises(DataError, match="at least 19 are needed"):
        conformal_quantile(scores[:18], 0.05)
    for delta in (0.01, 0.03, 0.05, 0.1, 0.5, 0.9):
        least = least_samples(delta)
        conformal_quantile(np.arange(float(least)), delta)
        assert least == 1 or (least - 1 + 1) * (1 - delta) > least - 1


def test_drift_is_a_norm_over_all_but_the_batch() -> None:
    z = np.array([[[3.0, 0.0], [0.0, 4.0]]])
    np.testing.assert_allclose(absolute_drift(2 * z, z), [5.0])
    np.testing.assert_allclose(relative_drift(1.5 * z, z), [0.5])
    assert coverage(np.array([0.1, 0.2, 0.3, 0.4]), 0.3) == 0.75
    with pytest.raises(DataError, match="cannot be compared"):
        absolute_drift(z, z[0])
