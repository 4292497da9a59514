"""Snapping: nearest, nested, safe, whatever is proposed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.allocation.snap import Snap, SnapCode, Snapped, hold, snap
from t3c.control.knapsack import allocations
from t3c.control.menu import Option
from t3c.control.policy import Wish
from t3c.spec import Level

Chains = dict[str, list[Option]]
UNITS = ("a", "b", "c")


@st.composite
def chain_sets(draw: st.DrawFn) -> Chains:
    """Chains of points that rise in rank, bits or both; drift falls along them."""
    chains: Chains = {}
    for unit in UNITS[: draw(st.integers(1, 3))]:
        step = st.tuples(st.integers(0, 3), st.integers(0, 2)).filter(any)
        points = [Level(draw(st.integers(1, 4)), draw(st.integers(2, 5)))]
        for rank, bits in draw(st.lists(step, max_size=6)):
            point = Level(points[-1].level + rank, min(8, points[-1].bits + bits))
            if point != points[-1]:
                points.append(point)
        drifts = draw(st.lists(st.floats(0, 1), min_size=len(points), max_size=len(points)))
        drifts.sort(reverse=True)
        chains[unit] = [
            Option(point, 1.0 + index, drift**2)
            for index, (point, drift) in enumerate(zip(points, drifts, strict=True))
        ]
    return chains


# Halves make ties; any float makes the rounding of sums show.
numbers = st.integers(-2, 40).map(lambda n: n / 2) | st.floats(-1, 20)
wish_values = st.builds(Wish, numbers, numbers)
tolerances = st.none() | st.floats(0, 1.2)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[dict[str, Wish]], Chains, float | None]:
    chains = draw(chain_sets())
    wish = st.fixed_dictionaries(dict.fromkeys(chains, wish_values))
    return draw(st.lists(wish, min_size=1, max_size=4)), chains, draw(tolerances)


def limit(tolerance: float | None) -> float:
    return math.inf if tolerance is None else tolerance


def as_wishes(snapped: Snapped) -> list[dict[str, Wish]]:
    return [
        {unit: Wish(point.level, point.bits) for unit, point in allocation.points.items()}
        for allocation in snapped.allocations
    ]


def option_of(options: Sequence[Option], point: Level) -> Option:
    return next(option for option in options if option.point == point)


@given(problems())
def test_points_are_of_the_menus_nested_and_safe_or_top(problem) -> None:  # type: ignore[no-untyped-def]
    wishes, chains, tolerance = problem
    snapped = snap(wishes, chains, tolerance)
    assert len(snapped.allocations) == len(wishes)
    for below, above in itertools.pairwise(snapped.allocations):
        assert all(below.points[unit] <= above.points[unit] for unit in chains)
    for allocation in snapped.allocations:
        assert allocation.points.keys() == chains.keys()
        chosen = {u: option_of(chains[u], p) for u, p in allocation.points.items()}
        assert allocation.cost == pytest.approx(sum(o.cost for o in chosen.values()))
        drift = sum(o.squared_drift for o in chosen.values())
        assert allocation.squared_drift == pytest.approx(drift)
        for unit, option in chosen.items():
            safe = math.sqrt(option.squared_drift) <= limit(tolerance)
            assert safe or option is chains[unit][-1]


@given(problems())
def test_each_point_is_the_least_that_the_three_rules_allow(problem) -> None:  # type: ignore[no-untyped-def]
    wishes, chains, tolerance = problem
    snapped = snap(wishes, chains, tolerance)
    notes = {(note.profile, note.unit): note for note in snapped.notes}
    assert len(notes) == len(snapped.notes)
    before = {unit: options[0].point for unit, options in chains.items()}
    for profile, (wish, allocation) in enumerate(zip(wishes, snapped.allocations, strict=True)):
        for unit, point in allocation.points.items():
            options, wished = chains[unit], wish[unit]
            top = options[-1].point

            def distance(p: Level, wished: Wish = wished, top: Level = top) -> Fraction:
                level = abs(p.level - Fraction(wished.level)) / top.level
                return level + abs(p.bits - Fraction(wished.bits)) / top.bits

            least = min(distance(o.point) for o in options)
            nearest = [o.point for o in options if distance(o.point) == least][-1]
            allowed = [
                o.point
                for o in options
                if nearest <= o.point
                and before[unit] <= o.point
                and math.sqrt(o.squared_drift) <= limit(tolerance)
            ]
            assert point == (allowed[0] if allowed else top)
            plain = point == nearest and bool(allowed)
            assert ((profile, unit) not in notes) == plain
            if not plain:
                note = notes[profile, unit]
                assert (note.asked, note.level) == (nearest, point)
                drift = option_of(options, point if note.code is SnapCode.TOP_OVER else nearest)
                assert (note.drift, note.tolerance) == (drift.drift, limit(tolerance))
                assert (note.code is SnapCode.TOP_OVER) == (not allowed)
                assert note.code is not SnapCode.NESTED or point == before[unit]
            before[unit] = point


@given(problems())
def test_its_own_output_stays_and_needs_no_note(problem) -> None:  # type: ignore[no-untyped-def]
    wishes, chains, tolerance = problem
    once = snap(wishes, chains, tolerance)
    again = snap(as_wishes(once), chains, tolerance)
    assert again.allocations == once.allocations
    # What is told again is that even the top is over the tolerance.
    for note in again.notes:
        top = chains[note.unit][-1]
        assert note.code is SnapCode.TOP_OVER
        assert note.level == top.point
        assert math.sqrt(top.squared_drift) > limit(tolerance)


@given(problems(), st.data())
def test_a_looser_proposal_is_never_below_a_tighter_one(problem, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    wishes, chains, tolerance = problem
    more = data.draw(st.fixed_dictionaries(dict.fromkeys(chains, wish_values)))
    looser = {
        unit: Wish(max(w.level, more[unit].level), max(w.bits, more[unit].bits))
        for unit, w in wishes[0].items()
    }
    (low,), (high,) = (snap([wish], chains, tolerance).allocations for wish in (wishes[0], looser))
    assert all(low.points[unit] <= high.points[unit] for unit in chains)


@given(problems())
def test_order_of_units_does_not_matter(problem) -> None:  # type: ignore[no-untyped-def]
    wishes, chains, tolerance = problem
    turned = [dict(reversed(wish.items())) for wish in wishes]
    snapped = snap(wishes, chains, tolerance)
    backward = dict(reversed(chains.items()))
    assert snap(turned, backward, tolerance) == snapped


@given(chain_sets())
def test_points_of_the_menus_pass_unchanged(chains: Chains) -> None:
    falling = {
        unit: [Option(o.point, o.cost, 1 / o.cost) for o in options]
        for unit, options in chains.items()
    }
    path = allocations(falling)
    wishes = [{u: Wish(p.level, p.bits) for u, p in a.points.items()} for a in path]
    snapped = snap(wishes, falling)
    assert not snapped.notes
    assert [a.points for a in snapped.allocations] == [a.points for a in path]


CHAIN = [
    Option(Level(2, 4), 1.0, 0.4**2),
    Option(Level(4, 4), 2.0, 0.3**2),
    Option(Level(4, 8), 3.0, 0.2**2),
    Option(Level(8, 8), 4.0, 0.1**2),
]


def taken(
    *wishes: Wish, tolerance: float | None = None
) -> tuple[list[tuple[int, int]], list[Snap]]:
    snapped = snap([{"a": wish} for wish in wishes], {"a": CHAIN}, tolerance)
    points = [(a.points["a"].level, a.points["a"].bits) for a in snapped.allocations]
    return points, list(snapped.notes)


def test_the_nearest_point_and_ties_go_up() -> None:
    assert taken(Wish(2.9, 4)) == ([(2, 4)], [])
    assert taken(Wish(3, 4)) == ([(4, 4)], [])
    assert taken(Wish(6, 8)) == ([(8, 8)], [])
    assert taken(Wish(-5, 0)) == ([(2, 4)], [])
    # Of (4, 4) and (8, 8) the first is 1/2 of all levels off and the other 1/2 of all bits.
    assert taken(Wish(8, 4)) == ([(8, 8)], [])


def test_rounding_takes_nothing_from_a_larger_wish() -> None:
    """Both wishes are as far from all three points; in floats the larger finds the smallest."""
    points = [Level(3, 2), Level(4, 2), Level(6, 4)]
    chains = {"a": [Option(point, 1.0, 1.0) for point in points]}
    for wish in (Wish(2.6, 4.8), Wish(2.8, 4.8)):
        assert snap([{"a": wish}], chains).allocations[0].points["a"] == points[-1]


def test_sums_do_not_depend_on_the_order_of_units() -> None:
    figures = {"a": 0.1, "b": 0.2, "c": 0.3}
    chains = {unit: [Option(Level(1, 8), x, x)] for unit, x in figures.items()}
    wish = dict.fromkeys(figures, Wish(1, 8))
    assert snap([wish], dict(reversed(chains.items()))) == snap([wish], chains)


def test_reasons() -> None:
    low, high, top = CHAIN[0].point, CHAIN[2].point, CHAIN[3].point
    points, notes = taken(Wish(4, 8), Wish(2, 4))
    assert points == [(4, 8), (4, 8)]
    assert notes == [Snap(1, "a", low, high, SnapCode.NESTED, 0.4, math.inf)]
    assert str(notes[0]) == "a: level 4 at 8 bits: the proposal before has level 4 at 8 bits"
    points, notes = taken(Wish(2, 4), tolerance=0.25)
    assert points == [(4, 8)]
    assert notes == [Snap(0, "a", low, high, SnapCode.RAISED, 0.4, 0.25)]
    over = "level 2 at 4 bits drifts 0.4, over the tolerance 0.25"
    assert str(notes[0]) == f"a: level 4 at 8 bits: {over}"
    points, notes = taken(Wish(2, 4), Wish(8, 8), tolerance=0.05)
    assert points == [(8, 8), (8, 8)]
    assert notes == [
        Snap(profile, "a", asked, top, SnapCode.TOP_OVER, 0.1, 0.05)
        for profile, asked in enumerate((low, top))
    ]
    over = "even the top drifts 0.1, over the tolerance 0.05"
    assert str(notes[0]) == f"a: level 8 at 8 bits: {over}"


@given(problems())
def test_allocations_are_held_as_their_points_are_snapped(problem) -> None:  # type: ignore[no-untyped-def]
    """Levels of the menus go the short way, to the same allocations and notes."""
    wishes, chains, tolerance = problem
    path = snap(wishes, chains).allocations
    points = [{u: Wish(p.level, p.bits) for u, p in a.points.items()} for a in path]
    assert hold(path, chains, tolerance) == snap(points, chains, tolerance)
