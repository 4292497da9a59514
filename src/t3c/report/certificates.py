"""The picture of certificates: drift as it was seen against each figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from t3c.artifact.ledger import Certification
from t3c.report.chart import Axis, Point, Series
from t3c.report.panels import panels

FIGURES = (
    ("first_order", "first order (estimate)", "aware", "circle"),
    ("epsilon", "epsilon (guarantee)", "bits", "square"),
    ("spectral", "spectral (estimate)", "plain", "diamond"),
    ("worst_case", "worst case (bound)", "other", "circle"),
)


@dataclass(frozen=True)
class FigureRow:
    """A profile's mean drift as it was seen, and the figures of its certificate."""

    profile: str
    mean: float
    first_order: float | None
    spectral: float | None
    epsilon: float | None = None
    worst_case: float | None = None


def certificate_picture(found: Certification) -> str:
    """Mean drift of each profile against each of its figures, on logarithmic axes."""
    rows = [
        FigureRow(c.profile, c.mean, c.first_order, c.spectral, c.epsilon, c.worst_case)
        for c in found.entries
    ]
    chart = figures_chart(
        f"{found.engine}, {found.entries[0].samples} samples", rows, labelled=True
    )
    return panels("Mean drift against each figure of its certificate", [chart], columns=1)


def figures_chart(
    name: str, rows: Sequence[FigureRow], labelled: bool = False
) -> tuple[str, Axis, Axis, list[Series]]:
    """Return one chart of rows: its name, its axes and a series a figure."""
    series = []
    for key, title, style, shape in FIGURES:
        figures = [(row, getattr(row, key)) for row in rows]
        points = [
            Point(
                _log(figure), _log(row.mean), row.profile if labelled and key == "epsilon" else ""
            )
            for row, figure in figures
            if figure is not None
        ]
        if points:
            series.append(Series(title, style, points, shape=shape))
    across = [point.x for one in series for point in one.points]
    up = [point.y for one in series for point in one.points]
    x = _axis("figure, relative to the output's norm", across + up)
    y = _axis("mean drift that was seen", up)
    ends = [Point(max(x.low, y.low), max(x.low, y.low)), Point(y.high, y.high)]
    series.append(Series("equal", "grid", ends, line=True, shape="none"))
    return name, x, y, series


def _log(value: float) -> float:
    return math.log10(max(value, 1e-9))


def _axis(title: str, values: Sequence[float]) -> Axis:
    low, high = math.floor(min(values)), math.ceil(max(values) + 1e-9)
    high = max(high, low + 1)
    steps = [1, 2, 5] if high - low <= 2 else [1]
    every = max(1, (high - low) // 6)
    ticks = [
        (power + math.log10(step), f"{step * 10.0**power:g}")
        for power in range(low, high + 1, every)
        for step in steps
        if power + math.log10(step) <= high
    ]
    return Axis(title, low, high, ticks)
