from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t3c.runtime.adapt import Alarm, Raised, flagged, held_back, made_safer
from t3c.runtime.remarks import Code, Remark
from t3c.runtime.select import Candidate, Choice, cap_warnings, select
from t3c.runtime.signals import Asked
from t3c.spec import QUANTILES, Budget, Latency

NAMED = Remark(Code.NAMED)
NAMES = ("tiny", "small", "med", "large", "max")
HOT = Asked(1, ("it is hot",))
COSTS = st.sampled_from((1.0, 2.0, 3.0, 4.0, 5.0))  # few values: ties and overlaps are the rule
LIMITS = st.none() | st.sampled_from((0.5, 1.0, 1.5, 2.5, 3.5, 4.5, 9.0))
DRIFTS = (0.4, 0.3, 0.2, 0.1, 0.05)


def candidate(name: str, ms: float, mb: float = 1.0, drift: float | None = None) -> Candidate:
    return Candidate(name, Latency(ms, ms, ms, (ms, ms), 9), mb, None, drift)


CHAIN = [
    candidate(*row) for row in zip(NAMES, (1, 2, 3, 4, 5), (1, 2, 3, 4, 5), DRIFTS, strict=True)
]


@st.composite
def measured(draw: st.DrawFn) -> Candidate:
    """Costs of any size, in no order; some are not known."""
    p50, more, most = draw(COSTS), draw(st.sampled_from((0, 1))), draw(st.sampled_from((0, 1)))
    known = Latency(p50, p50 + more, p50 + more + most, (p50, p50), 9)
    latency = draw(st.sampled_from((known, known, known, None)))
    energy, guard = draw(st.none() | COSTS), draw(st.sampled_from((0.0, 0.2)))
    return Candidate("", latency, draw(COSTS), energy, draw(st.none() | COSTS), guard)


@st.composite
def chains(draw: st.DrawFn, orderly: bool = False) -> list[Candidate]:
    """Up to five candidates; orderly ones have certificates that fall along the chain, or none."""
    found = draw(st.lists(measured(), min_size=1, max_size=len(NAMES)))
    if orderly:
        drifts: list[float | None] = [*sorted((draw(COSTS) for _ in found), reverse=True)]
        if draw(st.booleans()):
            drifts = [None] * len(found)
        found = [replace(c, drift=drift) for c, drift in zip(found, drifts, strict=True)]
    return [replace(c, profile=name) for c, name in zip(found, NAMES, strict=False)]


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    limits = (draw(LIMITS) for _ in range(4))
    return Budget(*limits, quantile=draw(st.sampled_from(QUANTILES)))


@st.composite
def looser(draw: st.DrawFn) -> tuple[Budget, Budget]:
    """Two budgets with the same cap that limit something, the second at least as loose."""
    tight = draw(budgets().filter(lambda b: b.limited))
    pairs = ((limit, draw(st.sampled_from((0.0, 1.0, 2.0)))) for limit in tight.limits[:3])
    more = [limit + by if limit < float("inf") else None for limit, by in pairs]
    quantile = draw(st.sampled_from([q for q in QUANTILES if q <= tight.quantile]))
    return tight, Budget(*more, drift=tight.drift, quantile=quantile)


Floors = st.integers(0, len(NAMES)).map(lambda first: NAMES[first:])
Ceilings = st.lists(st.sampled_from((*NAMES, "gone")).map(lambda name: (name, "hot")), max_size=2)
Asks = st.builds(
    lambda steps, ceilings: Asked(steps, ("hot",) if steps else (), tuple(ceilings)),
    st.integers(0, 6), Ceilings,
)  # fmt: skip


def by_name(candidates: Sequence[Candidate]) -> dict[str, Candidate]:
    return {c.profile: c for c in candidates}


def kept(before: Candidate, after: Candidate, budget: Budget) -> bool:
    """Whether every single limit, and the cap, is kept by the latter if the former does."""
    singles = [
        Budget(latency_ms=budget.latency_ms, quantile=budget.quantile),
        Budget(size_mb=budget.size_mb),
        Budget(energy_mj=budget.energy_mj),
    ]
    limits = before.meets(budget) <= all(after.meets(one) for one in singles)
    return limits and (not cap_warnings(before, budget)) <= (not cap_warnings(after, budget))


@given(chains(), budgets(), Asks, st.none() | st.sampled_from(NAMES))
def test_to_hold_back_is_to_go_down_within_the_limits(
    chain: list[Candidate], budget: Budget, asked: Asked, proposal: str | None
) -> None:
    choice, of = select(chain, budget, proposal), by_name(chain)
    held = held_back(choice, chain, budget, asked)
    before, after = NAMES.index(choice.profile), NAMES.index(held.profile)
    assert after <= before
    assert kept(of[choice.profile], of[held.profile], budget)
    if after == before:
        assert held is choice
    else:
        assert held.reason == Remark(Code.HELD_BACK, choice.profile, causes=("hot",))
        assert held.warnings == cap_warnings(of[held.profile], budget)


