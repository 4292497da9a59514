"""Draw the figures of certificates of several models, a panel each."""

from __future__ import annotations

from collections.abc import Sequence

from t3c.report.certificates import Row, drift_chart
from t3c.report.panels import panels


def figures_picture(rows: Sequence[Row], study: Sequence[Row]) -> str:
    """Return a panel a model: its profiles' figures, with first order of many more profiles."""
    charts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        more = [
            {**dict.fromkeys(("epsilon", "worst_case")), "profile": "", "mean": row["drift"],
             "first_order": row["first_order"], "spectral": row["spectral"]}
            for row in study
            if row["model"] == model and row["profile"] not in {r["profile"] for r in mine}
        ]  # fmt: skip
        charts.append(drift_chart(f"{model} ({len(mine) + len(more)} profiles)", [*mine, *more]))
    return panels("Mean drift against each figure of its certificate", charts)
