from __future__ import annotations

import math
from itertools import combinations, pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.report.results_charts import (
    ablation_picture,
    allocation_picture,
    drift_picture,
    pareto_picture,
    results_pictures,
)
from t3c.report.chart import BOTTOM, HEIGHT, WIDTH

SVG = "{http://www.w3.org/2000/svg}"
PROFILES = ("tiny", "small", "med", "large", "max")
Element = ElementTree.Element
Box = tuple[float, float, float, float]


def method(name: str, accuracy: float, p50: float, size: float) -> dict[str, Any]:
    drop = 0.9 - accuracy
    return {
        "name": name, "accuracy": accuracy, "p50": p50, "size_mb": size, "drop": drop,
        "drop_low": drop - 0.004, "drop_high": drop + 0.002,
    }  # fmt: skip


T3C = [
    method(f"t3c-{name}", 0.85 + 0.0125 * i, 4.0 + i, 3.0 + i) for i, name in enumerate(PROFILES)
]
RESULTS = [method("full", 0.9, 30.0, 40.0), method("ptq8", 0.899, 8.2, 8.0), *T3C]


def panels(picture: str) -> list[Element]:
    """The frames inside a picture, each with coordinates of its own."""
    return ElementTree.fromstring(picture).findall(f"{SVG}svg")


def having(root: Element, tag: str, *styles: str) -> list[Element]:
    return [e for e in root.iter(f"{SVG}{tag}") if set(styles) <= set(e.get("class", "").split())]


def at(element: Element, *names: str) -> list[float]:
    return [float(element.get(name, "nan")) for name in names]


def box(label: Element) -> Box:
    """Where a label is drawn, with room for a wide font of 12 pixels."""
    x, y = at(label, "x", "y")
    return x, y - 10, x + 7.0 * len(label.text or ""), y + 3


def apart(a: Box, b: Box) -> bool:
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_profiles_are_joined_and_lie_where_they_should() -> None:
    latency, size = panels(pareto_picture("net", RESULTS))
    for panel, key in ((latency, "p50"), (size, "size_mb")):
        (line,) = having(panel, "polyline", "aware", "line")
        places = [tuple(map(float, p.split(","))) for p in line.get("points", "").split()]
        marks = [tuple(at(c, "cx", "cy")) for c in having(panel, "circle", "aware")]
        assert places == marks
        assert len(places) == 5
        # Equal steps in cost and in accuracy are equal steps in the picture.
        assert [row[key] for row in T3C] == sorted(row[key] for row in T3C)
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(places)]
        assert all(h > 0 > v for h, v in steps)
        for h, v in steps:
            assert (h, v) == pytest.approx(steps[0], abs=0.2)


def test_whiskers_are_the_interval_of_the_loss() -> None:
    panel = panels(pareto_picture("net", RESULTS))[0]
    marks = [at(c, "cx", "cy") for c in having(panel, "circle", "aware")]
    per_point = (marks[0][1] - marks[1][1]) / 1.25
    lines = [at(e, "x1", "y1", "x2", "y2") for e in having(panel, "line", "aware", "whisker")]
    upright = [one for one in lines if one[0] == one[2]]
    assert len(upright) == 5
    for (h, v), (x, low, _, high) in zip(marks, upright, strict=True):
        assert x == h
        # The loss is at least 0.4 points less, at most 0.2 points more than it was seen.
        assert low - v == pytest.approx(0.2 * per_point, abs=0.2)
        assert v - high == pytest.approx(0.4 * per_point, abs=0.2)
    assert not having(panel, "line", "original", "whisker")


def test_what_is_off_the_scale_is_named_with_its_value() -> None:
    rows = [*RESULTS, method("ptq4", 0.123, 8.1, 2.0)]
    panel = panels(pareto_picture("net", rows))[0]
    labels = {label.text for label in having(panel, "text", "label")}
    assert {"ptq4 12.3%", "full 30 ms", "ptq8", *(row["name"] for row in T3C)} == labels
    near = [*RESULTS[1:], method("full", 0.9, 11.9, 40.0)]  # within half as much again
    labels = {
        label.text for label in having(panels(pareto_picture("net", near))[0], "text", "label")
    }
    assert "full" in labels
    marks = {tuple(at(c, "cx", "cy")) for c in having(panel, "circle", "aware")}
    alone = panels(pareto_picture("net", RESULTS))[0]
    # A method that answers nothing does not squeeze the others.
    assert {v for _, v in marks} == {
        v for _, v in (at(c, "cx", "cy") for c in having(alone, "circle"))
    }


