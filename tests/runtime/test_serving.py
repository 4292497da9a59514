"""Many threads, many budgets, one runtime: no answer is lost, and none is another profile's."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from conftest import Made
from t3c.artifact.reader import Artifact
from t3c.engines import open_engine
from t3c.errors import DataError, SpecError
from t3c.runtime.answer import Answer
from t3c.runtime.runtime import Runtime
from t3c.runtime.signals import Pressure
from t3c.spec import Budget

THREADS = 8
SAMPLES = 6
NAMES = ("tiny", "small", "med", "large", "max")
ENGINES = ("onnxruntime", "openvino")
TINY = 1e-6  # MB: the last session used stays, and what is leased

Wanted = dict[tuple[str, int], np.ndarray]
Served = tuple[Answer, int, Budget | None]


@pytest.fixture(scope="module")
def x(made: Made) -> np.ndarray:
    return made.digits.test[0][:SAMPLES].numpy()


@pytest.fixture(scope="module", params=ENGINES)
def warm(request: pytest.FixtureRequest, made: Made) -> Runtime:
    runtime = Runtime(Artifact(made.artifact), request.param, 1)
    runtime.warm()
    return runtime


@pytest.fixture(scope="module")
def wanted(warm: Runtime, x: np.ndarray) -> Wanted:
    """What each profile answers, from sessions that no runtime has."""
    engine = open_engine(warm.engine.name, 1)
    sessions = {p.name: engine.compile(warm.graph(p)) for p in warm.chain}
    found = {
        (name, i): session.run([x[i : i + 1]])[0]
        for name, session in sessions.items()
        for i in range(SAMPLES)
    }
    for i in range(SAMPLES):  # a mixed answer would be seen
        assert len({found[name, i].tobytes() for name in NAMES}) == len(NAMES)
    return found


def budgets(rt: Runtime) -> list[Budget | None]:
    """Budgets for which each profile is chosen in several ways."""
    found: list[Budget | None] = [None, Budget(drift=0.3), Budget(latency_ms=1e-6)]
    for c in rt.placed.candidates:
        latency = c.latency_ms()
        assert latency is not None
        found += [Budget(size_mb=c.size_mb), Budget(latency_ms=latency)]
    return found


def asking(rt: Runtime, x: np.ndarray, seed: int, calls: int) -> list[Served]:
    """One thread's calls: another budget every few, half of them of a profile that is held."""
    rng, choices, served = np.random.default_rng(seed), budgets(rt), list[Served]()
    while len(served) < calls:
        budget = choices[rng.integers(len(choices))]
        row = rng.integers(SAMPLES, size=min(rng.integers(1, 6), calls - len(served)))
        if seed % 2:
            with rt.hold(budget) as held:
                served += [(held.answer(x[i : i + 1]), int(i), budget) for i in row]
            continue
        for i in row:
            answer = rt.answer(x[i : i + 1], budget)
            assert rt.profile == answer.profile
            served.append((answer, int(i), budget))
    return served


def served_by_threads(rt: Runtime, x: np.ndarray, calls: int) -> list[Served]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads get into each other's way as often as they can
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            parts = threads.map(lambda seed: asking(rt, x, seed, calls), range(THREADS))
            served = [one for part in parts for one in part]
    finally:
        sys.setswitchinterval(usual)
    assert len(served) == THREADS * calls
    return served


def check(served: list[Served], wanted: Wanted) -> None:
    """Every answer is, bit for bit, that of the profile it names on its input."""
    for answer, index, _ in served:
        np.testing.assert_array_equal(answer.output, wanted[answer.profile, index])


def check_counts(rt: Runtime, served: list[Served], before: dict[str, dict[str, int]]) -> None:
    """What was counted since is what was served, and no session is lost or leased."""
    now = rt.stats()
    calls = Counter(answer.profile for answer, _, _ in served)
    assert Counter(now["calls"]) - Counter(before["calls"]) == calls
    assert 0 < sum(now["swaps"].values()) - sum(before["swaps"].values()) < len(served)
    assert Counter(now["compiled"]) - Counter(now["evicted"]) == Counter(now["resident"].keys())
    assert (now["fallback"], now["errors"], rt.pool.leased) == ({}, {}, {})


@contextmanager
def meanwhile(act: Callable[[int], object], every: float) -> Iterator[None]:
    """Do something again and again in another thread."""
    done, times = threading.Event(), list[int]()

    def run() -> None:
        while not done.wait(every):
            act(len(times))
            times.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert len(times) > 2


def test_hot_swaps_lose_and_mix_nothing(warm: Runtime, x: np.ndarray, wanted: Wanted) -> None:
    before = warm.stats()
    served = served_by_threads(warm, x, calls=300)
    check(served, wanted)
    check_counts(warm, served, before)
    assert {answer.profile for answer, _, _ in served} == set(NAMES)
    for answer, _, budget in served:
        assert answer.profile == warm.choose(budget).profile
    assert warm.stats()["compiled"] == dict.fromkeys(NAMES, 1)  # and nothing was compiled again


