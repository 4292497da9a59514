from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from lab.policies import METHODS, SEEDS, summary_rows
from lab.report.training import training_picture


def rows(offsets: dict[int, float]) -> list[dict[str, object]]:
    """Two budgets for each seed; every method drifts twice the knapsack's, and a seed's own."""
    return [
        {
            "model": "net", "method": method, "budget": budget * (1 + seed / 1e6), "seed": seed,
            "spent": budget, "drift": (1 if method == "knapsack" else 2) * (budget + offsets[seed]),
            "accuracy": 1 - budget, "samples": 10,
        }
        for seed in SEEDS
        for budget in (0.25, 0.5)
        for method in METHODS
    ]  # fmt: skip


def test_seeds_are_summed_up_budget_by_budget() -> None:
    offsets = dict(zip(SEEDS, (0.0, 0.1, 0.2), strict=True))
    found = {(row["method"], row["level"]): row for row in summary_rows(rows(offsets))}
    assert len(found) == 2 * len(METHODS)
    tight = found["greedy", 0]
    assert tight["drift"] == pytest.approx(2 * (0.25 + 0.1))
    assert tight["drift_se"] == pytest.approx(0.2 / math.sqrt(3))
    assert tight["to_knapsack"] == pytest.approx(2)
    assert tight["to_knapsack_se"] == pytest.approx(0, abs=1e-12)
    assert found["knapsack", 1]["to_knapsack"] == 1
    assert found["knapsack", 1]["budget"] > found["knapsack", 0]["budget"]
    assert tight["seeds"] == len(SEEDS)


def test_the_picture_shows_every_method_and_both_trainings() -> None:
    offsets = dict.fromkeys(SEEDS, 0.0)
    profiles = [
        {"name": name, "model": "net", "bytes": size, "accuracy": 0.9, "untrained": 0.5,
         "samples": 1000}
        for name, size in (("tiny", 0.2), ("max", 1.0), ("full", 1.0))
    ]  # fmt: skip
    picture = training_picture(profiles, summary_rows(rows(offsets)))
    text = " ".join(ElementTree.fromstring(picture).itertext())
    for word in (*METHODS, "trained", "untrained", "net (1,000 test images)", "3 seeds"):
        assert word in text, word
