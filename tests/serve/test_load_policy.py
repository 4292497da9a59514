from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.errors import SpecError
from t3c.serve import policy as policies
from t3c.serve.config import Limits, ServeConfig
from t3c.serve.pace import Pace
from t3c.serve.policy import Due, LoadPolicy, bearable

CHAIN = ("tiny", "med", "max")
MS = {"tiny": {1: 2.0}, "med": {1: 4.0}, "max": {1: 8.0}}


@pytest.fixture(autouse=True)
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "WINDOW", 1.0)


def policy() -> LoadPolicy:
    return LoadPolicy(100.0, 2.0, CHAIN, Pace(MS))


def arrive(load: LoadPolicy, start: float, seconds: float, rate: float) -> float:
    """Requests in even steps, the level set after each as a server does; the time at the end."""
    for at in np.arange(start, start + seconds, 1 / rate):
        load.arrived(float(at), 1)
        load.move(float(at))
    return start + seconds


def test_what_a_queue_bears_is_what_a_simulation_of_it_bears() -> None:
    miss, service, within = 0.01, 1.0, 8.0
    rho = bearable(service, within, miss)
    rng = np.random.default_rng(0)

    def missed(load: float) -> float:
        gaps = rng.exponential(service / load, 400_000)
        wait, late = 0.0, 0
        for gap in gaps:
            wait = max(0.0, wait + service - gap)
            late += wait + service > within
        return late / len(gaps)

    assert missed(rho) < miss
    assert missed(min(0.99, rho * 1.15)) > miss


@given(st.floats(0.01, 50), st.floats(1, 1000), st.floats(1e-4, 0.5))
def test_a_queue_bears_more_of_what_is_shorter(service: float, within: float, miss: float) -> None:
    rho = bearable(service, within, miss)
    assert 0 <= rho < 1
    assert bearable(service / 2, within, miss) >= rho
    assert bearable(service, within, miss, lanes=2) >= rho
    assert bearable(within, within, miss) == 0


def test_the_level_falls_at_once_and_rises_one_by_one_after_a_dwell() -> None:
    load = policy()
    now = arrive(load, 0, 2, 20)  # 16% of max
    assert load.chain[load.level] == "max"
    now = arrive(load, now, 1, 200)  # 160% of max, 80% of med, 40% of tiny
    assert load.chain[load.level] in ("tiny", "med")
    now = arrive(load, now, 1, 400)
    assert load.chain[load.level] == "tiny"
    levels = []
    for _ in range(100):
        now = arrive(load, now, 0.1, 10)
        levels.append(load.level)
    assert levels[0] == 0
    assert levels[-1] == 2
    assert sorted(levels) == levels
    changes = [i for i in range(1, 100) if levels[i] != levels[i - 1]]
    assert all(levels[i] - levels[i - 1] == 1 for i in changes)
    assert (changes[1] - changes[0]) * 0.1 >= 2.0 - 0.1


def test_between_easy_and_bearable_the_level_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "EASY", 0.5)
    load = policy()
    most = bearable(8.0, load.within_ms, policies.MISS)
    rate = 0.8 * most / 8e-3  # more than half of what max bears
    now = arrive(load, 0, 5, rate)
    assert load.level == 2  # it bears it, so it is not left
    now = arrive(load, now, 1, 500)
    assert load.level == 0
    now = arrive(load, now, 20, rate)
    assert load.level == 1  # but it is not come back to


def test_a_backlog_is_worked_off_by_smaller_profiles_while_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = policy()
    one = Due(1, 0.0, 0.09)  # of which 45 ms are for what comes meanwhile
    assert load.ceiling(0.0, [one]) == "max"
    assert load.ceiling(0.0, [one] * 5) == "med"  # 5 times 8 ms, and then some, is too long
    assert load.ceiling(0.0, [one] * 10) == "tiny"
    assert load.ceiling(0.0, [one] * 500) == "tiny"  # nothing helps: the fastest
    with monkeypatch.context() as patch:
        patch.setattr(policies, "RESERVE", 1e-9)
        assert load.ceiling(0.0, [one] * 8) == "max"
    assert load.ceiling(0.0, []) == "max"
    assert load.level == 2  # the level is not touched by that


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0.001, 1)), max_size=20))
def test_where_one_profile_is_in_time_a_smaller_one_is(waits: list[tuple[int, float]]) -> None:
    load = policy()
    due = sorted((Due(rows, 0, at) for rows, at in waits), key=lambda one: one.deadline)
    assert not load.in_time(0, due, "max") or load.in_time(0, due, "med")
    assert not load.in_time(0, due, "med") or load.in_time(0, due, "tiny")


def test_pace_follows_a_machine_that_slows_down_and_does_not_believe_a_hiccup() -> None:
    pace = Pace({"tiny": {1: 1.0, 2: 1.5, 4: 2.0}, "max": {1: 4.0, 2: 6.0, 4: 8.0}})
    assert pace.expected("max", 7) == 8 + 6 + 4
    assert pace.per_row("max") == 2
    pace.saw("max", 1, 400.0)
    assert pace.expected("max", 1) < 4.0 * 1.25
    for _ in range(200):
        pace.saw("max", 1, 8.0)
    assert pace.expected("max", 1) == pytest.approx(8.0, rel=0.02)
    assert pace.expected("tiny", 1) == pytest.approx(2.0, rel=0.02)  # of one that did not serve
    assert pace.careful("tiny", 1) >= pace.expected("tiny", 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServeConfig(objective_ms=0),
        lambda: ServeConfig(objective_ms=math.nan),
        lambda: Limits(rows=0),
        lambda: Limits(rate=-1.0),
        lambda: Limits(body_mb=math.inf),
        lambda: ServeConfig(objective_ms=-1),
        lambda: ServeConfig(batch=3),
        lambda: ServeConfig(lanes=0),
        lambda: ServeConfig(shadow=1.5),
        lambda: ServeConfig(drain_seconds=-1),
        lambda: ServeConfig(dwell=0),
    ],
)
def test_settings_that_cannot_be_are_refused(make: object) -> None:
    with pytest.raises(SpecError):
        make()  # type: ignore[operator]