def spoken(name: str, over: float, p50: float) -> dict[str, Any]:
    return {
        "name": name, "perplexity": 5.0 * (1 + over), "p50": p50, "size_mb": p50, "over": over,
        "over_low": over - 0.01, "over_high": over + 0.01, "accuracy": 0.5, "drop": 0.0,
    }  # fmt: skip


def test_language_models_are_drawn_by_their_perplexity() -> None:
    rows = [
        spoken("full", 0.0, 9.0), spoken("ptq8w", 0.02, 8.0), spoken("lrft", 3.0, 6.0),
        *(spoken(f"t3c-{name}", 0.1 - 0.02 * i, 5.0 + i) for i, name in enumerate(PROFILES)),
    ]  # fmt: skip
    picture = pareto_picture("lm", rows)
    panel = panels(picture)[0]
    marks = [at(c, "cx", "cy") for c in having(panel, "circle", "aware")]
    # More cost, less perplexity: further right and further down.
    assert all(b[0] > a[0] and b[1] > a[1] for a, b in pairwise(marks))
    labels = {label.text: label for label in having(panel, "text", "label")}
    assert "lrft 20.0" in labels
    assert "lm: perplexity and latency" in "".join(ElementTree.fromstring(picture).itertext())
    per_unit = (marks[1][1] - marks[0][1]) / (5.0 * 0.02)
    lines = [at(e, "x1", "y1", "x2", "y2") for e in having(panel, "line", "aware", "whisker")]
    upright = [one for one in lines if one[0] == one[2]]
    assert abs(upright[0][1] - upright[0][3]) == pytest.approx(5.0 * 0.02 * per_unit, abs=0.3)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_labels_never_cover_each_other(data: st.DataObject) -> None:
    """However close to each other methods lie."""
    spread = data.draw(st.sampled_from([0.0, 0.01, 0.1, 1.0]))
    share = st.floats(0, 1).map(lambda value: spread * value)
    names = ["full", *(f"t3c-{name}" for name in PROFILES), "ptq8", "ptq4", "qat8", "mpqat"]
    names += ["magprune", "moveprune", "lrft", "loracomp", "sparsegpt", "kdptq"]
    rows = [
        method(name, 0.9 - 0.2 * data.draw(share), 5 + 5 * data.draw(share), 5 + data.draw(share))
        for name in names
    ]
    for panel in panels(pareto_picture("net", rows)):
        labels = having(panel, "text", "label")
        assert sorted((label.text or "").split()[0] for label in labels) == sorted(names)
        boxes = [box(label) for label in labels]
        assert all(apart(a, b) for a, b in combinations(boxes, 2))
        for left, top, right, bottom in boxes:
            assert left >= 0
            assert top >= 0
            assert right <= WIDTH
            assert bottom <= HEIGHT - BOTTOM


def test_labels_leave_marks_alone_where_there_is_room() -> None:
    """Neighbours at one height are nearer to each other than their labels are wide."""
    rows = [method(f"method{i}", 0.8, 5 + 0.25 * i, 5.0 + i) for i in range(4)]
    rows += [method("method-far", 0.9, 10.0, 30.0)]
    for row in rows:
        del row["drop_low"]
    for panel in panels(pareto_picture("net", rows)):
        marks = []
        for mark in having(panel, "polygon", "plain"):
            corners = [p.split(",") for p in mark.get("points", "").split()]
            sides = [[float(c[i]) for c in corners] for i in (0, 1)]
            marks.append((min(sides[0]), min(sides[1]), max(sides[0]), max(sides[1])))
        assert len(marks) == 5
        assert 0 < marks[1][0] - marks[0][2] < 7 * len("method0")
        for label in having(panel, "text", "label"):
            assert all(apart(box(label), mark) for mark in marks)


DRIFTS = [
    {"name": name, "epsilon": epsilon, "observed": epsilon * share}
    for name, epsilon in (("tiny", 0.5), ("max", 0.02))
    for share in (0.0, 0.2, 0.5, 0.99, 1.01)
]


def test_drifts_lie_on_their_side_of_the_diagonal() -> None:
    covered: list[dict[str, Any]] = [
        {"name": "tiny", "coverage": 0.8},
        {"name": "max", "coverage": None},
    ]
    (panel,) = panels(drift_picture("net", DRIFTS, covered))
    (diagonal,) = having(panel, "polyline", "equal")
    (a, b), (c, d) = (map(float, p.split(",")) for p in diagonal.get("points", "").split())
    assert a < c
    assert b > d
    dots = [at(e, "cx", "cy") for e in having(panel, "circle", "dot")]
    assert len(dots) == 8
    assert len(having(panel, "polygon", "over")) == 2
    for h, v in dots:
        # Dots are moved by up to five pixels aside.
        assert v >= min(b + (d - b) * (x - a) / (c - a) for x in (h - 5, h + 5)) - 0.2
    assert {label.text for label in having(panel, "text", "label")} == {"tiny 80.0%", "max"}


