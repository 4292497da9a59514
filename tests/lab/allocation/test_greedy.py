from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.allocation.greedy import greedy, uniform
from t3c.control.knapsack import Allocation, allocations
from t3c.control.menu import Option
from t3c.errors import SpecError
from t3c.spec import Level

Chains = dict[str, list[Option]]


@st.composite
def chain_sets(draw: st.DrawFn) -> Chains:
    """Chains whose cost rises and whose drift falls, convex or not."""
    chains = {}
    for unit in "abc"[: draw(st.integers(1, 3))]:
        steps = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=5))
        cost, drift, options = 1, 100, []
        for index, (up, down) in enumerate([(0, 0), *steps]):
            cost, drift = cost + up, drift - down
            options.append(Option(Level(index + 1, 4), cost, drift))
        chains[unit] = options
    return chains


def levels(allocation: Allocation) -> dict[str, int]:
    return {unit: point.level for unit, point in allocation.points.items()}


@given(chain_sets())
def test_paths_are_nested_from_bottom_to_top(chains: Chains) -> None:
    for path in (greedy(chains), uniform(chains)):
        assert levels(path[0]) == dict.fromkeys(chains, 1)
        assert levels(path[-1]) == {unit: len(options) for unit, options in chains.items()}
        for below, above in itertools.pairwise(path):
            assert all(below.points[unit] <= above.points[unit] for unit in chains)
            assert below.points != above.points
        for allocation in path:
            taken = [chains[unit][rank - 1] for unit, rank in levels(allocation).items()]
            assert allocation.cost == sum(option.cost for option in taken)
            assert allocation.squared_drift == sum(option.squared_drift for option in taken)


@given(chain_sets())
def test_greedy_takes_the_best_next_step(chains: Chains) -> None:
    path = greedy(chains)
    assert len(path) == 1 + sum(len(options) - 1 for options in chains.values())
    for below, above in itertools.pairwise(path):
        gains = {}
        for unit, rank in levels(below).items():
            for low, high in itertools.pairwise(chains[unit][rank - 1 : rank + 1]):
                gains[unit] = (low.squared_drift - high.squared_drift) / (high.cost - low.cost)
        (moved,) = (unit for unit in chains if below.points[unit] != above.points[unit])
        assert gains[moved] == max(gains.values())


def test_greedy_does_not_see_behind_a_poor_step() -> None:
    def options(*figures: tuple[float, float]) -> list[Option]:
        return [Option(Level(i + 1, 4), *figure) for i, figure in enumerate(figures)]

    chains = {"a": options((1, 10), (2, 9), (3, 0)), "b": options((1, 10), (2, 8))}
    assert [levels(a) for a in greedy(chains)[1:3]] == [{"a": 1, "b": 2}, {"a": 2, "b": 2}]
    of_cost_4 = [
        [a.squared_drift for a in path if a.cost <= 4][-1]
        for path in (greedy(chains), allocations(chains))
    ]
    assert of_cost_4 == [17, 10]


@given(chain_sets())
def test_uniform_has_all_levels_that_differ(chains: Chains) -> None:
    fine = [n / 720 for n in range(721)]
    wanted = {
        tuple(int(level * (len(options) - 1) + 0.5 + 1e-9) for options in chains.values())
        for level in fine
    }
    assert [tuple(r - 1 for r in levels(a).values()) for a in uniform(chains)] == sorted(wanted)


def test_what_is_refused() -> None:
    path = greedy({"a": [Option(Level(1, 4), 1, 1)]})
    assert len(path) == 1
    for bad in ({}, {"a": []}):
        for make in (greedy, uniform):
            with pytest.raises(SpecError, match="at least one"):
                make(bad)
