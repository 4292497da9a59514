from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.errors import DataError, SpecError
from t3c.measure.shift import Activations, Detector


def drawn(rng: np.random.Generator, count: int, shift: float = 0.0) -> np.ndarray:
    """Scores with a heavy tail."""
    return np.exp(rng.normal(shift, 1, count))


def alarms(detector: Detector, scores: np.ndarray) -> int:
    return sum(detector.step(score) for score in scores)


def delay(detector: Detector, scores: np.ndarray) -> int:
    """Scores until the alarm."""
    return next(taken for taken, score in enumerate(scores, 1) if detector.step(score))


@pytest.mark.parametrize("levels", [None, 3])
def test_p_values_are_uniform_and_independent(levels: int | None) -> None:
    """Also where nearly all scores are equal."""
    rng = np.random.default_rng(0)
    high, low = [], []
    for seed in range(200):
        scores = drawn(rng, 80) if levels is None else rng.integers(0, levels, 80).astype(float)
        detector = Detector(scores[:20], seed=seed)
        values = np.array([detector.p_values(score) for score in scores[20:]])
        high.append(values[:, 0])
        low.append(values[:, 1])
    p = np.stack(high)
    np.testing.assert_allclose(p + np.stack(low), 1)
    for share in (0.01, 0.1, 0.5, 0.9, 0.99):
        error = 3 * np.sqrt(share * (1 - share) / p.size)
        assert abs(np.mean(p <= share) - share) < error
    following = np.corrcoef(p[:, :-1].reshape(-1), p[:, 1:].reshape(-1))[0, 1]
    assert abs(following) < 3 / np.sqrt(p.size)


@pytest.mark.parametrize("two_sided", [False, True])
def test_false_alarms_are_as_rare_as_promised(two_sided: bool) -> None:
    rng, rate, length = np.random.default_rng(1), 1e-3, 2_000
    counts = []
    for seed in range(200):
        detector = Detector(drawn(rng, 60), rate=rate, two_sided=two_sided, seed=seed)
        counts.append(alarms(detector, drawn(rng, length)) / length)
    error = np.std(counts) / np.sqrt(len(counts))
    assert 0 < np.mean(counts) <= rate + 3 * error


def test_a_frozen_reference_gives_no_more_false_alarms() -> None:
    rng, rate, length = np.random.default_rng(2), 1e-2, 1_000
    counts = []
    for seed in range(100):
        detector = Detector(drawn(rng, 100), rate=rate, two_sided=True, most=100, seed=seed)
        counts.append(alarms(detector, drawn(rng, length)) / length)
    assert np.mean(counts) <= rate


def test_the_reference_stops_growing_and_shifts_are_still_found() -> None:
    rng = np.random.default_rng(3)
    detector = Detector(drawn(rng, 60), most=2_000)
    assert alarms(detector, drawn(rng, 3_000)) == 0
    assert len(detector._ranked) == 2_000
    assert delay(detector, drawn(rng, 200, shift=3.0)) < 40


@pytest.mark.parametrize("before", [0, 3_000])
@pytest.mark.parametrize(("shift", "within"), [(1.5, 60), (3.0, 20), (20.0, 12)])
def test_a_shift_is_found_soon_and_dated(before: int, shift: float, within: int) -> None:
    delays, errors = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        detector = Detector(drawn(rng, 100), seed=seed)
        alarms(detector, drawn(rng, before))
        delays.append(delay(detector, drawn(rng, 400, shift)))
        errors.append(abs(detector.since - delays[-1]))
        assert detector.evidence >= 1e4
    assert np.quantile(delays, 0.9) <= within
    assert np.median(errors) <= 5


def test_falling_scores_are_found_where_both_sides_are_watched() -> None:
    rng = np.random.default_rng(4)
    reference, falling = drawn(rng, 100), drawn(rng, 100, shift=-2.0)
    assert delay(Detector(reference, two_sided=True), falling) < 30
    assert alarms(Detector(reference), falling) == 0


def test_it_starts_anew_after_an_alarm() -> None:
    rng = np.random.default_rng(5)
    detector = Detector(drawn(rng, 100))
    delay(detector, drawn(rng, 100, shift=5.0))
    assert detector.evidence >= 1e4
    assert not detector.step(1.0)
    assert detector.evidence < 10


def test_not_a_number_is_the_most_extreme_score() -> None:
    detector = Detector(np.arange(1_000.0))
    assert detector.p_values(np.inf)[0] < 2e-3
    assert delay(detector, np.full(20, np.nan)) <= 10


def test_what_cannot_be_a_test_is_refused() -> None:
    with pytest.raises(SpecError, match="rate must be between 0 and 1"):
        Detector([1.0, 2.0], rate=0.0)
    for reference in ([1.0], [1.0, np.nan]):
        with pytest.raises(DataError, match="at least 2 finite scores"):
            Detector(reference)


@given(st.integers(0, 10_000), st.floats(-6, 6), st.integers(1, 5), st.floats(0, 1))
def test_quantiles_from_bins_are_those_of_numpy_to_two_percent(
    seed: int, magnitude: float, parts: int, q: float
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_t(3, size=(parts, 40, 5)).astype(np.float32) * 10**magnitude
    values[rng.random(values.shape) < 0.1] = 0
    seen = Activations()
    for part in values:
        seen.add(part)
    sizes = np.abs(values.astype(np.float64)).reshape(-1)
    wanted = np.quantile(sizes, q, method="inverted_cdf")
    assert seen.quantile(q) == pytest.approx(wanted, rel=0.02, abs=1e-8)
    assert seen.rms == pytest.approx(np.sqrt(np.mean(sizes**2)))
    assert seen.largest == sizes.max()
    assert seen.count == sizes.size


def test_activations_out_of_reach() -> None:
    seen = Activations()
    with pytest.raises(DataError, match="no activations were added"):
        seen.quantile(0.5)
    with pytest.raises(DataError, match="NaN or infinite"):
        seen.add([1.0, np.nan])
    seen.add([])
    seen.add([0.0, -1e9])
    assert seen.quantile(0.5) == 0.0
    assert seen.largest == 1e9
    with pytest.raises(SpecError, match="from 0 to 1"):
        seen.quantile(1.5)