@pytest.mark.parametrize(
    ("size", "asked", "served"),
    [
        (5.0, Asked(0, (), (("med", "load"),)), "med"),
        (2.0, Asked(0, (), (("med", "load"),)), "small"),  # is below the ceiling as it is
        (5.0, Asked(1, ("hot",), (("med", "load"),)), "med"),
        (3.0, Asked(1, ("hot",), (("med", "load"),)), "small"),
        (5.0, Asked(0, (), (("med", "load"), ("small", "others"))), "small"),
        (5.0, Asked(0, (), (("gone", "load"),)), "max"),
    ],
)
def test_a_ceiling_holds_back_what_is_above_it(size: float, asked: Asked, served: str) -> None:
    budget = Budget(size_mb=size)
    assert held_back(select(CHAIN, budget), CHAIN, budget, asked).profile == served


@settings(max_examples=40)
@given(chains(), budgets(), st.none() | st.sampled_from(NAMES))
def test_no_steps_change_nothing(
    chain: list[Candidate], budget: Budget, proposal: str | None
) -> None:
    choice = select(chain, budget, proposal)
    assert held_back(choice, chain, budget, Asked(0, ())) is choice


@given(chains(orderly=True), looser(), Asks, st.none() | st.sampled_from(NAMES))
def test_a_looser_budget_is_never_held_further_back(
    chain: list[Candidate], pair: tuple[Budget, Budget], asked: Asked, proposal: str | None
) -> None:
    assert pair[0] <= pair[1]
    tight, loose = (
        held_back(select(chain, budget, proposal), chain, budget, asked) for budget in pair
    )
    assert NAMES.index(tight.profile) <= NAMES.index(loose.profile)


@given(chains(), budgets(), Floors, st.none() | st.sampled_from(NAMES))
def test_safer_is_larger_within_the_limits_or_flagged(
    chain: list[Candidate], budget: Budget, floor: tuple[str, ...], proposal: str | None
) -> None:
    choice, of = select(chain, budget, proposal), by_name(chain)
    safer = made_safer(choice, chain, budget, floor)
    chosen = of[choice.profile]
    before, after = NAMES.index(choice.profile), NAMES.index(safer.profile)
    fitting = [
        c for c in chain
        if c.profile in floor and c.meets(budget) and kept(chosen, c, budget)
    ]  # fmt: skip
    assert after >= before
    assert kept(chosen, of[safer.profile], budget)
    assert safer.flagged == (choice.profile not in floor and not fitting)
    assert safer.flagged == (safer.profile not in floor)
    assert any(w.code is Code.UNTRUSTED for w in safer.warnings) == safer.flagged
    if choice.profile in floor:
        assert safer is choice
    if not budget.limited and fitting and choice.profile not in floor:
        assert safer.profile == fitting[0].profile


@given(chains(orderly=True), looser(), Floors, st.none() | st.sampled_from(NAMES))
def test_a_looser_budget_is_never_less_safe(
    chain: list[Candidate],
    pair: tuple[Budget, Budget],
    floor: tuple[str, ...],
    proposal: str | None,
) -> None:
    tight, loose = (
        made_safer(select(chain, budget, proposal), chain, budget, floor) for budget in pair
    )
    assert NAMES.index(tight.profile) <= NAMES.index(loose.profile)
    assert loose.flagged <= tight.flagged


@settings(max_examples=40)
@given(chains(), st.integers(0, 5), st.integers(0, 5))
def test_without_limits_more_steps_and_fewer_trusted_go_further(
    chain: list[Candidate], first: int, second: int
) -> None:
    free, (less, more) = Budget(), sorted((first, second))
    choice = select(chain, free)
    top = len(chain) - 1
    for steps in (less, more):
        held = held_back(choice, chain, free, Asked(steps, ("hot",)))
        assert held.profile == NAMES[max(0, top - steps)]
    low = Choice(NAMES[0], NAMED)
    ends = [made_safer(low, chain, free, NAMES[first:]).profile for first in (less, more)]
    assert ends == [NAMES[min(first, top)] for first in (less, more)]


def test_steps_stop_where_the_request_does() -> None:
    def held(steps: int, **limits: float) -> str:
        budget = Budget(**limits)
        return held_back(select(CHAIN, budget), CHAIN, budget, Asked(steps, ("hot",))).profile

    assert [held(steps, latency_ms=9) for steps in range(7)] == [*NAMES[::-1], "tiny", "tiny"]
    assert [held(steps, latency_ms=9, drift=0.25) for steps in range(4)] == [
        "max", "large", "med", "med"
    ]  # fmt: skip
    assert held(3, latency_ms=1.5) == "tiny"  # the smallest already
    assert held(2, latency_ms=0.5) == "tiny"  # which breaks the limit, as all do


def test_a_choice_over_the_cap_still_keeps_its_limits() -> None:
    """The warning of a drift cap is no leave to break the limit of latency."""
    chain = [candidate("tiny", 9, drift=0.4), candidate("max", 2, drift=0.2)]
    budget = Budget(latency_ms=3, drift=0.1)
    choice = select(chain, budget)
    assert (choice.profile, len(choice.warnings)) == ("max", 1)
    assert held_back(choice, chain, budget, HOT) is choice