def test_heat_and_alarms_in_the_middle_mix_nothing(
    warm: Runtime, x: np.ndarray, wanted: Wanted
) -> None:
    before, unsettled = warm.stats(), set[bool]()

    def disturb(turn: int) -> None:
        warm.signals.post(Pressure("test", turn % 3, "hot"))
        if turn % 4 == 1:
            warm.alarm.strike(NAMES[turn % 5])
        elif turn % 4 == 3:
            warm.alarm.clear()

    try:
        with meanwhile(disturb, every=0.0005):
            served = served_by_threads(warm, x, calls=150)
    finally:
        warm.signals.post(Pressure("test", 0, ""))
        warm.alarm.clear()
    check(served, wanted)
    check_counts(warm, served, before)
    of = {c.profile: c for c in warm.candidates}
    for answer, _, budget in served:
        asked = warm.choose(budget)
        unsettled.add(answer.profile != asked.profile)
        if budget is not None and of[asked.profile].meets(budget):
            assert of[answer.profile].meets(budget)  # its own limits are kept all the same
    assert unsettled == {True, False}


@pytest.mark.parametrize(("engine", "calls"), [("onnxruntime", 24), ("openvino", 5)])
def test_sessions_that_come_and_go_lose_and_mix_nothing(
    made: Made, x: np.ndarray, engine: str, calls: int
) -> None:
    with Runtime(Artifact(made.artifact), engine, 1, memory_mb=TINY) as tight:
        before = tight.stats()
        served = served_by_threads(tight, x, calls)
        check_counts(tight, served, before)
        counts = tight.stats()
        assert sum(counts["evicted"].values()) >= len(NAMES)
        assert len(counts["resident"]) == 1
        sessions = {p.name: tight.engine.compile(tight.graph(p)) for p in tight.chain}
        for answer, i, budget in served:
            assert answer.profile == tight.choose(budget).profile
            np.testing.assert_array_equal(
                answer.output, sessions[answer.profile].run([x[i : i + 1]])[0]
            )
    assert tight.stats()["resident"] == {}


def test_closing_in_the_middle_loses_no_call(made: Made, x: np.ndarray) -> None:
    runtime = Runtime(Artifact(made.artifact), "onnxruntime", 1)
    reference = {
        (name, i): runtime(x[i : i + 1], profile=name) for name in NAMES for i in range(SAMPLES)
    }
    before = runtime.stats()
    with meanwhile(lambda turn: turn < 8 and runtime.close(), every=0.01):
        served = served_by_threads(runtime, x, calls=60)
    check(served, reference)
    check_counts(runtime, served, before)
    assert sum(runtime.stats()["compiled"].values()) > len(NAMES)  # it did get in between
    with runtime.hold() as held:
        runtime.close()
        runtime.close()
        assert set(runtime.stats()["resident"]) == {"max"}
        np.testing.assert_array_equal(held(x[:1]), reference["max", 0])
    assert runtime.stats()["resident"] == {}
    np.testing.assert_array_equal(runtime(x[:1]), reference["max", 0])  # and it opens again


def test_a_cap_that_holds_some_is_kept(made: Made, x: np.ndarray) -> None:
    free = Runtime(Artifact(made.artifact), "onnxruntime", 1)
    free.warm()
    weights = free.stats()["resident"]
    cap = weights["tiny"] + weights["small"] + weights["med"]
    capped = Runtime(Artifact(made.artifact), "onnxruntime", 1, memory_mb=cap / 1e6)
    for name in (*NAMES, *NAMES[::-1]):
        np.testing.assert_array_equal(capped(x[:1], profile=name), free(x[:1], profile=name))
        resident = capped.stats()["resident"]
        assert name in resident
        assert sum(resident.values()) <= cap
    assert len(resident) >= 2
    assert all(resident[name] == weights[name] for name in resident)


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf")])
def test_a_cap_that_cannot_be_is_refused(made: Made, bad: float) -> None:
    with pytest.raises(SpecError, match="memory_mb must be positive"):
        Runtime(Artifact(made.artifact), "onnxruntime", 1, memory_mb=bad)


def test_bad_inputs_among_good_ones_change_nothing(
    warm: Runtime, x: np.ndarray, wanted: Wanted
) -> None:
    before = warm.stats()
    nan = np.full_like(x[:1], np.nan)

    def ask(turn: int) -> Served | None:
        if turn % 3 == 0:
            with pytest.raises(DataError, match="NaN"):
                warm(nan)
            return None
        return warm.answer(x[turn % SAMPLES][None], profile=NAMES[turn % 5]), turn % SAMPLES, None

    with ThreadPoolExecutor(THREADS) as threads:
        served = [one for one in threads.map(ask, range(300)) if one is not None]
    assert len(served) == 200
    check(served, wanted)
    check_counts(warm, served, before)


def test_what_is_warned_of_is_logged_once(
    made: Made, x: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(Artifact(made.artifact), "onnxruntime", 1)
    with caplog.at_level(logging.WARNING, "t3c.runtime"):
        answers = [runtime.answer(x[:1], Budget(latency_ms=1e-7)) for _ in range(3)]
    assert answers[0].warnings == answers[1].warnings == answers[2].warnings
    events = [record.t3c for record in caplog.records if hasattr(record, "t3c")]
    logged = [event["message"] for event in events if event["event"] == "warning"]
    assert logged == list(map(str, answers[0].warnings))
    assert {event["profile"] for event in events} == {"tiny"}
    assert len(logged) == 3  # the limits, the table of another device, no certificate
