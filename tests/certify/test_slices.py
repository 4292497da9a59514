from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.certify.slices import refuse_overlap, sample_keys, slice_table, split_unique
from t3c.errors import DataError, SpecError


def test_rows_say_how_each_slice_fares() -> None:
    labels = np.array(["cat", "dog", "cat", "cat"])
    drifts = np.array([[1.0, 0.1], [5.0, 0.5], [2.0, 0.2], [3.0, 0.3]])
    flips = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.5, 0.0]])
    rows = slice_table(labels, drifts, flips, np.array([2.5, 1.0]), ["tiny", "max"])
    assert [(row.label, row.profile) for row in rows] == [
        ("cat", "tiny"),
        ("cat", "max"),
        ("dog", "tiny"),
        ("dog", "max"),
    ]
    cat, dog = rows[0], rows[2]
    assert (cat.samples, cat.mean, cat.flip_rate) == (3, 2.0, 0.5)
    assert cat.within == pytest.approx(2 / 3)
    assert cat.p95 == pytest.approx(2.9)
    assert (dog.samples, dog.within, dog.flip_rate) == (1, 0.0, 1.0)
    # One sample outside says next to nothing: the share may still be 97.5%.
    assert dog.interval == pytest.approx((0.0, 0.975))
    assert cat.interval[0] < cat.within < cat.interval[1]


