from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from t3c.certify.conformal import conformal_quantile, simultaneous_bounds
from t3c.certify.coverage import Agreement, agreement, expected_coverage
from t3c.errors import DataError, SpecError


def drifts(rng: np.random.Generator, n: int) -> np.ndarray:
    shared = rng.lognormal(sigma=0.4, size=(n, 1))
    return shared * rng.lognormal(sigma=0.2, size=(n, 3)) * np.array([1.0, 0.3, 0.05])


@given(
    st.integers(1, 3000),
    st.integers(99, 3000),
    st.sampled_from([0.01, 0.05, 0.2]),
    st.sampled_from([0.5, 0.95, 0.999]),
)
def test_the_range_is_that_of_the_beta_binomial(
    n_test: int, n: int, delta: float, level: float
) -> None:
    low, high = expected_coverage(n_test, n, delta, level)
    k = int(np.ceil((n + 1) * (1 - delta) - 1e-9))
    law = stats.betabinom(n_test, k, n + 1 - k)
    least, most = round(low * n_test), round(high * n_test)
    tail = (1 - level) / 2
    assert law.cdf(least - 1) <= tail + 1e-9 <= law.cdf(least) + 2e-9
    assert law.sf(most) <= tail + 1e-9 <= law.sf(most - 1) + 2e-9


@pytest.mark.parametrize(("n", "n_test", "delta"), [(99, 200, 0.1), (150, 50, 0.05)])
def test_coverage_lies_in_the_range_as_often_as_it_says(n: int, n_test: int, delta: float) -> None:
    rng = np.random.default_rng(0)
    low, high = expected_coverage(n_test, n, delta)
    inside = []
    for _ in range(2000):
        bound = conformal_quantile(rng.random(n), delta)
        inside.append(low <= np.mean(rng.random(n_test) <= bound) <= high)
    assert np.mean(inside) >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / 2000)
    assert np.mean(inside) <= 0.99


def test_the_range_is_that_of_simultaneous_bounds_too() -> None:
    rng = np.random.default_rng(0)
    low, high = expected_coverage(200, 199, 0.1)
    inside = []
    for _ in range(400):
        bounds = simultaneous_bounds(drifts(rng, 40), drifts(rng, 199), 0.1)
        inside.append(low <= np.mean((drifts(rng, 200) <= bounds).all(axis=1)) <= high)
    assert np.mean(inside) >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / 400)


def test_the_range_narrows_with_samples() -> None:
    few, many = expected_coverage(100, 50, 0.1), expected_coverage(10_000, 5000, 0.1)
    assert few[0] < many[0] < 0.9 < many[1] < few[1]
    with pytest.raises(DataError, match="at least 1 and 19 are needed"):
        expected_coverage(100, 18, 0.05)
    with pytest.raises(DataError, match="of 0 test"):
        expected_coverage(0, 100, 0.05)
    with pytest.raises(SpecError, match="level"):
        expected_coverage(10, 100, 0.05, level=1.0)


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=30))
def test_agreement_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    a, b = np.array(pairs, dtype=float).T
    found = agreement(a, b)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        assert found == Agreement(None, None)
        return
    assert found.pearson == pytest.approx(stats.pearsonr(a, b).statistic, abs=1e-9)
    assert found.spearman == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-9)


def test_agreement_of_too_few_or_of_others_lengths() -> None:
    assert agreement([1, 2], [1, 2]) == Agreement(None, None)
    monotone = agreement([1, 2, 3, 4], [1, 10, 100, 1000])
    assert monotone.spearman == 1.0
    assert monotone.pearson is not None
    assert monotone.pearson < 0.9
    with pytest.raises(DataError, match="do not match"):
        agreement([1, 2, 3], [1, 2])
    with pytest.raises(DataError, match="finite"):
        agreement([1, 2, np.inf], [1, 2, 3])
