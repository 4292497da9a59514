"""The picture of servers under changing load: what is offered, who serves, and what is missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from t3c.report.chart import Axis, Point, Series
from t3c.report.panels import panels

Row = Mapping[str, Any]
Chart = tuple[str, Axis, Axis, list[Series]]
STYLES = {
    "t3c adaptive": "aware", "fixed max": "plain", "fixed tiny": "bits", "fixed ptq8": "other",
}  # fmt: skip
ADAPTIVE = "t3c adaptive"


def serving_picture(rows: Sequence[Row], objective_ms: float, profiles: Sequence[str]) -> str:
    """Load, the adaptive server's profile, p99 and misses, second by second of one run."""
    charts = [
        _load(rows), _profiles(rows, profiles), _latency(rows, objective_ms), _missed(rows),
    ]  # fmt: skip
    return panels("One server under changing load, beside servers of one model", charts)


def _of(rows: Sequence[Row], server: str) -> list[Row]:
    return [row for row in rows if row["server"] == server]


def _line(name: str, style: str, points: Sequence[tuple[float, float]]) -> Series:
    return Series(name, style, [Point(x, y) for x, y in points], line=True, shape="dot")


def _seconds(rows: Sequence[Row]) -> Axis:
    return Axis.around("seconds", [0.0, max(row["second"] for row in rows)], floor=0.0)


def _load(rows: Sequence[Row]) -> Chart:
    offered = [(row["second"], row["offered"]) for row in _of(rows, ADAPTIVE)]
    y = Axis.around("requests a second", [count for _, count in offered], floor=0.0)
    return "Load that is offered", _seconds(rows), y, [_line("offered", "offered", offered)]


def _profiles(rows: Sequence[Row], profiles: Sequence[str]) -> Chart:
    height = {name: float(index) for index, name in enumerate(profiles)}
    served = [(r["second"], height[r["profile"]]) for r in _of(rows, ADAPTIVE) if r["profile"]]
    y = Axis("", -0.3, len(profiles) - 0.7, [(at, name) for name, at in height.items()])
    title = "The profile that answers most, adaptive"
    return title, _seconds(rows), y, [_line(ADAPTIVE, STYLES[ADAPTIVE], served)]


def _latency(rows: Sequence[Row], objective_ms: float) -> Chart:
    series = [
        _line(name, style, [(r["second"], r["p99"]) for r in _of(rows, name) if r["p99"]])
        for name, style in STYLES.items()
    ]
    last = max(row["second"] for row in rows)
    promised = _line("objective", "promised", [(0, objective_ms), (last, objective_ms)])
    most = max([objective_ms, *(point.y for one in series for point in one.points)])
    y = Axis.around("p99 of what was answered, ms", [0.0, most], floor=0.0)
    return "Latency and the objective", _seconds(rows), y, [*series, promised]


def _missed(rows: Sequence[Row]) -> Chart:
    series = [
        _line(name, style, [(r["second"], _share(r)) for r in _of(rows, name) if r["offered"]])
        for name, style in STYLES.items()
    ]
    y = Axis.around("refused or late, share of offered", [0.0, 1.0], floor=0.0)
    return "What is not answered within the objective", _seconds(rows), y, series


def _share(row: Row) -> float:
    return float(row["missed"] / row["offered"])
