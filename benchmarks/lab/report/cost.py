"""The picture of what proxies predict against what was measured, on profiles held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from t3c.report.chart import Axis, Point, Series
from t3c.report.panels import panels

STYLES = ("aware", "plain", "bits", "other")
SHAPES = ("circle", "square", "diamond", "circle")


def cost_picture(rows: Sequence[Mapping[str, Any]]) -> str:
    """A panel a model: measured and predicted p50 of each held-out profile, by device."""
    devices = list(dict.fromkeys(row["device"] for row in rows))
    charts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        series = [
            Series(
                device,
                STYLES[index % len(STYLES)],
                [Point(r["measured"], r["predicted"]) for r in mine if r["device"] == device],
                shape=SHAPES[index % len(SHAPES)],
            )
            for index, device in enumerate(devices)
        ]
        values = [value for r in mine for value in (r["measured"], r["predicted"])]
        x = Axis.around("measured p50, ms", values)
        ends = [Point(x.low, x.low), Point(x.high, x.high)]
        series.append(Series("exact", "grid", ends, line=True, shape="none"))
        y = Axis("predicted p50, ms", x.low, x.high, x.ticks)
        charts.append((f"{model} ({len(mine)} held-out profiles)", x, y, series))
    return panels("What the proxy predicts of profiles it was not fitted to", charts)
