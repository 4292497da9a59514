"""Language models side by side: the figures are those of a plain computation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from lab.decoding import ComparedText, Reading, compare_text, ratio_interval
from lab.perplexity import perplexity
from lab.variants import Variant
from t3c.engines.protocol import Array
from t3c.spec import Latency

WORDS, LENGTH = 7, 8


class Bigram:
    """A session whose logits depend on the last word alone; it remembers how much it has read."""

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        rng = np.random.default_rng(0)
        self.table = rng.normal(size=(WORDS, WORDS)).astype(np.float32)
        self.table += noise * np.random.default_rng(seed).normal(size=self.table.shape)
        self.read: list[tuple[int, int]] = []

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        ids = inputs[0]
        past = inputs[1] if len(inputs) > 1 else np.zeros((len(ids), 0))
        self.read.append((past.shape[1], ids.shape[1]))
        return [self.table[ids], np.concatenate([past, ids], axis=1)]


def text(count: int) -> Array:
    return np.random.default_rng(1).integers(0, WORDS, count)


def variants() -> dict[str, Variant]:
    made = {"full": Bigram(0), "ptq8w": Bigram(1, 0.1), "t3c-med": Bigram(2, 0.5)}
    sizes = {"full": (400, 100), "ptq8w": (100, 40), "t3c-med": (70, 40)}
    return {
        name: Variant(name, "made", session, sizes[name][0], table_bytes=sizes[name][1])
        for name, session in made.items()
    }


def compared(rounds: int = 2) -> ComparedText:
    return compare_text(
        variants(), text(101), length=LENGTH, bos=0, rounds=rounds, watch=lambda *_: None
    )


def test_perplexities_are_those_of_the_text_read_by_itself() -> None:
    rows = {row["name"]: row for row in compared().rows()}
    kept = 101 - (101 - (LENGTH - 1)) % (LENGTH // 2)  # windows that are not whole are left out
    for name, variant in variants().items():
        alone = perplexity(
            lambda ids, session=variant.session: session.run([ids])[0], text(101)[:kept],
            length=LENGTH, stride=LENGTH // 2, bos=0,
        )  # fmt: skip
        assert rows[name]["perplexity"] == pytest.approx(alone.value)
        assert rows[name]["tokens"] == alone.tokens == kept
    full, med = rows["full"], rows["t3c-med"]
    assert med["over"] == pytest.approx(med["perplexity"] / full["perplexity"] - 1)
    assert med["over_low"] < med["over"] < med["over_high"]
    assert (full["over"], full["drift"]) == (0.0, 0.0)
    assert 0 < rows["ptq8w"]["drift"] < med["drift"]


def test_rows_are_beside_eight_bit_weights() -> None:
    rows = {row["name"]: row for row in compared().rows()}
    med, beside = rows["t3c-med"], rows["ptq8w"]
    assert med["blocks_to_ptq8w"] == 0.5  # (70 - 40) of (100 - 40): the table is not of the blocks
    assert med["size_to_ptq8w"] == 0.7
    assert med["speed_to_ptq8w"] == pytest.approx(beside["p50"] / med["p50"])
    assert med["tokens_per_second"] == pytest.approx(1e3 / med["p50"])


def test_tokens_are_written_with_what_is_remembered() -> None:
    made = variants()
    compare_text(made, text(60), length=LENGTH, bos=0, rounds=2, watch=lambda *_: None)
    session = made["t3c-med"].session
    assert isinstance(session, Bigram)
    half = LENGTH // 2
    round_of = [(0, half), *((half + step, 1) for step in range(half))]
    assert session.read[: 3 * len(round_of)] == 3 * round_of  # two rounds and one before them


def test_the_drift_is_of_windows_that_share_no_text() -> None:
    found = compared()
    windows = len(np.unique(found.windows))
    assert len(found.drifts("full")) == math.ceil(windows / 2)


def test_an_interval_takes_what_is_alike_together() -> None:
    gaps = np.array([0.1, 0.1, 0.3, 0.3])
    low, middle, high = ratio_interval(gaps, np.array([0, 0, 1, 1]))
    assert middle == pytest.approx(math.expm1(0.2))
    # Sums of the groups are 0.2 off each; 2 / (2 - 1) times their squares, over 4 tokens.
    error = 1.959963984540054 * math.sqrt(2 * 2 * 0.2**2) / 4
    assert (low, high) == pytest.approx((math.expm1(0.2 - error), math.expm1(0.2 + error)))
    apart = ratio_interval(gaps, np.arange(4))
    assert apart[2] - apart[0] < high - low
    assert ratio_interval(gaps, np.zeros(4))[2] == math.inf


def test_right_is_what_was_likeliest() -> None:
    reading = Reading(np.zeros(2), np.array([True, False]), np.zeros(1))
    times = {"full": Latency(1.0, 1.0, 1.0, (1.0, 1.0), 1)}
    found = ComparedText({}, {"full": reading}, np.zeros(2), times, times)
    assert found.right("full").tolist() == [True, False]
