from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count, cycle, repeat

import pytest

from t3c.measure.steady import warm_up


def timed(takes: Iterator[float], **settings: float) -> tuple[bool, int]:
    """Whether a call that takes these times became steady, and how often it was called."""
    passed = 0.0
    calls = 0

    def call() -> None:
        nonlocal passed, calls
        passed += next(takes)
        calls += 1

    clock: Callable[[], float] = lambda: passed  # noqa: E731
    return warm_up(call, clock=clock, **settings), calls


def test_a_steady_call_takes_two_windows() -> None:
    assert timed(repeat(0.001)) == (True, 10)
    assert timed(cycle([1e-3, 1.02e-3, 0.99e-3]))[1] == 10
    assert timed(repeat(0.001), window=3)[1] == 6


def test_a_cold_start_is_waited_out() -> None:
    # Windows 2 and 3 are the first that agree.
    assert timed(chain([0.5], repeat(0.01, 6), repeat(0.002))) == (True, 15)


def test_a_slow_fall_is_not_steady() -> None:
    # 0.5% a call: two windows of 5 agree within 5%, but the next will be lower still.
    falling = (0.001 * 0.995**i for i in count())
    assert timed(falling, most=60) == (False, 60)
    settles = chain((0.001 * 0.995**i for i in range(40)), repeat(0.0008))
    assert timed(settles) == (True, 50)


def test_a_restless_call_is_bounded() -> None:
    restless = cycle([0.001] * 5 + [0.002] * 5)
    assert timed(restless) == (False, 200)
    steady, calls = timed(cycle([0.02] * 5 + [0.04] * 5), seconds=1.0)
    assert not steady
    assert calls == pytest.approx(1.0 / 0.03, abs=4)
    assert timed(repeat(0.001), most=3)[1] == 3


def test_slow_calls_are_few() -> None:
    assert timed(repeat(1.0)) == (False, 3)
    assert timed(repeat(10.0))[1] == 2
    # Not slow enough to give up on two windows.
    assert timed(repeat(0.7)) == (True, 10)


def test_one_slow_first_call_does_not_end_the_warm_up() -> None:
    assert timed(chain([60.0], repeat(0.001))) == (True, 10)
