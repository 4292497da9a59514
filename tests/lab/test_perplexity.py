"""Perplexity by sliding windows: what a token-by-token computation finds, each token once."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.perplexity import Ids, perplexity, sliding_windows, token_losses
from t3c.errors import DataError, SpecError

WORDS = 11
RANDOM = np.random.default_rng(0)
TABLE = RANDOM.normal(size=(WORDS, 6))
OUT = RANDOM.normal(size=(6, WORDS))
BOS = st.sampled_from([None, 0])


def causal(ids: Ids) -> npt.NDArray[np.float64]:
    """Logits (n, t, v) of all tokens so far and of how many they are, nearer ones more."""
    state = np.zeros((len(ids), 6))
    logits = []
    for column in ids.T:
        state = np.tanh(0.7 * state + TABLE[column] + 0.1)
        logits.append(state @ OUT)
    return np.stack(logits, axis=1)


def text(count: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, WORDS, count)


def naive(ids: Ids, length: int, stride: int, bos: int | None) -> list[float]:
    """Each token's loss after exactly the tokens that its first window puts before it."""
    opening = [] if bos is None else [bos]
    room = length - len(opening)
    losses = []
    for index in range(1 - len(opening), len(ids)):
        start = 0
        while start + room <= index:
            start += stride
        context = [*opening, *ids[start:index].tolist()]
        logits = causal(np.array([context]))[0, -1]
        shares = [math.exp(value) for value in logits]
        losses.append(-math.log(shares[ids[index]] / sum(shares)))
    return losses


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    length = draw(st.integers(2, 12))
    return draw(st.integers(2, 40)), length, draw(st.integers(1, length - 1))


@settings(max_examples=60, deadline=None)
@given(shapes(), BOS, st.integers(1, 5))
def test_it_is_what_token_by_token_finds(
    shape: tuple[int, int, int], bos: int | None, batch: int
) -> None:
    count, length, stride = shape
    ids = text(count, seed=count)
    found = perplexity(causal, ids, length=length, stride=stride, bos=bos, batch=batch)
    wanted = naive(ids, length, stride, bos)
    np.testing.assert_allclose(found.losses, wanted, rtol=1e-10)
    assert found.tokens == len(wanted) == count - (bos is None)
    assert found.value == pytest.approx(math.exp(sum(wanted) / len(wanted)), rel=1e-10)


@given(shapes(), BOS)
def test_every_token_is_scored_once_and_in_order(
    shape: tuple[int, int, int], bos: int | None
) -> None:
    count, length, stride = shape
    ids = np.arange(1, count + 1)
    windows = sliding_windows(ids, length, stride, bos)
    scored = np.concatenate([window.ids[window.first :] for window in windows])
    np.testing.assert_array_equal(scored, ids if bos is not None else ids[1:])
    assert all(window.first >= 1 for window in windows)
    assert all(len(window.ids) == length for window in windows[:-1])
    assert all(bos is None or window.ids[0] == bos for window in windows)


def test_the_widest_stride_is_disjoint_but_for_one_token() -> None:
    ids = text(21)
    windows = sliding_windows(ids, 6, 5)
    assert [window.first for window in windows] == [1, 1, 1, 1]
    for index, window in enumerate(windows):
        np.testing.assert_array_equal(window.ids, ids[5 * index : 5 * index + 6])
    rows = np.stack([window.ids for window in windows])
    found = perplexity(causal, ids, length=6, stride=5)
    np.testing.assert_allclose(found.losses, token_losses(causal(rows), rows).ravel(), rtol=1e-12)


def test_a_short_last_window_comes_alone() -> None:
    shapes_seen = []

    def run(ids: Ids) -> npt.NDArray[np.float64]:
        shapes_seen.append(ids.shape)
        return causal(ids)

    perplexity(run, text(12), length=6, stride=4, batch=3)
    assert shapes_seen == [(2, 6), (1, 4)]


@pytest.mark.parametrize("bos", [None, 3])
def test_uniform_logits_give_the_vocabulary(bos: int | None) -> None:
    def uniform(ids: Ids) -> npt.NDArray[np.float32]:
        return np.full((*ids.shape, WORDS), 7, dtype=np.float32)

    found = perplexity(uniform, text(30), length=8, stride=3, bos=bos)
    assert found.value == pytest.approx(WORDS, rel=1e-12)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    logits = np.zeros((1, 2, 3))
    logits[0, 0] = [1e4, -1e4, 0]
    assert token_losses(logits, [[0, 0]])[0, 0] == 0
    assert token_losses(logits, [[0, 1]])[0, 0] == pytest.approx(2e4)
    forbidden = np.full((1, 2, 3), -np.inf)
    forbidden[..., 0] = 0
    assert token_losses(forbidden, [[0, 1]])[0, 0] == np.inf
    sure = perplexity(lambda ids: np.tile([1e4, -1e4], (*ids.shape, 1)), [1, 1], length=3, stride=1)
    assert sure.value == np.inf


@pytest.mark.parametrize(
    ("ids", "said"),
    [([], "at least 2 tokens, got 0"), ([4], "at least 2 tokens, got 1"),
     ([1.0, 2.0], r"got float64 \(2,\)"), ([[1, 2]], r"got int64 \(1, 2\)"),
     ([True, False], "got bool")],
)  # fmt: skip
def test_what_is_no_text_is_refused(ids: npt.ArrayLike, said: str) -> None:
    with pytest.raises(DataError, match=said):
        sliding_windows(ids, 4, 2)


def test_what_cannot_be_scored_is_refused() -> None:
    for stride in (0, 4, 9):
        with pytest.raises(SpecError, match=f"under the length 4, got {stride}"):
            sliding_windows([1, 2, 3], 4, stride)
    with pytest.raises(SpecError, match="batch must be at least 1"):
        perplexity(causal, [1, 2], length=4, stride=2, batch=0)
    with pytest.raises(DataError, match=r"logits are \(1, 3, 5\), not \(n, t, v\) for ids \(1, 2"):
        token_losses(np.zeros((1, 3, 5)), [[1, 2]])
    for ids in ([[1, 5]], [[-1, 2]], [[0.0, 1.0]]):
        with pytest.raises(DataError, match="from 0 to 4"):
            token_losses(np.zeros((1, 2, 5)), ids)
    for value in (np.nan, np.inf):
        with pytest.raises(DataError, match="NaN or infinite"):
            token_losses(np.full((1, 2, 5), value), [[1, 2]])
