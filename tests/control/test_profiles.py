"""Any number of profiles: names, the spread of cost, what measurement leaves of them."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.control.knapsack import Allocation
from t3c.control.profiles import (
    NAMES,
    Measured,
    PruneCode,
    Pruned,
    fitting,
    names_for,
    prune,
    spread,
    thin,
)
from t3c.errors import SpecError
from t3c.spec import Level


def test_names() -> None:
    assert [" ".join(names_for(count)) for count in range(1, 8)] == [
        "max",
        "tiny max",
        "tiny med max",
        "tiny small large max",
        "tiny small med large max",
        "tiny small med p4 large max",
        "tiny p2 small med large p6 max",
    ]
    many = names_for(13)
    assert [many.index(name) for name in NAMES] == [0, 3, 6, 9, 12]
    assert len(set(many)) == 13
    assert names_for(5) == NAMES
    with pytest.raises(SpecError, match="got 0"):
        names_for(0)


def path_of(drifts: list[float]) -> list[Allocation]:
    return [
        Allocation({"a": Level(rank, 8)}, float(rank), drift**2)
        for rank, drift in enumerate(drifts, 1)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_spread_rises_by_equal_factors(count: int) -> None:
    costs = [2.0 ** (step / 8) for step in range(65)]  # from 1 to 256
    path = [Allocation({"a": Level(i + 1, 8)}, c, (1 - i / 65) ** 2) for i, c in enumerate(costs)]
    picked = spread(path, 1 - 7.5 / 65, count)  # the first eight drift too much
    assert len(picked) == count
    assert picked[-1] is path[-1]
    assert all(below.cost < above.cost for below, above in itertools.pairwise(picked))
    if count > 1:
        assert picked[0] is path[8]
        for below, above in itertools.pairwise(picked):
            assert math.log2(above.cost / below.cost) == pytest.approx(7 / (count - 1), abs=0.13)


@given(st.lists(st.floats(1e-4, 1), min_size=1, max_size=12), st.floats(1e-4, 1), st.integers(1, 8))
def test_spread_takes_what_is_of_use(drifts: list[float], worst: float, count: int) -> None:
    path = path_of(sorted(drifts, reverse=True))
    useful = [a for a in path if a.drift <= worst] or path[-1:]
    picked = spread(path, worst, count)
    assert len(picked) == min(count, len(useful))
    costs = [a.cost for a in picked]
    assert costs == sorted(set(costs))
    assert all(a in useful for a in picked)
    assert picked[-1] is path[-1]


def test_nothing_to_spread() -> None:
    with pytest.raises(SpecError, match="0 of 1"):
        spread(path_of([0.1]), 1.0, 0)
    with pytest.raises(SpecError, match="1 of 0"):
        spread([], 1.0, 1)


def measured(name: str, p50: float, size: float, half: float = 0.0) -> Measured:
    return Measured(name, p50, p50 * (1 - half), p50 * (1 + half), size, 0.1)


def test_what_is_slower_though_smaller_goes() -> None:
    chain = [measured("tiny", 0.52, 1.0, 0.01), measured("large", 0.50, 4.0, 0.01)]
    pruned = Pruned("tiny", PruneCode.SLOWER, "large", (0.52, 0.50))
    assert prune(chain) == (["large"], [pruned])
    assert str(pruned) == "slower than large (0.52 ms against 0.5) though below it"
    # Within the intervals it is as fast, and worth having for its size.
    chain[0] = measured("tiny", 0.52, 1.0, 0.05)
    assert prune(chain) == (["tiny", "large"], [])


def test_what_gains_too_little_goes() -> None:
    top = measured("large", 1.0, 100.0)
    pruned = [Pruned("med", PruneCode.NO_GAIN, "large", (0.02, 0.05))]
    assert str(pruned[0]) == "neither 2% faster nor 5% smaller than large"
    assert prune([measured("med", 0.981, 95.1), top]) == (["large"], pruned)
    assert prune([measured("med", 0.98, 100.0), top]) == (["med", "large"], [])
    assert prune([measured("med", 1.0, 95.0), top]) == (["med", "large"], [])
    pruned = [Pruned("med", PruneCode.NO_GAIN, "large", (0.025, 0.1))]
    found = prune([measured("med", 0.98, 95.0), top], faster=0.025, smaller=0.1)
    assert found == (["large"], pruned)


def test_gains_add_up_over_what_is_pruned() -> None:
    chain = [measured(f"p{n}", 0.985 ** (5 - n), 1.0) for n in range(6)]
    kept, pruned = prune(chain)
    assert kept == ["p1", "p3", "p5"]
    assert [p.name for p in pruned] == ["p0", "p2", "p4"]


def test_no_chain_of_small_steps_leads_to_an_inversion() -> None:
    """Each is within the interval of the next, but the first is slower than the last."""
    chain = [
        Measured("tiny", 1.2, 1.15, 1.3, 1.0, 0.3),
        Measured("med", 1.1, 1.05, 1.2, 2.0, 0.2),
        Measured("max", 1.0, 0.95, 1.1, 3.0, 0.1),
    ]
    kept, pruned = prune(chain)
    assert kept == ["med", "max"]
    assert pruned == [Pruned("tiny", PruneCode.SLOWER, "max", (1.2, 1.0))]


def test_what_is_told_of_profiles_that_are_not_shipped() -> None:
    assert str(Pruned("p", PruneCode.SURPLUS, figures=(5,))) == "more than 5 are worth it"
    assert str(Pruned("p", PruneCode.INEXACT, detail="far off")) == "far off"


@st.composite
def chains(draw: st.DrawFn) -> list[Measured]:
    count = draw(st.integers(1, 9))
    few = st.sampled_from([0.9, 0.95, 0.98, 1.0, 1.01, 1.5])
    size, p50, found = 1.0, 1.0, []
    for index in range(count):
        size /= draw(few.filter(lambda f: f <= 1))
        p50 /= draw(few)
        low, high = (draw(st.sampled_from([0.0, 0.01, 0.05])) for _ in range(2))
        found.append(Measured(f"p{index}", p50, p50 * (1 - low), p50 * (1 + high), size, 0.1))
    return found


@given(chains())
def test_what_is_kept_is_ordered_and_worth_it(chain: list[Measured]) -> None:
    names, pruned = prune(chain)
    assert names[-1] == chain[-1].name
    order = [m.name for m in chain]
    assert [n for n in order if n in names] == names
    assert [p.name for p in pruned] == [n for n in order if n not in names]
    kept = [m for m in chain if m.name in names]
    for below, above in itertools.combinations(kept, 2):
        assert below.low <= above.high
    for below, above in itertools.pairwise(kept):
        assert below.p50 <= 0.98 * above.p50 or below.size <= 0.95 * above.size
    for lost in pruned:
        index = order.index(lost.name)
        over = [m for m in kept if order.index(m.name) > index]
        slower = any(chain[index].low > m.high for m in over)
        useless = chain[index].p50 > 0.98 * over[0].p50 and chain[index].size > 0.95 * over[0].size
        assert slower or useless
        assert lost.code is (PruneCode.SLOWER if slower else PruneCode.NO_GAIN)
    assert prune(kept) == (names, [])


@given(chains(), st.integers(1, 10))
def test_thin_keeps_the_ends_and_the_order(chain: list[Measured], count: int) -> None:
    names = thin(chain, count)
    order = [m.name for m in chain]
    assert names == [n for n in order if n in names]
    assert len(names) == min(count, len(chain))
    assert names[-1] == order[-1]
    assert names[0] == order[0] or count == 1
    assert thin(chain, count) == names


def test_thin_is_even_in_the_logs_of_time_and_size() -> None:
    chain = [measured(f"p{n}", 2.0**n, 1.0) for n in range(9)]
    assert thin(chain, 3) == ["p0", "p4", "p8"]
    assert thin(chain, 5) == ["p0", "p2", "p4", "p6", "p8"]
    sizes = [1, 1.1, 1.2, 5, 9, 10]
    assert thin([measured(str(size), 1.0, size) for size in sizes], 3) == ["1", "5", "10"]
    # Halfway in time and size together, though neither in time nor in size alone.
    taken = {"a": (1, 1), "b": (16, 1), "c": (16, 4), "d": (16, 16)}
    both = [measured(name, *both) for name, both in taken.items()]
    assert thin(both, 2) == ["a", "d"]
    assert thin(both, 3) == ["a", "b", "d"]


def test_thin_leaves_room_for_those_to_follow() -> None:
    chain = [measured(f"p{n}", 1.0, size) for n, size in enumerate([1.0, 9.6, 9.7, 9.8, 10.0])]
    assert thin(chain, 4) == ["p0", "p1", "p2", "p4"]


@given(chains(), st.lists(st.floats(0.01, 0.99), unique=True, max_size=6))
def test_every_budget_is_kept_by_the_largest_that_can(
    chain: list[Measured], shares: list[float]
) -> None:
    names = fitting(chain, sorted(shares))
    order = [m.name for m in chain]
    assert names == [n for n in order if n in names]
    assert names[-1] == order[-1]
    within = [[m.name for m in chain[:-1] if m.p50 <= s * chain[-1].p50] for s in sorted(shares)]
    assert len(names) <= len(shares) + 1
    if within and len(chain) > 1:
        assert names[-2] == (within[-1][-1] if within[-1] else order[0])
    if within and len(within[0]) >= len(within):  # enough for each budget to have its own
        assert len(names) == len(shares) + 1
        assert all(name in able for name, able in zip(names, within, strict=False))


def test_budgets_are_shares_of_the_largest_profile() -> None:
    chain = [measured(f"p{n}", 4.0 + n, n + 1) for n in range(7)]
    assert fitting(chain, (0.45, 0.6, 0.75, 0.9)) == ["p0", "p2", "p3", "p5", "p6"]
    assert fitting(chain, (0.1, 0.61, 0.65)) == ["p0", "p1", "p2", "p6"]  # p2 is best for two
    assert fitting(chain, (0.1, 0.2, 0.3)) == ["p0", "p6"]
    assert fitting(chain[-1:], (0.1, 0.2)) == ["p6"]


def test_chains_that_cannot_be() -> None:
    one, two = measured("a", 1.0, 2.0), measured("b", 1.0, 1.0)
    for choose in (prune, lambda chain: thin(chain, 2)):
        with pytest.raises(SpecError, match="different names"):
            choose([])
        with pytest.raises(SpecError, match="different names"):
            choose([one, one])
        with pytest.raises(SpecError, match="'a' of size 2 comes before 'b' of size 1"):
            choose([one, two])
    with pytest.raises(SpecError, match="at least one profile"):
        thin([one], 0)
    for share in (-0.1, 1.0, math.nan):
        with pytest.raises(SpecError, match="faster and smaller"):
            prune([one], faster=share)
    for figures in ((0, 0, 0, 1, 0), (1, 2, 1, 1, 0), (math.nan, 1, 2, 1, 0), (1, 1, 1, 0, 0)):
        with pytest.raises(SpecError, match="profile 'x'"):
            Measured("x", *map(float, figures))
    with pytest.raises(SpecError, match="drift"):
        Measured("x", 1.0, 1.0, 1.0, 1.0, math.nan)
