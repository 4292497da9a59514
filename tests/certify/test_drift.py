from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.certify.drift import (
    MEASURES,
    absolute_drift,
    flips,
    kl_drift,
    measured,
    relative_drift,
)
from t3c.errors import DataError


def test_drift_is_a_norm_over_all_but_the_batch() -> None:
    z = np.array([[[3.0, 0.0], [0.0, 4.0]]])
    np.testing.assert_allclose(absolute_drift(2 * z, z), [5.0])
    np.testing.assert_allclose(relative_drift(1.5 * z, z), [0.5])


def test_kl_is_that_of_the_probabilities() -> None:
    p, q = np.array([[0.7, 0.2, 0.1]]), np.array([[0.5, 0.25, 0.25]])
    known = np.sum(p * np.log(p / q))
    np.testing.assert_allclose(kl_drift(np.log(q) + 3, np.log(p) - 5), [known])
    twice = np.stack([np.log(p), np.log(p)], axis=1)
    mixed = np.stack([np.log(q), np.log(p)], axis=1)
    np.testing.assert_allclose(kl_drift(mixed, twice), [known / 2])


@given(st.integers(0, 10_000), st.floats(1e-9, 1e4))
def test_kl_is_never_negative_and_finite(seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(4, 3, 7)) * size
    drift = kl_drift(z + rng.normal(size=z.shape) * 1e-9, z)
    assert np.isfinite(drift).all()
    assert (drift >= 0).all()
    np.testing.assert_array_equal(kl_drift(z, z), np.zeros(4))


def test_flips_are_the_share_of_changed_answers() -> None:
    z = np.array([[1.0, 2.0], [2.0, 1.0]])
    np.testing.assert_array_equal(flips(z[::-1], z), [1.0, 1.0])
    np.testing.assert_array_equal(flips(3 * z, z), [0.0, 0.0])
    tokens = np.stack([z, z, z, z])[None].reshape(1, 8, 2)
    changed = tokens.copy()
    changed[0, :2] = changed[0, :2, ::-1]
    np.testing.assert_array_equal(flips(changed, tokens), [0.25])


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_is_zero_at_the_original_and_refuses_bad_data(name: str) -> None:
    z = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    np.testing.assert_array_equal(measured(name, z, z), np.zeros(5))
    with pytest.raises(DataError, match="cannot be compared"):
        measured(name, z, z[0])
    with pytest.raises(DataError, match="no samples"):
        measured(name, z[:0], z[:0])
    with pytest.raises(DataError, match="no samples"):
        measured(name, 1.0, 1.0)
    bad = z.copy()
    bad[1, 2] = np.nan
    with pytest.raises(DataError, match=r"^outputs are not finite in 1 of 5 samples"):
        measured(name, bad, z)
    with pytest.raises(DataError, match="the original's outputs are not finite"):
        measured(name, z, bad)


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_logits_need_classes(shape: tuple[int, ...]) -> None:
    for name in ("kl", "flip"):
        with pytest.raises(DataError, match="no logits"):
            measured(name, np.ones(shape), np.ones(shape))


def test_an_own_measure_is_checked() -> None:
    z = np.random.default_rng(0).normal(size=(5, 4))

    def largest(outputs: np.ndarray, original: np.ndarray) -> np.ndarray:
        return np.abs(outputs - original).max(axis=1)

    np.testing.assert_allclose(measured(largest, (z + 0.5).tolist(), z), np.full(5, 0.5))
    with pytest.raises(DataError, match=r"gave shape \(5, 4\) for 5 samples"):
        measured(lambda a, b: a - b, z, z)
    for wrong in (-1.0, np.nan, np.inf):
        with pytest.raises(DataError, match="not finite or under 0"):
            measured(lambda a, b, wrong=wrong: np.full(len(a), wrong), z, z)
    with pytest.raises(DataError, match="'cosine': it is one of relative, absolute, kl, flip"):
        measured("cosine", z, z)
