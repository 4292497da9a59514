from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from t3c.factor.aligned import Aligned, Floats, align, gauge

seeds = st.integers(0, 10_000)
sizes = st.tuples(st.integers(1, 24), st.integers(1, 24), st.integers(1, 24))


def factors(m: int, k: int, n: int, seed: int) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, k)), rng.standard_normal((k, n))


def aligned_weight(aligned: Aligned) -> Floats:
    """Return the weight (m, n) that an aligned form stands for."""
    weight: Floats = aligned.expand @ gauge(aligned.rest, aligned.kept)
    return weight


def close(expand: Floats, reduce: Floats, found: Floats) -> bool:
    weight = expand @ reduce
    return bool(np.abs(found - weight).max() <= 1e-9 * np.abs(weight).max())


@given(sizes, seeds)
def test_the_aligned_form_is_the_same_weight_in_fewer_numbers(
    size: tuple[int, int, int], seed: int
) -> None:
    m, k, n = size
    assume(k <= n)
    expand, reduce = factors(m, k, n, seed)
    aligned = align(expand, reduce, worst_condition=1e6)
    assert aligned is not None
    assert close(expand, reduce, aligned_weight(aligned))
    np.testing.assert_allclose(aligned.expand, (expand @ reduce)[:, aligned.kept], rtol=1e-6)
    assert sorted([*aligned.kept, *aligned.others]) == list(range(n))
    assert aligned.expand.size + aligned.rest.size == k * (m + n - k)
    assert np.abs(aligned.rest).max(initial=0) <= 2.0 ** (k - 1) + 1e-9


@given(seeds, st.floats(0, 12))
def test_a_steep_spectrum_is_no_bad_block(seed: int, decades: float) -> None:
    expand, reduce = factors(12, 8, 20, seed)
    steep = np.logspace(0, -decades, 8)[:, None] * reduce
    plain, aligned = align(expand, reduce), align(expand, steep)
    assert plain is not None
    assert aligned is not None
    assert aligned.condition == pytest.approx(plain.condition)
    np.testing.assert_allclose(aligned.rest, plain.rest, rtol=1e-8, atol=1e-10)
    assert close(expand, steep, aligned_weight(aligned))


@given(seeds, st.floats(1e-3, 1))
def test_nearly_dependent_rows_cost_no_accuracy(seed: int, apart: float) -> None:
    expand, reduce = factors(10, 6, 15, seed)
    reduce[3] = reduce[2] + apart * reduce[3]
    aligned = align(expand, reduce, worst_condition=1e6)
    assert aligned is not None
    assert close(expand, reduce, aligned_weight(aligned))


@given(seeds)
def test_pivoting_avoids_columns_that_are_alike(seed: int) -> None:
    expand, reduce = factors(9, 6, 18, seed)
    reduce[:, 1:8] = reduce[:, :1] + 1e-9 * reduce[:, 1:8]
    aligned = align(expand, reduce)
    assert aligned is not None
    assert np.isin(np.arange(8), aligned.kept).sum() <= 1
    assert close(expand, reduce, aligned_weight(aligned))


@given(seeds)
def test_a_block_worse_than_allowed_is_refused(seed: int) -> None:
    expand, reduce = factors(9, 6, 18, seed)
    aligned = align(expand, reduce)
    assert aligned is not None
    block = reduce[:, aligned.kept] / np.linalg.norm(reduce, axis=1, keepdims=True)
    assert aligned.condition == pytest.approx(np.linalg.cond(block))
    assert align(expand, reduce, worst_condition=1.01 * aligned.condition) is not None
    assert align(expand, reduce, worst_condition=0.99 * aligned.condition) is None


@pytest.mark.parametrize("columns", [5, 12])
def test_singular_blocks_are_refused(columns: int) -> None:
    expand, reduce = factors(6, 5, columns, 0)
    repeated, empty = reduce.copy(), reduce.copy()
    repeated[4], empty[4] = repeated[0] - 2 * repeated[1], 0
    for bad in (repeated, empty, np.zeros_like(reduce)):
        assert align(expand, bad) is None


def test_float32_stays_float32_and_is_computed_in_float64() -> None:
    expand, reduce = (f.astype(np.float32) for f in factors(20, 12, 30, 1))
    aligned = align(expand, reduce)
    assert aligned is not None
    assert aligned.expand.dtype == aligned.rest.dtype == np.float32
    exact = np.linalg.solve(
        reduce[:, aligned.kept].astype(np.float64), reduce[:, aligned.others].astype(np.float64)
    )
    np.testing.assert_array_max_ulp(aligned.rest, exact.astype(np.float32), maxulp=1)


@given(seeds)
def test_given_columns_are_kept_and_those_found_give_the_same(seed: int) -> None:
    expand, reduce = factors(9, 6, 18, seed)
    found = align(expand, reduce)
    assert found is not None
    given_ = align(expand, reduce, kept=found.kept, worst_condition=None)
    assert given_ is not None
    assert np.isnan(given_.condition)
    for name in ("expand", "rest", "kept", "others"):
        np.testing.assert_array_equal(getattr(given_, name), getattr(found, name))
    other = align(expand, reduce, kept=np.arange(6), worst_condition=1e12)
    assert other is not None
    assert other.condition >= 1
    np.testing.assert_allclose(aligned_weight(other), expand @ reduce, atol=1e-6)


def test_given_columns_that_are_dependent_are_refused() -> None:
    expand, reduce = factors(6, 5, 12, 0)
    reduce[:, 1] = reduce[:, 0]
    assert align(expand, reduce, kept=np.arange(5)) is None
    reduce[:, 1] = 0
    assert align(expand, reduce, kept=np.arange(5), worst_condition=None) is None


@given(seeds)
def test_a_gauge_is_what_the_kept_and_the_others_are_multiplied_by(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept, rest, x = np.sort(rng.permutation(9)[:4]), rng.normal(size=(4, 5)), rng.normal(size=9)
    others = np.setdiff1d(np.arange(9), kept)
    np.testing.assert_allclose(gauge(rest, kept) @ x, x[kept] + rest @ x[others])
