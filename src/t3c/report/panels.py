"""Several charts in one SVG file that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from t3c.report.chart import HEIGHT, WIDTH, Axis, Series, chart

STYLE = "\n" + (resources.files("t3c.report") / "panels.css").read_text()
HEAD, KEY, WORDS = 34, 34, 220


def panels(
    title: str, charts: Sequence[tuple[str, Axis, Axis, Sequence[Series]]], columns: int = 2
) -> str:
    """A grid of charts (name, x, y, series) under one key, as the text of an SVG file."""
    named = {s.name: s for _, _, _, series in charts for s in series if s.shape != "none"}
    width = columns * WIDTH
    abreast = min(len(named), (width - 64) // WORDS) or 1
    key = KEY * -(-len(named) // abreast)
    rows = -(-len(charts) // columns)
    height = key + rows * (HEIGHT + HEAD)
    box = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for index, one in enumerate(named.values()):
        x = 64 + index % abreast * min(300, (width - 64) // abreast)
        y = 18 + index // abreast * KEY
        parts.append(f'<circle class="{one.style}" cx="{x}" cy="{y}" r="6"/>')
        parts.append(f'<text class="title" x="{x + 14}" y="{y + 5}">{escape(one.name)}</text>')
    for index, (name, x_axis, y_axis, series) in enumerate(charts):
        left, top = index % columns * WIDTH, key + index // columns * (HEIGHT + HEAD)
        parts.append(f'<text class="name" x="{left + 64}" y="{top + 22}">{escape(name)}</text>')
        inner = chart(name, x_axis, y_axis, series)
        place = f'<svg x="{left}" y="{top + HEAD}" width="{WIDTH}" height="{HEIGHT}" '
        parts.append(inner.replace("<svg ", place, 1))
    return "\n".join([*parts, "</svg>\n"])
