from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from t3c.control.knapsack import allocations
from t3c.control.menu import DropCode, Dropped, Option, chain, dropped
from t3c.control.profiles import NAMES, spread
from t3c.errors import SpecError
from t3c.spec import Level, Profile, ProfileChain, check_menu


@st.composite
def option_grids(draw: st.DrawFn) -> list[Option]:
    """Costs and drifts of a grid of ranks and bits, noisy as measured ones are."""
    ranks = draw(st.integers(1, 4))
    grid = [Level(8 * (r + 1), q) for r in range(ranks) for q in (4, 6, 8)]
    noise = st.floats(0.5, 1.5)
    return [
        Option(p, p.level * p.bits * draw(noise), draw(noise) / (p.level * p.bits) ** 2)
        for p in grid
    ]


@given(option_grids())
def test_a_menu_is_a_chain_of_rising_cost_and_falling_drift(options: list[Option]) -> None:
    found = chain(options)
    check_menu([option.point for option in found])
    costs, drifts = [o.cost for o in found], [o.squared_drift for o in found]
    assert costs == sorted(set(costs))
    assert drifts == sorted(set(drifts), reverse=True)
    assert found[-1].point == options[-1].point


@given(option_grids())
@settings(max_examples=30)
def test_no_chain_encloses_less(options: list[Option]) -> None:
    def area(path: tuple[Option, ...]) -> float:
        return sum((b.cost - a.cost) * a.squared_drift for a, b in itertools.pairwise(path))

    found = chain(options)
    top = options[-1]
    inner = [o for o in options if o.cost < top.cost and o.squared_drift > top.squared_drift]
    assume(len(inner) == len(options) - 1)
    inner.sort(key=lambda o: (o.cost, o.squared_drift))
    best = min(
        area(path)
        for size in range(len(inner))
        for middle in itertools.combinations(inner[1:], size)
        for path in [(inner[0], *middle, top)]
        if all(
            a.point <= b.point and a.cost < b.cost and a.squared_drift > b.squared_drift
            for a, b in itertools.pairwise(path)
        )
    )
    assert area(found) <= best * (1 + 1e-5) + 1e-12


def test_options_without_a_top() -> None:
    across = [Option(Level(8, 8), 1, 1), Option(Level(16, 4), 1, 1)]
    with pytest.raises(SpecError, match="stands above all others"):
        chain(across)
    with pytest.raises(SpecError):
        chain([])


@given(st.lists(option_grids(), min_size=1, max_size=4))
def test_allocations_are_nested_and_the_best_of_their_cost(grids: list[list[Option]]) -> None:
    chains = {f"layer{i}": chain(grid) for i, grid in enumerate(grids)}
    path = allocations(chains)
    for below, above in itertools.pairwise(path):
        assert all(below.points[n] <= above.points[n] for n in chains)
        assert below.cost <= above.cost  # equal when a step is lost in rounding
        assert below.squared_drift > above.squared_drift
    assert path[-1].points == {n: c[-1].point for n, c in chains.items()}
    everything = [
        (sum(o.cost for o in pick), sum(o.squared_drift for o in pick))
        for pick in itertools.islice(itertools.product(*chains.values()), 3000)
    ]
    for allocation in path:
        better = [
            d
            for c, d in everything
            if c <= allocation.cost * (1 - 1e-9) and d < allocation.squared_drift * (1 - 1e-9)
        ]
        assert not better


@given(option_grids())
def test_every_point_is_on_the_menu_or_has_a_reason(options: list[Option]) -> None:
    kept = chain(options)
    reasons = {one.level: one for one in dropped(options, kept)}
    on_menu = {option.point: option for option in kept}
    assert on_menu.keys() | reasons.keys() == {o.point for o in options}
    assert not on_menu.keys() & reasons.keys()
    for option in options:
        reason = reasons.get(option.point)
        if reason is None:
            continue
        assert (reason.code is DropCode.DEARER) == (option.cost >= kept[-1].cost)
        assert reason.cost == option.cost / kept[-1].cost
        assert (reason.code is DropCode.BETTER) == (reason.better is not None)
        if reason.better is not None:
            better = on_menu[reason.better]
            assert better.cost <= option.cost
            assert better.squared_drift <= option.squared_drift


def test_what_is_told_of_levels_that_are_on_no_menu() -> None:
    level, better = Level(1, 4, 0.125), Level(2, 4, 0.5)
    told = [
        Dropped(level, DropCode.DEARER, 1.25),
        Dropped(level, DropCode.BETTER, 0.5, better),
        Dropped(Level(1, 4), DropCode.OFF_CHAIN, 0.5),
    ]
    assert [str(one) for one in told] == [
        "0.125 of full rank at 4 bits: costs 1.25 of the top and is less",
        "0.125 of full rank at 4 bits: 0.5 of full rank at 4 bits costs and drifts no more",
        "level 1 at 4 bits: no chain of levels through it does better",
    ]


@given(st.lists(option_grids(), min_size=1, max_size=4), st.floats(1e-4, 1))
def test_profiles_are_a_chain_that_ends_at_the_top(grids: list[list[Option]], worst: float) -> None:
    path = allocations({f"layer{i}": chain(grid) for i, grid in enumerate(grids)})
    picked = spread(path, worst, len(NAMES))
    profiles = ProfileChain(tuple(Profile(str(i), a.points) for i, a in enumerate(picked)))
    useful = [a for a in path if a.drift <= worst] or path[-1:]
    assert len(profiles) == min(len(NAMES), len(useful))
    assert dict(profiles.top.points) == dict(path[-1].points)
    assert all(a.drift <= worst for a in picked[:-1])
