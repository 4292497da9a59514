"""The picture of training: what it gains at each profile, and policies at equal cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from t3c.report.chart import Axis, Point, Series
from t3c.report.panels import panels

Row = Mapping[str, Any]
METHODS = (
    ("knapsack", "aware", "square"),
    ("gumbel", "bits", "circle"),
    ("reinforce", "other", "circle"),
    ("greedy", "plain", "diamond"),
    ("uniform", "grid", "circle"),
)


def training_picture(profiles: Sequence[Row], policies: Sequence[Row]) -> str:
    """Accuracy of the profiles trained and not, and the drift of every policy at each budget."""
    charts = []
    if profiles:
        charts.append(_gain(profiles))
    for model in dict.fromkeys(row["model"] for row in policies):
        charts.append(_policies(model, [row for row in policies if row["model"] == model]))
    return panels("Training once, and who allocates", charts)


def _gain(rows: Sequence[Row]) -> tuple[str, Axis, Axis, list[Series]]:
    mine = [row for row in rows if row["name"] != "full"]
    series = [
        Series(
            name, style,
            [Point(r["bytes"], r[key], r["name"] if labelled else "") for r in mine], True, shape,
        )
        for name, key, style, shape, labelled in (
            ("trained", "accuracy", "bits", "square", True),
            ("untrained", "untrained", "plain", "circle", False),
        )
    ]  # fmt: skip
    x = Axis.around("bytes, share of dense int8", [row["bytes"] for row in mine])
    y = Axis.around("accuracy", [point.y for one in series for point in one.points])
    return f"{rows[0]['model']} ({rows[0]['samples']:,} test images)", x, y, series


def _policies(model: str, rows: Sequence[Row]) -> tuple[str, Axis, Axis, list[Series]]:
    series = [
        Series(
            method, style,
            [Point(r["budget"], math.log10(r["drift"])) for r in rows if r["method"] == method],
            True, shape,
        )
        for method, style, shape in METHODS
    ]  # fmt: skip
    values = [point.y for one in series for point in one.points]
    low, high = math.floor(min(values)), math.ceil(max(values))
    ticks = [
        (power + math.log10(step), f"{step * 10.0**power:g}")
        for power in range(low, high)
        for step in (1, 2, 5)
    ]
    x = Axis.around("budget, share of the largest profile's cost", [r["budget"] for r in rows])
    y = Axis("mean drift", min(values) - 0.05, max(values) + 0.05, [
        tick for tick in ticks if min(values) - 0.05 <= tick[0] <= max(values) + 0.05
    ])  # fmt: skip
    return f"{model} ({rows[0]['samples']:,} samples, {rows[0]['seeds']} seeds)", x, y, series
