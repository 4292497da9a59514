from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.certify.conformal import (
    conformal_quantile,
    coverage,
    least_samples,
    scales,
    simultaneous_bounds,
)
from t3c.errors import DataError, SpecError


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


def test_five_bounds_are_tight_and_one_is_tighter() -> None:
    """Norms of errors that profiles have half in common, as nested profiles do."""
    rng = np.random.default_rng(0)

    def sampled(n: int) -> np.ndarray:
        shared, size = rng.normal(size=(n, 10)), rng.lognormal(sigma=0.3, size=n)
        own = rng.normal(size=(5, n, 10))
        far = np.linalg.norm(0.8 * shared + 0.6 * own, axis=2) * size
        return far.T * np.array([0.5, 0.3, 0.2, 0.12, 0.06])

    p95 = np.quantile(sampled(100_000), 0.95, axis=0)
    runs = [(sampled(100), sampled(500)) for _ in range(50)]
    five = [(simultaneous_bounds(scaling, scores, 0.05) / p95).max() for scaling, scores in runs]
    one = [simultaneous_bounds(a[:, :1], b[:, :1], 0.05)[0] / p95[0] for a, b in runs]
    plain = [_worst_by_plain_quantiles(a, b, 0.05, p95) for a, b in runs]
    assert np.mean(five) <= 1.25
    assert np.mean(one) <= 1.05
    assert np.max(one) <= 1.15
    assert np.mean(five) < np.mean(plain) - 0.02


def _worst_by_plain_quantiles(
    scaling: np.ndarray, scores: np.ndarray, delta: float, p95: np.ndarray
) -> float:
    scale = np.quantile(scaling, 1 - delta, axis=0)
    return float((conformal_quantile((scores / scale).max(axis=1), delta) * scale / p95).max())


def test_scales_are_the_quantiles_of_large_slices() -> None:
    rng = np.random.default_rng(0)
    size = np.exp(rng.normal(size=(20_000, 3)) * np.array([0.2, 0.5, 1.0]))
    for delta in (0.05, 0.1, 0.7):
        np.testing.assert_allclose(
            scales(size, delta), np.quantile(size, 1 - delta, axis=0), rtol=0.06
        )


def test_bounds_do_not_depend_on_the_unit_of_a_profile() -> None:
    rng = np.random.default_rng(0)
    unit = np.array([100.0, 10.0, 1e-3])
    a, b = drifts(rng, 60), drifts(rng, 99)
    bounds = simultaneous_bounds(a, b, 0.1)
    np.testing.assert_allclose(simultaneous_bounds(a * unit, b * unit, 0.1), bounds * unit)


def test_a_profile_that_never_drifted_does_not_blow_up_the_others() -> None:
    rng = np.random.default_rng(0)
    scaling, scores = drifts(rng, 60), drifts(rng, 99)
    before = simultaneous_bounds(scaling, scores, 0.1)
    scaling[:, 2] = 0.0
    scores[:, 2] = 0.0
    scores[:20, 2] = 1e-9
    after = simultaneous_bounds(scaling, scores, 0.1)
    np.testing.assert_allclose(after[:2], before[:2], rtol=0.1)
    zeros = np.zeros((30, 2))
    np.testing.assert_array_equal(simultaneous_bounds(zeros, zeros, 0.1), [0.0, 0.0])


def test_bounds_hold_for_drifts_with_many_ties() -> None:
    rng = np.random.default_rng(0)

    def flips(n: int) -> np.ndarray:
        return (rng.random((n, 1)) < np.array([0.2, 0.06, 0.0])).astype(float)

    held = []
    for _ in range(200):
        bounds = simultaneous_bounds(flips(40), flips(99), 0.1)
        assert np.all(bounds <= 1.0)
        held.append(np.mean((flips(100) <= bounds).all(axis=1)))
    assert np.mean(held) >= 0.9 - 3 * np.std(held) / np.sqrt(len(held))


def test_what_cannot_be_bounded_is_refused() -> None:
    good = np.ones((30, 2))
    with pytest.raises(DataError, match="do not match"):
        simultaneous_bounds(good, np.ones((30, 3)), 0.1)
    with pytest.raises(DataError, match="cannot scale"):
        simultaneous_bounds(good[:0], good, 0.1)
    with pytest.raises(DataError, match="not finite"):
        simultaneous_bounds(good * np.nan, good, 0.1)
    with pytest.raises(DataError, match="NaN"):
        simultaneous_bounds(good, good * np.nan, 0.1)
    for delta in (0.0, 1.0, -0.1):
        with pytest.raises(SpecError, match="delta must be between 0 and 1"):
            least_samples(delta)


def test_coverage_is_the_share_within() -> None:
    assert coverage(np.array([0.1, 0.2, 0.3, 0.4]), 0.3) == 0.75
