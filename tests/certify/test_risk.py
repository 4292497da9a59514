from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from t3c.certify.risk import certified_within, risk_bound, risk_bounds, share_interval
from t3c.errors import DataError, MissingExtraError, SpecError


def at_most(events: list[bool], chance: float) -> bool:
    """Whether events are no more often than the chance, by three standard errors."""
    return float(np.mean(events)) <= chance + 3 * math.sqrt(chance * (1 - chance) / len(events))


@given(st.integers(1, 200), st.data())
def test_zeros_and_ones_have_the_clopper_pearson_bound(n: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, n))
    losses = np.arange(n) < count
    interval = binomtest(count, n).proportion_ci(0.95, method="exact")
    assert risk_bound(losses.astype(float), 0.025) == pytest.approx(interval.high, abs=1e-9)
    assert share_interval(count, n) == pytest.approx((interval.low, interval.high), abs=1e-9)


def test_no_loss_in_n_samples() -> None:
    assert risk_bound(np.zeros(100), 0.05) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert risk_bound(np.ones(100), 0.05) == 1.0
    assert risk_bound(np.full(100, 1 - 1e-12), 0.05) <= 1.0


@pytest.mark.parametrize(("a", "b"), [(0.2, 4.0), (2.0, 2.0), (0.1, 0.1)])
def test_bounds_on_shares_hold(a: float, b: float) -> None:
    rng = np.random.default_rng(0)
    over = [risk_bound(rng.beta(a, b, size=80), 0.1) < a / (a + b) for _ in range(400)]
    assert at_most(over, 0.1)


def test_bounds_on_zeros_and_ones_hold_and_are_exact() -> None:
    rng = np.random.default_rng(0)
    over = [risk_bound((rng.random(400) < 0.1).astype(float), 0.1) < 0.1 for _ in range(2000)]
    assert at_most(over, 0.1)
    assert np.mean(over) > 0.06


@given(st.integers(0, 10_000), st.integers(2, 300))
def test_a_bound_is_over_the_mean_and_falls_with_delta(seed: int, n: int) -> None:
    losses = np.random.default_rng(seed).random(n)
    loose, tight = risk_bound(losses, 0.01), risk_bound(losses, 0.2)
    assert losses.mean() <= tight <= loose <= 1.0
    hoeffding = losses.mean() + math.sqrt(math.log(1 / 0.2) / (2 * n))
    assert tight <= min(1.0, hoeffding) + 1e-12


def test_bounds_of_all_profiles_hold_at_once() -> None:
    rng = np.random.default_rng(0)
    means = np.array([0.3, 0.1, 0.15, 0.02])
    over = []
    for _ in range(400):
        losses = (rng.random((100, 4)) < means).astype(float)
        bounds = risk_bounds(losses, 0.1)
        assert np.all(np.diff(bounds) <= 0)
        over.append(bool((bounds < means).any()))
    assert at_most(over, 0.1)


def test_profiles_are_wrongly_certified_no_more_often_than_delta() -> None:
    rng = np.random.default_rng(0)
    means, cap = np.array([0.3, 0.1001, 0.1001, 0.05, 0.01]), 0.1
    wrong, power = [], []
    for _ in range(600):
        # One draw for all profiles: their losses are as dependent as they can be.
        losses = (rng.random((400, 1)) < means).astype(float)
        found = certified_within(losses, cap, 0.1)
        assert found == list(range(5 - len(found), 5))
        wrong.append(any(means[profile] > cap for profile in found))
        power.append({3, 4} <= set(found))
    assert at_most(wrong, 0.1)
    assert np.mean(wrong) > 0.03
    assert np.mean(power) > 0.95


def test_testing_stops_at_the_first_profile_that_fails() -> None:
    losses = np.zeros((100, 3))
    assert certified_within(losses, 0.1, 0.05) == [0, 1, 2]
    losses[:, 1] = 1.0
    assert certified_within(losses, 0.1, 0.05) == [2]
    losses[:, 2] = 1.0
    assert certified_within(losses, 0.1, 0.05) == []


def test_what_is_no_loss_is_refused() -> None:
    for bad in (np.array([]), np.ones((3, 2)), np.array(0.5)):
        with pytest.raises(DataError, match="not empty"):
            risk_bound(bad, 0.1)
    for value in (-0.1, 1.1, np.nan):
        with pytest.raises(DataError, match="between 0 and 1"):
            risk_bound(np.array([0.5, value]), 0.1)
    with pytest.raises(DataError, match=r"\(n, profiles\)"):
        risk_bounds(np.ones(3), 0.1)
    with pytest.raises(SpecError, match="delta"):
        risk_bound(np.ones(3), 1.0)
    with pytest.raises(SpecError, match="cap on risk"):
        certified_within(np.ones((3, 1)), 1.0, 0.1)


def test_missing_scipy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(MissingExtraError, match=r"t3c\[calibrate\]"):
        risk_bound(np.zeros(10), 0.1)
