"""The picture of what is shipped: one artifact and its parts beside other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from t3c.report.chart import Axis, Point, Series
from t3c.report.panels import panels

Row = Mapping[str, Any]
UNIT = "nncf int8"


def sizes_picture(rows: Sequence[Row]) -> str:
    """Bytes of every file as a share of NNCF's int8 file, model by model."""
    models = dict.fromkeys(row["model"] for row in rows)
    charts = [_sizes(model, [row for row in rows if row["model"] == model]) for model in models]
    return panels("One artifact, its parts, and what people keep instead", charts)


def _sizes(model: str, rows: Sequence[Row]) -> tuple[str, Axis, Axis, list[Series]]:
    unit = next(row["bytes"] for row in rows if row["file"] == UNIT)
    shown = [row for row in rows if row["file"] != "artifact and evidence"]
    height = {row["file"]: float(len(shown) - index) for index, row in enumerate(shown)}

    def points(wanted: Sequence[Row]) -> list[Point]:
        return [
            Point(r["bytes"] / unit, height[r["file"]], f"{r['bytes'] / unit:.2f}") for r in wanted
        ]

    artifact = [row for row in shown if row["file"] == "artifact"]
    parts = [row for row in shown if row["file"].startswith("trimmed")]
    others = [row for row in shown if row not in artifact and row not in parts]
    series = [
        Series("the artifact, all profiles", "bits", points(artifact), False, "square"),
        Series("a part of it, one profile", "aware", points(parts), True),
        Series("other files", "plain", points(others), False, "diamond"),
    ]
    largest = max(row["bytes"] / unit for row in shown)
    x = Axis.around("bytes, share of NNCF's int8 file", [0.0, largest], floor=0.0)
    names = [(height[row["file"]], _short(row["file"])) for row in shown]
    y = Axis("", 0.4, len(shown) + 0.6, names)
    return f"{model} (int8 is {unit / 1e6:.2f} MB)", x, y, series


def _short(name: str) -> str:
    return name.removeprefix("trimmed ").replace(" checkpoints", "").replace("nncf ", "")
