"""The pictures of a results page: accuracy against cost, certificates, ablations, allocation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from lab.report.labels import FLOOR, Tag, placed, stroke, written
from lab.report.results import FULL, MISSING, PREFIX, Row, number, speaks
from t3c.report.chart import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Box, Point, Series
from t3c.report.chart import chart as framed
from t3c.report.panels import HEAD, STYLE

OWN = """
.whisker { stroke-width: 1.5; } .leader { stroke: #666; stroke-width: 1; }
.label { paint-order: stroke; stroke: #fff; stroke-width: 3px; stroke-linejoin: round; }
.dot { fill-opacity: 0.45; stroke: none; } .over { fill: #b3590b; fill-opacity: 0.9; stroke: none; }
.equal { stroke: #444; stroke-dasharray: 6 4; } .original { fill: #222; stroke: #222; }
"""
END = WIDTH - RIGHT
FAR = 1.5  # times the dearest of the others: there the original is at the edge too
KINDS = (
    ("T3C, profiles of one artifact", "aware", "circle"),
    ("baselines", "plain", "diamond"),
    ("original", "original", "square"),
)
RAMP = ((255, 255, 255), (86, 160, 212))  # dark text is readable on all of it


@dataclass(frozen=True)
class Quality:
    """What a method is worth: `key` of its row `times` so much, more being `better` or less.

    `lost` names how much of it is lost to the original, as a share of that if `relative`. A picture
    shows `fall` from the best; what is worse is named at its edge.
    """

    key: str
    title: str
    lost: str
    fall: float
    times: float = 1.0
    better: int = 1
    relative: bool = False

    def span(self, full: float, lost: float) -> float:
        """What an original of that quality leaves when so much is lost."""
        return full * (1 + lost) if self.relative else full - self.times * lost


ACCURACY = Quality("accuracy", "accuracy, %", "drop", 15.0, times=100.0)
PERPLEXITY = Quality("perplexity", "perplexity", "over", 1.0, better=-1, relative=True)


@dataclass(frozen=True)
class Shown:
    """A method: its kind, cost, quality and the interval of that."""

    name: str
    kind: int
    cost: float
    quality: float
    span: tuple[float, ...]


def results_pictures(model: str, tables: Mapping[str, Sequence[Row]]) -> dict[str, str]:
    """SVG files by what they show; those that nothing was measured for are left out."""
    found = {
        "pareto": pareto_picture(model, tables.get("results") or []),
        "certificates": drift_picture(
            model, tables.get("drifts") or [], tables.get("certificates") or []
        ),
        "ablations": ablation_picture(model, tables.get("ablations") or []),
        "allocation": allocation_picture(model, tables.get("allocation") or []),
    }
    return {name: picture for name, picture in found.items() if picture}


def pareto_picture(model: str, rows: Sequence[Row]) -> str:
    """Quality against p50 and against size; whiskers are the interval of the loss to full."""
    quality, one = (PERPLEXITY, "token") if speaks(rows) else (ACCURACY, "sample")
    charts = [
        (name, _pareto(name, f"{what}, {unit}", unit, rows, key, quality))
        for name, what, unit, key in (
            (f"{model}: {quality.key} and latency", f"p50 of one {one}", "ms", "p50"),
            (f"{model}: {quality.key} and size", "size on disk", "MB", "size_mb"),
        )
    ]
    series = [Series(name, style, (), shape=shape) for name, style, shape in KINDS]
    note = "dashed: original; whiskers: 95% of the difference to it; triangles: off the scale"
    return _sheet(f"{model}: {quality.key} against latency and size", charts, series, note)


def drift_picture(model: str, drifts: Sequence[Row], certificates: Sequence[Row]) -> str:
    """The drift of single samples against the epsilon of their profile, with the diagonal."""
    pairs = [
        (row["name"], epsilon, seen)
        for row in drifts
        for epsilon, seen in [(number(row, "epsilon"), number(row, "observed"))]
        if epsilon and epsilon > 0 and seen is not None
    ]
    if not any(seen > 0 for _, _, seen in pairs):
        return ""
    least = min(seen for _, _, seen in pairs if seen > 0)  # zero has no logarithm
    across = [math.log10(epsilon) for _, epsilon, _ in pairs]
    up = [math.log10(max(seen, least)) for _, _, seen in pairs]
    x = _decades("epsilon, relative to the output's norm (logarithmic)", across)
    y = _decades("drift of a sample (logarithmic)", [*up, *across])
    ends = [Point(v, v) for v in (max(x.low, y.low), min(x.high, y.high))]
    diagonal = Series("drift = epsilon", "equal", ends, line=True, shape="none")
    parts, taken, tops = list[str](), list[Box](), dict[str, Tag]()
    covered = {row["name"]: number(row, "coverage") for row in certificates}
    for index, (name, epsilon, seen) in enumerate(pairs):
        middle, v = x.at(across[index], LEFT, END), y.at(up[index], FLOOR, TOP)
        # Samples of a profile share one epsilon; side by side they can be told apart.
        h = middle + 10 * (index * 0.618 % 1) - 5
        over = seen > epsilon
        parts.append(
            _mark("over" if over else "aware dot", "diamond" if over else "circle", h, v, 3)
        )
        taken.append((h - 4, v - 4, h + 4, v + 4))
        share = covered.get(name)
        if name not in tops or v < tops[name].v:
            tops[name] = Tag(middle, v, name if share is None else f"{name} {share:.1%}")
    (a, b), (c, d) = ((x.at(p.x, LEFT, END), y.at(p.y, FLOOR, TOP)) for p in ends)
    parts += placed([*tops.values()], taken, [(a, b, c, d)])
    title = f"{model}: drift of samples against their certificate"
    chart = _inside(framed(title, x, y, [diagonal]), parts)
    key = [Series("within epsilon", "aware", ()), Series("beyond it", "over", (), shape="diamond")]
    return _sheet(title, [(title, chart)], key, "dashed: drift = epsilon. Percentages: coverage")


def ablation_picture(model: str, rows: Sequence[Row]) -> str:
    """The accuracy that each variant loses as a bar, with its latency and size beside it."""
    keys = ("drop", "drop_low", "drop_high")
    drops = [100 * d for row in rows for key in keys if (d := number(row, key)) is not None]
    if not drops:
        return ""
    left = 28 + 7.5 * max(len(row["variant"]) for row in rows)
    right, bottom = WIDTH - 236, 44 + 30 * len(rows)
    x = Axis.around("", [0.0, *drops], 0.0 if min(drops) >= 0 else None)
    parts, zero = [], x.at(0, left, right)
    for value, text in x.ticks:
        h = x.at(value, left, right)
        parts.append(stroke("grid", h, 40, h, bottom))
        parts.append(written("tick mid", h, bottom + 18, text))
    for index, row in enumerate(rows):
        drop, middle = number(row, "drop"), 44 + 30 * index + 15
        parts.append(written("tick end", left - 10, middle + 5, row["variant"]))
        words = [MISSING] if drop is None else [f"{100 * drop:.2f} points"]
        for key, unit in (("p50", "ms"), ("size_mb", "MB")):
            cost = number(row, key)
            words += [] if cost is None else [f"{cost:.3g} {unit}"]
        parts.append(written("label", right + 14, middle + 5, ", ".join(words)))
        if drop is not None:
            end = x.at(100 * drop, left, right)
            style = "aware" if row["variant"] == "joint" else "plain"
            box = f'x="{min(zero, end):.1f}" y="{middle - 9}" width="{abs(end - zero):.1f}"'
            parts.append(f'<rect class="{style}" {box} height="18"/>')
        low, high = number(row, "drop_low"), number(row, "drop_high")
        if low is not None and high is not None:
            a, b = (x.at(100 * end, left, right) for end in (low, high))
            parts += _whisker("original", a, middle, b, middle)
    parts.append(stroke("axis", zero, 40, zero, bottom))
    below = "accuracy below the original, points"
    parts.append(written("title mid", (left + right) / 2, bottom + 42, below))
    title = f"{model}: what each part is worth"
    return _file(title, WIDTH, bottom + 56, [written("name", 20, 24, title), *parts])


def allocation_picture(model: str, rows: Sequence[Row]) -> str:
    """Layers down, profiles across: rank as colour, bits as text; without the prefix all share."""
    layers = dict.fromkeys((row["layer"], row.get("block") or "") for row in rows)
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    found = {(row["layer"], row["profile"]): row for row in rows}
    if not layers:
        return ""
    short = _shortened([layer for layer, _ in layers])
    left, wide, tall = 90.0 + 7.2 * max(map(len, short.values())), 74, 19
    parts, top, block = list[str](), 92.0, None
    for index, profile in enumerate(profiles):
        parts.append(written("title mid", left + wide * (index + 0.5), top - 8, profile))
    for layer, part in layers:
        if part != block:
            top, block = top + (6 if block is not None else 0), part
            parts.append(written("title", 20, top + 14, part))
        parts.append(written("tick end", left - 8, top + 14, short[layer]))
        for index, profile in enumerate(profiles):
            cell = found.get((layer, profile), {})
            parts += _cell(left + wide * index, top, wide, tall, cell)
        top += tall
    width = max(left + wide * len(profiles) + 20, 560)
    title = f"{model}: rank and bits of every layer"
    return _file(title, width, top + 16, [written("name", 20, 26, title), *_ramp(20, 40), *parts])


def _shortened(names: Sequence[str]) -> dict[str, str]:
    """Names without the modules that all of them begin with."""
    paths = [name.split(".") for name in names]
    skip = 0
    while len({path[skip] for path in paths}) == 1 and all(len(p) > skip + 1 for p in paths):
        skip += 1
    return {name: ".".join(path[skip:]) for name, path in zip(names, paths, strict=True)}


def _cell(h: float, v: float, wide: float, tall: float, row: Row) -> list[str]:
    rank, bits = number(row, "rank"), number(row, "bits")
    colour = "#fff" if rank is None else _colour(rank)
    box = f'x="{h:.1f}" y="{v:.1f}" width="{wide}" height="{tall}"'
    text = "-" if bits is None else f"{bits:.3g}"
    return [
        f'<rect {box} fill="{colour}" stroke="#999" stroke-width="0.5"/>',
        written("tick mid", h + wide / 2, v + 14, text),
    ]


def _ramp(h: float, v: float) -> list[str]:
    """The key of the colours: rank from 0 to all of it."""
    parts = [written("title", h, v + 14, "share of full rank: 0")]
    for step in range(11):
        box = f'x="{h + 146 + 14 * step}" y="{v}" width="14" height="18"'
        parts.append(f'<rect {box} fill="{_colour(step / 10)}" stroke="#999" stroke-width="0.5"/>')
    return [*parts, written("title", h + 308, v + 14, "1; in the cells: bits")]


def _colour(share: float) -> str:
    part = min(max(share, 0.0), 1.0)
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in zip(*RAMP, strict=True))


def _pareto(
    name: str, words: str, unit: str, rows: Sequence[Row], key: str, quality: Quality
) -> str:
    """One frame of quality against a cost, or nothing where neither is known."""
    shown = _shown(rows, key, quality)
    if not shown:
        return ""
    worth = {s: quality.better * s.quality for s in shown}
    least = max(worth.values()) - quality.fall
    end = max(s.cost for s in [s for s in shown if s.kind != 2] or shown) * FAR
    costs = [s.cost for s in shown if s.cost <= end]
    room = 0.08 * (max(costs) - min(costs))  # for the labels of the dearest
    x = Axis.around(words, [*costs, max(costs) + room])
    inside = [s for s in shown if worth[s] >= least]
    y = Axis.around(quality.title, [v for s in inside for v in (s.quality, *s.span)])
    line = [Point(s.cost, s.quality) for s in inside if s.kind == 0]
    series = [Series("", "aware", line, True, "none")]
    series += [
        Series("", "equal", [Point(v, s.quality) for v in (x.low, x.high)], True, "none")
        for s in inside
        if s.kind == 2
    ]
    places = [(x.at(p.x, LEFT, END), y.at(p.y, FLOOR, TOP)) for p in line]
    parts, tags, lines = list[str](), list[Tag](), [(*a, *b) for a, b in pairwise(places)]
    edge = (FLOOR - 9, "down") if quality.better > 0 else (TOP + 9, "up")
    for s in shown:
        _, style, shape = KINDS[s.kind]
        h, v, text = x.at(s.cost, LEFT, END), y.at(s.quality, FLOOR, TOP), s.name
        if worth[s] < least:
            v, shape = edge
            text = f"{text} {s.quality:.1f}{'%' if quality is ACCURACY else ''}"
        if s.cost > end:
            h, shape, text = END - 9, "right", f"{text} {s.cost:.3g} {unit}"
        if s.span and worth[s] >= least:
            low, high = (y.at(value, FLOOR, TOP) for value in s.span)
            lines.append((h, high, h, low))
            parts += _whisker(style, h, low, h, high)
        parts.append(_mark(style, shape, h, v))
        tags.append(Tag(h, v, text))
    marks = [(t.h - 7, t.v - 7, t.h + 7, t.v + 7) for t in tags]
    return _inside(framed(name, x, y, series), [*parts, *placed(tags, marks, lines)])


def _shown(rows: Sequence[Row], key: str, quality: Quality) -> list[Shown]:
    found = []
    for row in rows:
        cost, value, name = number(row, key), number(row, quality.key), row["name"]
        if cost and cost > 0 and value is not None:
            kind = 0 if name.startswith(PREFIX) else 2 if name == FULL else 1
            span = _span(row, rows, quality)
            found.append(Shown(name, kind, cost, quality.times * value, span))
    return sorted(found, key=lambda one: one.kind)  # T3C's labels have the first choice


def _span(row: Row, rows: Sequence[Row], quality: Quality) -> tuple[float, ...]:
    """What the interval of the loss to the original leaves of its quality for a row."""
    full = next((number(r, quality.key) for r in rows if r["name"] == FULL), None)
    low, high = number(row, f"{quality.lost}_low"), number(row, f"{quality.lost}_high")
    if full is None or low is None or high is None or row["name"] == FULL:
        return ()
    return tuple(sorted(quality.span(quality.times * full, lost) for lost in (low, high)))


def _decades(title: str, logs: Sequence[float]) -> Axis:
    """An axis of logarithms with round numbers as ticks, at least two."""
    low, high = min(logs), max(logs)
    pad = max((high - low) * 0.1, 0.02)
    low, high = low - pad, high + pad
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), [s / 10 for s in range(10, 100)]):
        values = [p + math.log10(s) for p in range(math.floor(low), math.ceil(high)) for s in steps]
        inside = [value for value in values if low <= value <= high]
        if len(inside) >= 4:
            break
    every = max(1, -(-len(inside) // 8))
    return Axis(title, low, high, [(v, f"{10**v:.3g}") for v in inside[::every]])


def _inside(frame: str, parts: Sequence[str]) -> str:
    """A chart with more drawn into it."""
    return "\n".join([frame.removesuffix("</svg>"), *parts, "</svg>"])


def _sheet(title: str, charts: Sequence[tuple[str, str]], key: Sequence[Series], note: str) -> str:
    """Charts (name, SVG) one below the other under a key; nothing where there is no chart."""
    known = [(name, chart) for name, chart in charts if chart]
    parts = list[str]()
    h = 20.0
    for series in key:
        parts.append(_mark(series.style, series.shape, h + 6, 18))
        parts.append(written("title", h + 18, 23, series.name))
        h += 44 + 7.4 * len(series.name)
    parts.append(written("title", 20, 46, note))
    for index, (name, chart) in enumerate(known):
        top = 58 + index * (HEIGHT + HEAD)
        parts.append(written("name", 20, top + 22, name))
        place = f'<svg x="0" y="{top + HEAD}" width="{WIDTH}" height="{HEIGHT}" '
        parts.append(chart.replace("<svg ", place, 1))
    return _file(title, WIDTH, 58 + len(known) * (HEIGHT + HEAD), parts) if known else ""


def _file(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
        f"<title>{escape(title)}</title><style>{STYLE}{OWN}</style>",
        f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>', *parts, "</svg>\n",
    ])  # fmt: skip


def _mark(style: str, shape: str, h: float, v: float, r: float = 6) -> str:
    if shape == "circle":
        return f'<circle class="{style}" cx="{h:.1f}" cy="{v:.1f}" r="{r}"/>'
    sides = {
        "diamond": ((0, -1), (1, 0), (0, 1), (-1, 0)),
        "square": ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)),
        "down": ((-1, -0.7), (1, -0.7), (0, 1)),
        "up": ((-1, 0.7), (1, 0.7), (0, -1)),
        "right": ((-0.7, -1), (-0.7, 1), (1, 0)),
    }[shape]
    corners = " ".join(f"{h + r * a:.1f},{v + r * b:.1f}" for a, b in sides)
    return f'<polygon class="{style}" points="{corners}"/>'


def _whisker(style: str, a: float, b: float, c: float, d: float) -> list[str]:
    """An upright or level line with caps."""
    h, v = (4, 0) if a == c else (0, 4)
    caps = ((a - h, b - v, a + h, b + v), (c - h, d - v, c + h, d + v))
    return [stroke(f"{style} whisker", *line) for line in ((a, b, c, d), *caps)]
