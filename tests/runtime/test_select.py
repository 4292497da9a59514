from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.runtime.remarks import Code, Remark
from t3c.runtime.select import Candidate, explain, select
from t3c.spec import Budget, Latency


def ms(p50: float, p90: float | None = None) -> Latency:
    p90 = p50 if p90 is None else p90
    return Latency(p50, p90, p90, (p50, p50), 9)


CHAIN = [
    Candidate("tiny", ms(1.0, 2.2), 1.0, None, 0.4),
    Candidate("med", ms(2.0, 2.5), 2.0, None, 0.2),
    Candidate("max", ms(3.0, 4.0), 4.0, None, 0.05),
]


def chosen(**limits: float) -> str:
    return select(CHAIN, Budget(**limits)).profile


def test_with_limits_the_least_drift_that_meets_them() -> None:
    assert chosen(latency_ms=2.5) == "med"
    assert chosen(latency_ms=9) == "max"
    assert chosen(latency_ms=9, size_mb=1.5) == "tiny"
    assert chosen(latency_ms=2) == "med"


def test_with_a_cap_alone_the_fastest_within_it() -> None:
    assert chosen(drift=0.3) == "med"
    assert chosen(drift=0.9) == "tiny"
    found = select(CHAIN, Budget(drift=0.01))
    assert found.profile == "max"
    assert found.reason.code is Code.NOTHING_WITHIN_CAP
    assert found.warnings == (Remark(Code.OVER_CAP, "max", value=0.05, limit=0.01),)


def test_with_both_the_limits_rule_and_the_cap_warns() -> None:
    assert not select(CHAIN, Budget(latency_ms=2.5, drift=0.3)).warnings
    found = select(CHAIN, Budget(latency_ms=1.5, drift=0.3))
    assert found.profile == "tiny"
    assert found.warnings == (Remark(Code.OVER_CAP, "tiny", value=0.4, limit=0.3),)
    assert str(found.warnings[0]) == "tiny may drift up to 0.4, over the cap 0.3"


def test_when_nothing_fits() -> None:
    found = select(CHAIN, Budget(latency_ms=0.5))
    assert (found.profile, len(found.warnings)) == ("tiny", 1)
    found = select(CHAIN, Budget(energy_mj=5))
    assert found.warnings == (Remark(Code.NOT_MEASURED, "tiny", names=("energy",)),)
    assert str(found.warnings[0]) == (
        "no profile meets the limits (energy not measured on this device): tiny, the smallest, "
        "serves"
    )
    assert select(CHAIN, Budget()).profile == "max"


def test_where_nothing_is_certified() -> None:
    bare = [Candidate(c.profile, c.latency, c.size_mb, None, None) for c in CHAIN]
    assert select(bare, Budget(latency_ms=2.5)).profile == "med"
    found = select(bare, Budget(drift=0.9))
    assert found.profile == "max"
    assert found.warnings == (Remark(Code.CAP_UNCONFIRMED, "max"),)


rising = st.lists(st.floats(0.1, 10), min_size=1, max_size=6)


@st.composite
def chains(draw: st.DrawFn) -> list[Candidate]:
    """Candidates whose size rises and whose drift falls along the chain; times as measured."""
    count = draw(st.integers(1, 6))
    columns = [
        sorted(draw(st.lists(st.floats(0.1, 10), min_size=count, max_size=count))) for _ in range(2)
    ]
    pairs = st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)).map(sorted)
    times = draw(st.lists(pairs, min_size=count, max_size=count))
    guards = draw(st.lists(st.floats(0, 0.5), min_size=count, max_size=count))
    return [
        Candidate(str(i), ms(*times[i]), columns[0][i], None, columns[1][count - 1 - i], guards[i])
        for i in range(count)
    ]


caps = st.none() | st.floats(0.1, 10)


@given(
    chains(), st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 5), st.floats(0, 5),
    st.booleans(), caps, st.sampled_from([("p90", "p90"), ("p50", "p50"), ("p99", "p50")]),
)  # fmt: skip
def test_more_budget_never_drifts_more(
    chain: list[Candidate],
    latency: float,
    size: float,
    more: float,
    room: float,
    drop: bool,
    cap: float | None,
    quantiles: tuple[str, str],
) -> None:
    """Whether or not anything meets the tighter limits, a limit is dropped, or a cap is named."""
    tight = Budget(latency, size, drift=cap, quantile=quantiles[0])
    loose = Budget(None if drop else latency + more, size + room, drift=cap, quantile=quantiles[1])
    assert tight <= loose
    a, b = (select(chain, budget).profile for budget in (tight, loose))
    drift = {c.profile: c.drift for c in chain}
    assert drift[b] <= drift[a]
    if any(c.meets(tight) for c in chain):
        assert next(c for c in chain if c.profile == a).meets(tight)


@pytest.mark.parametrize("cap", [0.05, 0.2, 0.4])
def test_a_kept_cap_is_kept(cap: float) -> None:
    found = next(c for c in CHAIN if c.profile == chosen(drift=cap))
    assert found.drift is not None
    assert found.drift <= cap


def test_a_limit_is_of_the_quantile_asked_for() -> None:
    assert chosen(latency_ms=2.3) == "med"
    assert select(CHAIN, Budget(latency_ms=2.3, quantile="p90")).profile == "tiny"
    assert not Budget(latency_ms=2) <= Budget(latency_ms=2, quantile="p90")


def test_the_guard_is_kept_free() -> None:
    guarded = [Candidate(c.profile, c.latency, c.size_mb, None, c.drift, 0.1) for c in CHAIN]
    assert select(guarded, Budget(latency_ms=2.19)).profile == "tiny"
    assert select(guarded, Budget(latency_ms=2.21)).profile == "med"


def test_every_profile_is_explained() -> None:
    def told_of(budget: Budget, profile: str) -> dict[str, str]:
        why = explain(CHAIN, budget, profile)
        return {name: "; ".join(map(str, remarks)) for name, remarks in why.items()}

    told = told_of(Budget(latency_ms=2.5, energy_mj=1), "tiny")
    assert told["max"] == (
        "latency 3 ms (p50 and 0.0% guard) over 2.5; its energy is not known here"
    )
    told = told_of(Budget(latency_ms=2.5), "med")
    assert told == {
        "tiny": "within the limits, but med is larger and drifts less",
        "med": "chosen",
        "max": "latency 3 ms (p50 and 0.0% guard) over 2.5",
    }
    told = told_of(Budget(drift=0.3), "med")
    assert told["tiny"] == "tiny may drift up to 0.4, over the cap 0.3"
    assert told["max"] == "med is preferred"


def test_a_profile_without_a_certificate_is_not_passed_over() -> None:
    """Drift falls along the chain: a certificate of a smaller profile alone is no reason for it."""
    partly = [replace(c, drift=c.drift if c.profile == "tiny" else None) for c in CHAIN]
    assert select(partly, Budget(latency_ms=2.5)).profile == "med"
    assert select(partly, Budget(latency_ms=9)).profile == "max"
    assert select(partly, Budget(latency_ms=1.5)).profile == "tiny"
