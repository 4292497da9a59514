"""Labels near their marks, none over another, and the strokes they are drawn with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from t3c.report.chart import BOTTOM, HEIGHT, LEFT, WIDTH, Box

FLOOR = HEIGHT - BOTTOM


@dataclass(frozen=True)
class Tag:
    """A text to be put near the mark at (h, v)."""

    h: float
    v: float
    text: str


def placed(tags: Sequence[Tag], marks: Sequence[Box], lines: Sequence[Box]) -> list[str]:
    """Every tag near its mark, none over another; over marks and lines only for want of room."""
    dots = [dot for line in lines for dot in _along(line)]
    boxes, parts = list[Box](), list[str]()
    for tag in tags:
        near = [box for box in _around(tag) if not any(_touch(box, other) for other in boxes)]
        clear = [box for box in near if not any(_touch(box, mark) for mark in marks)]
        barred = [*boxes, *(mark for mark in marks if not _holds(mark, (tag.h, tag.v)))]
        free = (
            box
            for box in clear
            if not any(_holds(box, dot) for dot in dots)
            and not any(_holds(b, dot) for dot in _along(_leader(tag, box)) for b in barred)
        )
        box = next(free, None) or (clear or near or [*_around(tag)])[0]
        leader, away = _leader(tag, box), _away(tag, box)
        # Without a leader a reader takes a label for that of the nearest mark.
        if away > 16 or any(_away(other, box) < away for other in tags):
            parts.append(stroke("leader", *leader))
            dots += _along(leader)
        boxes.append(box)
        parts.append(written("label", box[0] + 2, box[3] - 4, tag.text))
    return parts


def _leader(tag: Tag, box: Box) -> Box:
    h, v = min(max(tag.h, box[0]), box[2]), min(max(tag.v, box[1]), box[3])
    return tag.h, tag.v, h, v


def _away(tag: Tag, box: Box) -> float:
    leader = _leader(tag, box)
    return math.dist(leader[:2], leader[2:])


def _around(tag: Tag) -> Iterator[Box]:
    """Places for a tag inside the frame, the nearest first."""
    half, tall = 3.6 * len(tag.text) + 2, 8
    for reach in (3, 8, 14, 22, 32, 44, 58, 74, 94, 118, 146, 180, 220):
        for turn in (0, 2, 14, 4, 12, 8, 6, 10, 1, 15, 3, 13, 5, 11, 7, 9):
            angle = turn * math.pi / 8
            h = tag.h + math.cos(angle) * (half + 6 + reach)
            v = tag.v - math.sin(angle) * (tall + 6 + reach)
            if half + LEFT < h < WIDTH - 2 - half and tall + 2 < v < FLOOR - tall - 1:
                yield h - half, v - tall, h + half, v + tall


def _touch(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _holds(box: Box, dot: tuple[float, float]) -> bool:
    return box[0] <= dot[0] <= box[2] and box[1] <= dot[1] <= box[3]


def _along(line: Box) -> list[tuple[float, float]]:
    a, b, c, d = line
    steps = max(1, round(math.dist((a, b), (c, d)) / 4))
    return [(a + (c - a) * i / steps, b + (d - b) * i / steps) for i in range(steps + 1)]


def stroke(style: str, a: float, b: float, c: float, d: float) -> str:
    return f'<line class="{style}" x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}"/>'


def written(style: str, h: float, v: float, text: str) -> str:
    return f'<text class="{style}" x="{h:.1f}" y="{v:.1f}">{escape(text)}</text>'