@given(st.integers(0, 10_000), st.integers(1, 60))
def test_slices_add_up_to_the_whole(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    labels, drifts = rng.integers(-3, 12, size=n), rng.random((n, 2))
    rows = slice_table(labels, drifts, None, np.array([0.5, 0.9]), ["a", "b"])
    assert [row.label for row in rows[::2]] == sorted(set(labels.tolist()))
    for at, bound in enumerate((0.5, 0.9)):
        mine = rows[at::2]
        assert sum(row.samples for row in mine) == n
        assert sum(row.within * row.samples for row in mine) == pytest.approx(
            np.count_nonzero(drifts[:, at] <= bound)
        )
        assert all(row.flip_rate is None for row in mine)


@pytest.mark.parametrize(
    "labels",
    [
        np.array([True, False, True]),
        np.array([1.5, 2.5, 1.5]),
        np.array(["2024-01-01", "2024-01-02", "2024-01-01"], dtype="datetime64[D]"),
        np.array([None, "a", None], dtype=object),
        np.array([b"x", b"y", b"x"]),
        np.array([(1, 2.0), (1, 3.0), (1, 2.0)], dtype=[("a", int), ("b", float)]),
    ],
)
def test_labels_of_any_kind(labels: np.ndarray) -> None:
    rows = slice_table(labels, np.ones((3, 1)), None, np.ones(1), ["a"])
    assert sorted(row.samples for row in rows) == [1, 2]


def test_what_is_no_table_is_refused() -> None:
    labels, drifts, bounds = np.arange(3), np.ones((3, 2)), np.ones(2)
    with pytest.raises(DataError, match=r"labels of shape \(2,\)"):
        slice_table(labels[:2], drifts, None, bounds, ["a", "b"])
    with pytest.raises(DataError, match="1 profiles"):
        slice_table(labels, drifts, None, bounds, ["a"])
    with pytest.raises(DataError, match="flips of shape"):
        slice_table(labels, drifts, drifts[:2], bounds, ["a", "b"])
    with pytest.raises(DataError, match="bounds of shape"):
        slice_table(labels, drifts, None, bounds[:1], ["a", "b"])
    with pytest.raises(DataError, match="drifts must not be NaN"):
        slice_table(labels, drifts * np.nan, None, bounds, ["a", "b"])
    with pytest.raises(DataError, match="is this a label"):
        slice_table(np.arange(1001), np.ones((1001, 1)), None, np.ones(1), ["a"])
    for odd in ([1.0, np.nan, 2.0], [[1], [2], [3]]):
        wrong = np.empty(3, dtype=object)
        wrong[:] = odd
        with pytest.raises(DataError, match="cannot name a slice"):
            slice_table(wrong, drifts, None, bounds, ["a", "b"])


def test_keys_tell_samples_apart_by_all_they_are() -> None:
    tokens, mask = np.array([[1, 2], [1, 2], [1, 3], [1, 2]]), np.array([1, 1, 1, 0])
    keys = sample_keys([tokens, mask])
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert all(len(key) == 16 and int(key, 16) >= 0 for key in keys)
    others = [
        [tokens.astype(np.int32), mask],
        [tokens.reshape(4, 2, 1), mask],
        [tokens],
        [mask, tokens],
    ]
    for arrays in others:
        assert not set(sample_keys(arrays)) & set(keys)


def test_keys_depend_on_values_not_on_memory() -> None:
    images = np.random.default_rng(0).random((5, 3, 4, 4)).astype(np.float32)
    strided = np.ascontiguousarray(images.transpose(3, 2, 1, 0)).transpose(3, 2, 1, 0)
    assert not strided.flags.c_contiguous
    assert sample_keys([strided]) == sample_keys([images])
    assert sample_keys([images[2:]]) == sample_keys([images])[2:]


def test_keys_need_samples_with_bytes() -> None:
    with pytest.raises(DataError, match="not of the same samples"):
        sample_keys([np.ones(3), np.ones(2)])
    with pytest.raises(DataError, match="not of the same samples"):
        sample_keys([])
    with pytest.raises(DataError, match="Python objects"):
        sample_keys([np.array(["a", None], dtype=object)])


def test_parts_that_share_samples_are_refused() -> None:
    refuse_overlap({"quantizer": ["a", "a", "b"], "scaling": ["c"], "certificate": ["d"]})
    with pytest.raises(
        DataError, match="the quantizer and the certificate slices share 2 samples: keep each"
    ):
        refuse_overlap({"quantizer": "abc", "scaling": "xyz", "certificate": "bcd"})
    with pytest.raises(DataError, match="share 1 sample: "):
        refuse_overlap({"quantizer": "aa", "certificate": "aab"})


@given(
    st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=60),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 100),
)
def test_copies_stay_together(keys: list[str], weights: list[int], seed: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    if len(set(keys)) < len(shares):
        with pytest.raises(DataError, match="distinct samples cannot fill"):
            split_unique(keys, shares, seed)
        return
    parts = split_unique(keys, shares, seed)
    assert len(parts) == len(shares)
    assert all(len(part) for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(keys)))
    refuse_overlap({str(at): [keys[i] for i in part] for at, part in enumerate(parts)})


@given(st.integers(0, 1000), st.integers(20, 200))
def test_sizes_follow_the_shares(seed: int, n: int) -> None:
    keys = [f"{index:016x}" for index in range(n)]
    parts = split_unique(keys, (1 / 6, 1 / 6, 2 / 3), seed)
    assert [len(part) for part in parts] == pytest.approx([n / 6, n / 6, n * 2 / 3], abs=1)


def test_a_split_is_random_by_its_seed_and_not_by_the_order_of_samples() -> None:
    keys = [f"{index:016x}" for index in range(40)]
    first, _ = split_unique(keys, (0.5, 0.5), 0)
    again, _ = split_unique(keys[::-1], (0.5, 0.5), 0)
    assert {keys[i] for i in first} == {keys[::-1][i] for i in again}
    drawn: Counter[int] = Counter()
    for seed in range(400):
        drawn.update(split_unique(keys, (0.5, 0.5), seed)[0].tolist())
    assert all(abs(drawn[i] - 200) < 4 * 10 for i in range(40))


def test_shares_are_shares() -> None:
    for shares in ([], [0.5, 0.4], [1.5, -0.5], [0.0, 1.0]):
        with pytest.raises(SpecError, match="sum to 1"):
            split_unique(["a", "b", "c"], shares, 0)
