"""The picture of certificates of several models, with many more profiles than they ship."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from t3c.report.certificates import FigureRow, figures_chart
from t3c.report.panels import panels

Row = Mapping[str, Any]


def figures_picture(rows: Sequence[Row], study: Sequence[Row]) -> str:
    """Draw a panel a model: its profiles' figures, with first order of many more profiles."""
    charts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        known = {row["profile"] for row in mine}
        shown = [
            FigureRow(
                row["profile"], row["mean"], row["first_order"], row["spectral"], row["epsilon"],
                row["worst_case"],
            )
            for row in mine
        ]  # fmt: skip
        shown += [
            FigureRow("", row["drift"], row["first_order"], row["spectral"])
            for row in study
            if row["model"] == model and row["profile"] not in known
        ]
        charts.append(figures_chart(f"{model} ({len(shown)} profiles)", shown))
    return panels("Mean drift against each figure of its certificate", charts)
