"""The picture of fidelity against FLOPs and bytes, plain and data-aware side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from t3c.report.chart import Axis, Point, Series
from t3c.report.panels import panels

Row = Mapping[str, Any]
KINDS = (
    ("plain", "plain", "low rank, plain metric", "circle"),
    ("data-aware", "aware", "low rank, data-aware metric", "square"),
)


def fidelity_picture(rows: Sequence[Row]) -> str:
    """One row of panels a model: against FLOPs, and against bytes with the bits-only curve."""
    charts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        for axis, title in (("flops", "FLOPs"), ("bytes", "bytes")):
            series = _series(mine, axis)
            places = [point.x for one in series for point in one.points]
            x = Axis.around(f"{title}, share of dense int8", places)
            charts.append((_name(mine[0]), x, _y_axis(mine, series), series))
    return panels("Fidelity before any training", charts)


def _name(row: Row) -> str:
    return f"{row['model']} ({row['samples']:,} samples)"


def _series(rows: Sequence[Row], axis: str) -> list[Series]:
    series = []
    for metric, style, name, shape in KINDS:
        ranked = [r for r in rows if r["metric"] == metric and r["bits"] == 8]
        points = {(r[axis], _value(r)): Point(r[axis], _value(r)) for r in ranked}
        series.append(Series(name, style, sorted(points.values(), key=_across), True, shape))
    if axis == "bytes":
        full = [r for r in rows if r["rank_share"] == 1.0 and r["metric"] == "plain"]
        points = {r["bits"]: Point(r[axis], _value(r), f"{r['bits']} bits") for r in full}
        ordered = sorted(points.values(), key=_across)
        series.append(Series("full rank, fewer bits", "bits", ordered, True, "diamond"))
    return series


def _across(point: Point) -> float:
    return point.x


def _value(row: Row) -> float:
    """Perplexity spans orders of magnitude; it is drawn by its logarithm."""
    value = float(row["value"])
    return math.log10(value) if row["measure"] == "perplexity" else value


def _y_axis(rows: Sequence[Row], series: Sequence[Series]) -> Axis:
    values = [point.y for one in series for point in one.points]
    if rows[0]["measure"] != "perplexity":
        return Axis.around(rows[0]["measure"], values)
    low, high = math.floor(min(values)), math.ceil(max(values))
    ticks = [(float(t), f"{10**t:,}") for t in range(low, high + 1)]
    return Axis("perplexity", low, high, ticks)