def test_an_odd_one_out_does_not_turn_the_order_of_budgets() -> None:
    """`small` is slower than `max`: who can afford it must not end below who cannot."""
    chain = [candidate("tiny", 1, 4), candidate("small", 5, 1), candidate("max", 2, 3)]
    tight, loose = Budget(latency_ms=3, size_mb=3.5), Budget(latency_ms=6, size_mb=3.5)
    for budget in (tight, loose):
        assert held_back(select(chain, budget), chain, budget, HOT).profile == "max"
    low = Choice("tiny", NAMED)
    chain = [candidate("tiny", 1), candidate("small", 5), candidate("max", 2)]
    for budget in (tight, loose):
        assert made_safer(low, chain, budget, ("small", "max")).profile == "max"


def test_the_warning_names_what_serves() -> None:
    before = Remark(Code.NOTHING_FITS)
    low = Choice("small", NAMED, (before,))
    budget = Budget(latency_ms=4.5, drift=0.35)
    moved = made_safer(low, CHAIN, budget, ("max",))
    assert (moved.profile, moved.flagged) == ("large", True)
    assert moved.reason == Remark(Code.SAFER, "small")
    assert str(moved.reason) == "activations have moved: safer than small"
    assert moved.warnings == flagged(Choice("large", NAMED)).warnings
    assert "no larger profile than large fits the request" in str(moved.warnings[0])
    stays = made_safer(low, CHAIN, Budget(latency_ms=2.5), ("max",))
    assert stays == flagged(low)
    assert stays.warnings[0] is before
    top = made_safer(Choice("max", NAMED), CHAIN, Budget(), ())
    assert (top.profile, top.flagged) == ("max", True)


def test_an_uncertified_profile_does_not_stand_in_under_a_cap() -> None:
    chain = [CHAIN[0], replace(CHAIN[1], drift=None), CHAIN[2]]
    budget = Budget(drift=0.5)
    choice = select(chain, budget)
    assert choice.profile == "tiny"
    assert made_safer(choice, chain, budget, ("small", "med")).profile == "med"
    assert made_safer(choice, chain[:2], budget, ("small",)) == flagged(choice)


# -- the alarm


def test_an_alarm_leaves_those_above_and_only_escalates() -> None:
    alarm = Alarm(NAMES, hold=3)
    assert alarm.raised is None
    alarm.strike("small")
    assert alarm.raised == Raised(("med", "large", "max"))
    alarm.strike("large")
    assert alarm.raised == Raised(("max",))
    alarm.strike("tiny")  # calls that were under way may still tell of a smaller one
    assert alarm.raised == Raised(("max",))
    alarm.strike("max")
    assert alarm.raised == Raised(())
    alarm.strike("med")
    assert alarm.raised == Raised(())


def test_an_alarm_holds_until_it_was_calm_for_long_enough() -> None:
    alarm = Alarm(NAMES, hold=10)
    assert not alarm.saw(1000)  # what was calm before does not count
    alarm.strike("tiny")
    assert not alarm.saw(9)
    alarm.strike("tiny")
    assert not alarm.saw(9)  # counted anew
    assert alarm.raised is not None
    assert alarm.saw(1)
    assert alarm.raised is None
    assert not alarm.saw(10)
    alarm.strike("small")
    assert not alarm.saw(9)
    assert alarm.saw(30)


def test_an_alarm_can_be_cleared() -> None:
    alarm = Alarm(NAMES, hold=5)
    alarm.strike("large")
    alarm.saw(4)
    alarm.clear()
    assert alarm.raised is None
    assert not alarm.saw(1)
    alarm.strike("tiny")
    assert alarm.raised == Raised(NAMES[1:])  # the old one is forgotten
    assert not alarm.saw(4)


def test_threads_lose_no_strike_and_end_an_alarm_once() -> None:
    alarm = Alarm(NAMES, hold=4000)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(alarm.strike, [*NAMES[:4]] * 200))
        assert alarm.raised == Raised(("max",))
        ended = list(threads.map(lambda _: alarm.saw(1), range(4000)))
        assert ended.count(True) == 1
        assert alarm.raised is None


def test_trust_never_comes_back_while_strikes_do() -> None:
    """A reader sees only alarms that grow, however the strikes of threads fall."""
    alarm, seen = Alarm(NAMES, hold=1), list[int]()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            raised = alarm.raised
            seen.append(len(NAMES) if raised is None else len(raised.trusted))

    with ThreadPoolExecutor(5) as threads:
        reader = threads.submit(read)
        list(threads.map(alarm.strike, [NAMES[i % 4] for i in range(400)]))
        done.set()
        reader.result()
    assert seen == sorted(seen, reverse=True)


@pytest.mark.parametrize("act", [lambda a: a.saw(0), lambda a: a.clear()])
def test_nothing_happens_without_an_alarm(act: Callable[[Alarm], object]) -> None:
    alarm = Alarm(NAMES, hold=1)
    assert not act(alarm)
    assert alarm.raised is None