def test_drifts_without_a_bound_are_no_picture() -> None:
    assert drift_picture("net", [dict(row, epsilon=None) for row in DRIFTS], []) == ""
    assert drift_picture("net", [dict(row, observed=0.0) for row in DRIFTS], []) == ""


def test_bars_are_as_long_as_what_is_lost() -> None:
    drops = {"joint": 0.004, "rank-only": 0.012, "greedy": -0.002, "unknown": None}
    rows = [
        {"variant": name, "drop": drop, "p50": 4.8, "size_mb": None} for name, drop in drops.items()
    ]
    root = ElementTree.fromstring(ablation_picture("net", rows))
    (joint,) = having(root, "rect", "aware")
    ranks, greedy = having(root, "rect", "plain")
    wide = at(joint, "width")[0]
    assert at(ranks, "width")[0] == pytest.approx(3 * wide, rel=0.01)
    assert at(greedy, "width")[0] == pytest.approx(wide / 2, rel=0.01)
    assert at(greedy, "x")[0] + wide / 2 == pytest.approx(at(joint, "x")[0], abs=0.2)
    texts = [label.text for label in having(root, "text", "label")]
    assert texts == [
        "0.40 points, 4.8 ms", "1.20 points, 4.8 ms", "-0.20 points, 4.8 ms",
        "not measured, 4.8 ms",
    ]  # fmt: skip
    assert not having(root, "line", "whisker")
    whiskers = [dict(row, drop_low=-0.001, drop_high=0.02) for row in rows]
    root = ElementTree.fromstring(ablation_picture("net", whiskers))
    assert len(having(root, "line", "whisker")) == 3 * len(rows)


def luminance(colour: str) -> float:
    """Relative luminance, as contrast is reckoned from (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_more_rank_is_darker_and_bits_stay_readable() -> None:
    ranks = (0.1, 0.3, 0.6, 0.9, 1.0)
    rows = [
        {"profile": name, "layer": layer, "block": block, "rank": rank, "bits": bits}
        for layer, block in (("net.stem", "early"), ("net.fc", "head"))
        for name, rank, bits in zip(PROFILES, ranks, (3, 4, 6, 8, 8), strict=True)
    ]  # fmt: skip
    rows[-1] = {"profile": "max", "layer": "net.fc", "block": "head", "rank": None, "bits": None}
    root = ElementTree.fromstring(allocation_picture("net", rows))
    fills = [e.get("fill", "") for e in root.iter(f"{SVG}rect") if e.get("stroke-width")]
    stem = [luminance(fill) for fill in fills[-10:-5]]
    assert stem == sorted(stem, reverse=True)
    assert len(set(stem)) == 5
    dark = luminance("#222222")
    assert all((value + 0.05) / (dark + 0.05) > 4.5 for value in stem)
    ticks = [e.text for e in having(root, "text", "tick", "mid")]
    assert ticks == ["3", "4", "6", "8", "8", "3", "4", "6", "8", "-"]
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert {"stem", "fc", "early", "head", *PROFILES} <= set(texts)


def test_pictures_are_titled_files_of_what_was_measured() -> None:
    tables: dict[str, list[dict[str, Any]]] = {
        "results": RESULTS,
        "drifts": DRIFTS,
        "ablations": [{"variant": "<joint>", "drop": 0.01}],
        "allocation": [{"profile": "med", "layer": "a&b", "rank": 0.5, "bits": 8}],
    }
    found = results_pictures("net", tables)
    assert list(found) == ["pareto", "certificates", "ablations", "allocation"]
    for picture in found.values():
        root = ElementTree.fromstring(picture)
        assert (root[0].tag, (root[0].text or "").startswith("net: ")) == (f"{SVG}title", True)
        assert root.get("aria-label") == root[0].text
        width, height = map(float, root.get("viewBox", "").split()[2:])
        assert (
            root.find(f"{SVG}rect[@fill='#fff'][@width='{width:g}'][@height='{height:g}']")
            is not None
        )
        assert all(
            math.isfinite(v) for e in having(root, "text") for v in at(e, "x", "y") if e.get("x")
        )
    assert results_pictures("net", {}) == {}
    assert results_pictures("net", {key: [] for key in tables}) == {}
    assert results_pictures("net", {"results": [dict(RESULTS[0], accuracy=None)]}) == {}


def test_a_picture_may_lack_one_of_its_costs() -> None:
    rows = [dict(row, size_mb=None) for row in RESULTS]
    (panel,) = panels(pareto_picture("net", rows))
    assert "p50 of one sample, ms" in {e.text for e in having(panel, "text", "title")}
