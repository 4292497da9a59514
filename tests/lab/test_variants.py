"""Variants side by side: the rows say what hand computation says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from lab import variants
from lab.variants import BATCH, Compared, Variant, answers, compare
from t3c.engines.protocol import Array
from t3c.spec import Latency


class Fixed:
    """A session that answers what it is given, shifted."""

    def __init__(self, shift: float) -> None:
        self.shift, self.batches = shift, list[int]()

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        self.batches.append(len(inputs[0]))
        return [np.asarray(inputs[0] + np.array([0, self.shift], dtype=np.float32))]


def latency(p50: float) -> Latency:
    return Latency(p50, 2 * p50, 3 * p50, (p50, p50), 1)


def variant(name: str, size: int, shift: float = 0.0) -> Variant:
    return Variant(name, "", Fixed(shift), size)


def test_rows_are_paired_with_full_and_measured_against_ptq8() -> None:
    outputs = {
        "full": np.array([[2, 1], [1, 2], [3, 4], [5, 0]], dtype=np.float32),
        "ptq8": np.array([[2, 1], [1, 2], [4, 3], [5, 0]], dtype=np.float32),
    }
    compared = Compared(
        {"full": variant("full", 400), "ptq8": variant("ptq8", 100)}, outputs,
        np.array([0, 1, 1, 1]), {"full": latency(4.0), "ptq8": latency(2.0)},
    )  # fmt: skip
    full, ptq8 = compared.rows()
    assert (full["accuracy"], ptq8["accuracy"]) == (0.75, 0.5)
    assert (full["drop"], ptq8["drop"]) == (0.0, 0.25)
    # One lost of four, and two more of which one is lost and one won: 2/6 against 1/6.
    half = 1.959963984540054 * math.sqrt((3 / 6 - (1 / 6) ** 2) / 6)
    assert ptq8["drop_low"] == pytest.approx(1 / 6 - half)
    assert ptq8["drop_high"] == pytest.approx(1 / 6 + half)
    assert full["drop_low"] < 0 < full["drop_high"]
    assert (full["to_ptq8"], full["size_to_ptq8"]) == (2.0, 4.0)
    assert full["size_mb"] == 4e-4
    assert ptq8["drift"] == pytest.approx(math.sqrt(2) / 5 / 4)
    assert compared.drifts("full").max() == 0


def test_every_sample_is_answered_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.arange(2 * (2 * BATCH + 3), dtype=np.float32).reshape(-1, 2)
    session = Fixed(1.0)
    found = answers(session, [samples])
    np.testing.assert_array_equal(found - samples, np.tile([0, 1], (len(samples), 1)))
    assert session.batches == [BATCH, BATCH, 1, 1, 1]
    monkeypatch.setattr(
        variants, "time_sessions", lambda sessions, *_, **__: dict.fromkeys(sessions, latency(1.0))
    )
    made = {"full": variant("full", 2), "ptq8": variant("ptq8", 1, 0.5)}
    labels = np.ones(len(samples), dtype=np.int64)
    compared = compare(made, [samples], labels, 3, lambda *_: None)
    assert compared.right("ptq8").all()
    assert [row["name"] for row in compared.rows()] == ["full", "ptq8"]
