"""Charts as SVG text, without a plotting library: points, lines and their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 20, 52


@dataclass(frozen=True)
class Point:
    """A mark with a label; `span` is a horizontal interval drawn through it."""

    x: float
    y: float
    label: str = ""
    span: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """Points of one kind; `style` is a CSS class, `line` joins them, shape "none" marks none, "dot"
    hardly."""

    name: str
    style: str
    points: Sequence[Point]
    line: bool = False
    shape: str = "circle"


@dataclass(frozen=True)
class Axis:
    """A title, and the bounds the data asks for with a margin."""

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = field(default=())

    @classmethod
    def around(cls, title: str, values: Sequence[float], floor: float | None = None) -> Axis:
        low, high = min(values), max(values)
        pad = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
        low = low - pad if floor is None else floor
        return cls(title, low, high + pad, [(t, f"{t:g}") for t in _ticks(low, high + pad)])

    def at(self, value: float, start: float, end: float) -> float:
        return start + (value - self.low) / (self.high - self.low) * (end - start)


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """One chart as an <svg> element, with a title that a screen reader reads."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
    ]
    for value, text in y.ticks:
        v = y.at(value, bottom, TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{v:.1f}" y2="{v:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{v + 4:.1f}">{escape(text)}</text>')
    for value, text in x.ticks:
        h = x.at(value, LEFT, right)
        parts.append(f'<text class="tick mid" x="{h:.1f}" y="{bottom + 18}">{escape(text)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle = (LEFT + right) / 2
    parts.append(f'<text class="title mid" x="{middle}" y="{HEIGHT - 10}">{escape(x.title)}</text>')
    parts.append(
        f'<text class="title mid" transform="translate(14 {(TOP + bottom) / 2}) rotate(-90)">'
        f"{escape(y.title)}</text>"
    )
    for one in series:
        parts += _draw(one, x, y, right, bottom)
    marks = [
        (x.at(p.x, LEFT, right), y.at(p.y, bottom, TOP), p.label) for s in series for p in s.points
    ]
    parts += _labels(marks)
    return "\n".join([*parts, "</svg>"])


def legend(series: Sequence[Series]) -> str:
    """The names of the series beside their marks, as HTML."""
    items = [
        f'<li><svg class="key" viewBox="0 0 14 14">{_mark(s, 7, 7)}</svg>{escape(s.name)}</li>'
        for s in series
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _draw(series: Series, x: Axis, y: Axis, right: float, bottom: float) -> list[str]:
    places = [(x.at(p.x, LEFT, right), y.at(p.y, bottom, TOP), p) for p in series.points]
    parts = []
    if series.line and len(places) > 1:
        path = " ".join(f"{h:.1f},{v:.1f}" for h, v, _ in places)
        parts.append(f'<polyline class="{series.style} line" points="{path}"/>')
    for h, v, point in places:
        if point.span is not None:
            a, b = (x.at(value, LEFT, right) for value in point.span)
            parts.append(
                f'<line class="{series.style} span" x1="{a:.1f}" x2="{b:.1f}" '
                f'y1="{v:.1f}" y2="{v:.1f}"/>'
            )
        parts.append(_mark(series, h, v))
    return parts


def _labels(marks: Sequence[tuple[float, float, str]]) -> list[str]:
    """Labels beside their marks, moved up or down until they cover neither marks nor each other."""
    taken = [(h - 6, v - 6, h + 6, v + 6) for h, v, _ in marks]
    parts = []
    for h, v, text in marks:
        if not text:
            continue
        wide = 7.5 * len(text) + 4
        left = h + 9 if h + 9 + wide < WIDTH else h - 9 - wide
        shifts = (-10, 20, -24, 34, -38, 48, 62, 76)
        boxes = [(left, v + shift - 12, left + wide, v + shift + 3) for shift in shifts]
        inside = [box for box in boxes if box[1] >= 0 and box[3] <= HEIGHT - BOTTOM]
        box = next((b for b in inside if not any(_overlap(b, t) for t in taken)), boxes[1])
        taken.append(box)
        parts.append(
            f'<text class="label" x="{left:.1f}" y="{box[3] - 3:.1f}">{escape(text)}</text>'
        )
    return parts


Box = tuple[float, float, float, float]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _mark(series: Series, h: float, v: float) -> str:
    if series.shape == "none":
        return ""
    if series.shape == "dot":
        return f'<circle class="{series.style}" cx="{h:.1f}" cy="{v:.1f}" r="1.5"/>'
    if series.shape == "square":
        return (
            f'<rect class="{series.style}" x="{h - 5:.1f}" y="{v - 5:.1f}" width="10" height="10"/>'
        )
    if series.shape == "diamond":
        corners = f"{h:.1f},{v - 6:.1f} {h + 6:.1f},{v:.1f} {h:.1f},{v + 6:.1f} {h - 6:.1f},{v:.1f}"
        return f'<polygon class="{series.style}" points="{corners}"/>'
    return f'<circle class="{series.style}" cx="{h:.1f}" cy="{v:.1f}" r="5"/>'


def _ticks(low: float, high: float, most: int = 6) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / most))
    step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= most)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + i) * step, 12) for i in range(count)]
