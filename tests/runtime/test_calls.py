from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conftest import Made
from t3c.artifact.reader import Artifact
from t3c.errors import DataError, EngineError, SpecError, T3CError
from t3c.runtime.answer import Answer
from t3c.runtime.calls import Request, answer_all
from t3c.runtime.monitor import MonitorConfig, Shift
from t3c.runtime.remarks import Code, Remark
from t3c.runtime.runtime import Runtime
from t3c.runtime.select import Choice
from t3c.runtime.sessions import SessionKey
from t3c.runtime.signals import Pressure
from t3c.spec import Budget

Patch = pytest.MonkeyPatch
HOT, COOL = Pressure("test", 1, "it is hot"), Pressure("test", 0, "")
NAMES = ("tiny", "small", "med", "large", "max")
X = np.zeros((1, 1, 32, 32), np.float32)


def opened(made: Made, **options: Any) -> Runtime:
    return Runtime(Artifact(made.artifact), "onnxruntime", 1, **options)


@pytest.fixture(scope="module")
def shared(made: Made) -> Runtime:
    runtime = opened(made)
    runtime.warm()
    return runtime


@pytest.fixture
def rt(shared: Runtime) -> Iterator[Runtime]:
    """A runtime that a test may heat up and alarm; sessions stay warm from test to test."""
    yield shared
    shared.signals.post(COOL)
    shared.alarm.clear()
    assert shared.pool.leased == {}


@pytest.fixture(scope="module")
def x(made: Made) -> np.ndarray:
    return made.digits.test[0][:40].numpy()


def sized(rt: Runtime, profile: str) -> Budget:
    """The tightest budget that a profile meets."""
    return Budget(size_mb=next(c.size_mb for c in rt.candidates if c.profile == profile))


def counted(rt: Runtime, patch: Patch, name: str) -> list[tuple[Any, ...]]:
    """The calls of a method from now on."""
    calls, method = list[tuple[Any, ...]](), getattr(rt, name)

    def call(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return method(*given, **named)

    patch.setattr(rt, name, call)
    return calls


# -- held


def test_a_held_profile_is_chosen_once(rt: Runtime, x: np.ndarray, monkeypatch: Patch) -> None:
    wanted, before = rt(x[:1], profile="med"), rt.stats()["calls"]["med"]
    chosen, leased = (counted(rt, monkeypatch, name) for name in ("choose", "lease"))
    with rt.hold(sized(rt, "med")) as held:
        for _ in range(5):
            np.testing.assert_array_equal(held(x[:1]), wanted)
        assert (held.profile, held.budget, rt.profile) == ("med", sized(rt, "med"), "med")
        assert rt.pool.leased == {SessionKey("med"): 1}
    assert (len(chosen), len(leased)) == (1, 1)
    assert rt.stats()["calls"]["med"] == before + 5
    with rt.hold() as free:
        assert free.profile == "max"


def test_a_new_budget_moves_it_before_the_old_one_goes(
    rt: Runtime, x: np.ndarray, monkeypatch: Patch
) -> None:
    wanted = {name: rt(x[:3], profile=name) for name in NAMES}
    overlaps, lease = list[dict[SessionKey, int]](), rt.lease

    def watching(choice: Choice) -> Any:
        found = lease(choice)
        overlaps.append(rt.pool.leased)
        return found

    monkeypatch.setattr(rt, "lease", watching)
    with rt.hold(sized(rt, "tiny")) as held:
        for name in ("large", "small", "small", "max"):
            held.budget = sized(rt, name)
            assert (held.profile, rt.pool.leased) == (name, {SessionKey(name): 1})
            np.testing.assert_array_equal(held(x[:3]), wanted[name])
        held.budget = None
        assert held.profile == "max"
    named = [{key.profile: count for key, count in one.items()} for one in overlaps[1:4]]
    assert named == [{"tiny": 1, "large": 1}, {"large": 1, "small": 1}, {"small": 2}]


def test_signals_and_alarms_move_it_and_let_it_back(rt: Runtime) -> None:
    with rt.hold(sized(rt, "large")) as held:

        def served() -> tuple[str, bool]:
            answer = held.answer(X)
            assert answer.profile == held.profile == rt.profile
            return answer.profile, answer.flagged

        assert served() == ("large", False)
        rt.signals.post(HOT)
        assert served() == ("med", False)
        rt.alarm.strike("large")  # and an alarm is heard before heat
        assert served() == ("large", True)
        rt.alarm.clear()
        assert served() == ("med", False)
        rt.signals.post(COOL)
        assert served() == ("large", False)
        held.budget = None
        rt.alarm.strike("large")
        assert served() == ("max", False)
        rt.alarm.strike("max")
        assert served() == ("max", True)
        assert rt.pool.leased == {SessionKey("max"): 1}


def test_what_was_released_is_refused(rt: Runtime) -> None:
    held = rt.hold(sized(rt, "tiny"))
    held.release()
    held.release()
    before = rt.stats()["calls"]
    with pytest.raises(SpecError, match="released"):
        held(X)
    with pytest.raises(SpecError, match="released"):
        held.budget = sized(rt, "max")
    rt.signals.post(HOT)
    with pytest.raises(SpecError, match="released"):
        held(X)
    assert rt.stats()["calls"] == before
    assert rt.pool.leased == {}


def test_what_is_held_stays_warm_while_others_are_evicted(made: Made, x: np.ndarray) -> None:
    with opened(made, memory_mb=1e-6) as tight, tight.hold(sized(tight, "med")) as held:
        wanted = held(x[:2])
        for name in ("tiny", "max", "small", "tiny"):
            tight(x[:1], profile=name)
            assert set(tight.stats()["resident"]) == {"med"}
            np.testing.assert_array_equal(held(x[:2]), wanted)
        tight.close()  # no call of this is under way, but what is held is held
        np.testing.assert_array_equal(held(x[:2]), wanted)
        counts = tight.stats()
        assert (counts["compiled"], counts["evicted"]) == (
            {"med": 1, "tiny": 2, "max": 1, "small": 1}, {"tiny": 2, "max": 1, "small": 1},
        )  # fmt: skip
    assert tight.stats()["resident"] == {}
    assert tight.stats()["evicted"]["med"] == 1


def test_a_move_that_fails_changes_nothing(rt: Runtime, monkeypatch: Patch) -> None:
    with rt.hold(sized(rt, "small")) as held:
        with monkeypatch.context() as patch:
            patch.setattr(rt, "lease", lambda choice: _refuse())
            with pytest.raises(EngineError, match="refused"):
                held.budget = sized(rt, "max")
            rt.signals.post(HOT)
            for _ in range(2):  # it does not serve what it no longer should
                with pytest.raises(EngineError, match="refused"):
                    held(X)
        assert held.budget == sized(rt, "small")
        assert held.answer(X).profile == "tiny"


def _refuse() -> None:
    raise EngineError("refused")


# -- many at once


def test_a_batch_answers_as_single_calls_do(rt: Runtime, x: np.ndarray, monkeypatch: Patch) -> None:
    rng = np.random.default_rng(0)
    budgets = [None, Budget(drift=0.1), *(sized(rt, name) for name in NAMES)]
    requests, start = list[Request](), 0
    for size in (1, 3, 1, 1, 2, 4, 1, 1, 5, 1, 2, 1):
        budget = budgets[rng.integers(len(budgets))]
        requests.append(Request(x[start : start + size], budget))
        start += size
    alone = [rt.answer(r.inputs, r.budget) for r in requests]
    before, runs = rt.stats()["calls"], counted(rt, monkeypatch, "run")
    together = rt.answers(iter(requests))
    assert len(together) == len(requests)
    for one, same in zip(together, alone, strict=True):
        assert _said(one) == _said(same)
        np.testing.assert_allclose(one.output, same.output, rtol=1e-4, atol=1e-4)
        assert one.outputs[0] is one.output
        assert one.output.flags.c_contiguous
    profiles = [answer.profile for answer in alone]
    assert [run[0] for run in runs] == list(dict.fromkeys(profiles))  # each profile once
    sizes = {run[0]: len(run[2][0]) for run in runs}
    for name, size in sizes.items():
        mine = (len(r.inputs) for r, p in zip(requests, profiles, strict=True) if p == name)
        assert size == sum(mine)
    calls = rt.stats()["calls"]
    assert {name: calls[name] - before.get(name, 0) for name in sizes} == {
        name: profiles.count(name) for name in sizes
    }


def _said(answer: Answer) -> tuple[object, ...]:
    return answer.profile, answer.reason, answer.warnings, answer.certificate, answer.flagged


def test_requests_of_one_profile_and_other_shapes_run_apart() -> None:
    """On a model that doubles what it is given, of whatever length; lengths name the profile."""
    runs = list[tuple[str, list[tuple[int, ...]]]]()

    def run(profile: str, session: object, arrays: list[np.ndarray]) -> tuple[list[Any], None]:
        runs.append((profile, [array.shape for array in arrays]))
        return [2 * array for array in arrays], None

    runtime: Any = SimpleNamespace(
        check=lambda inputs: [np.asarray(one) for one in inputs],
        choose=lambda budget, first: Choice("a" if budget else "b", Remark(Code.NAMED)),
        lease=lambda choice, named: (choice, open_lease()),
        run=run,
        told=lambda outputs, choice, budget, shift: (choice.profile, outputs),
    )
    some = Budget(size_mb=1)
    rows = [(1, 3, some), (2, 5, some), (4, 3, None), (2, 3, some), (1, 5, some), (1, 3, None)]
    requests = [
        Request((np.full((count, length), 7.0 * i), np.full((count, 2), 1.0 * i)), budget)
        for i, (count, length, budget) in enumerate(rows)
    ]
    answers: list[Any] = answer_all(runtime, requests)
    assert runs == [
        ("a", [(3, 3), (3, 2)]), ("a", [(3, 5), (3, 2)]), ("b", [(5, 3), (5, 2)]),
    ]  # fmt: skip
    for request, (profile, outputs) in zip(requests, answers, strict=True):
        assert profile == ("a" if request.budget else "b")
        for given, got in zip(request.inputs, outputs, strict=True):
            np.testing.assert_array_equal(got, 2 * given)


def open_lease() -> Any:
    lease = SimpleNamespace()

    class Open:
        def __enter__(self) -> object:
            return lease

        def __exit__(self, *_: object) -> None:
            return None

    return Open()


@pytest.mark.parametrize(
    "bad",
    [Request(np.full((1, 1, 32, 32), np.nan)), Request(X[0]), Request(X, 3.0), X, None],  # type: ignore[arg-type]
)
def test_one_bad_request_refuses_all_before_any_runs(
    rt: Runtime, bad: Any, monkeypatch: Patch
) -> None:
    before, runs = rt.stats(), counted(rt, monkeypatch, "run")
    with pytest.raises((DataError, SpecError)):
        rt.answers([Request(X), Request(X, sized(rt, "tiny")), bad])
    assert runs == []
    assert rt.stats() == before
    assert rt.answers([]) == []


def test_each_request_hears_of_its_own_budget_when_a_profile_is_refused(
    made: Made, monkeypatch: Patch
) -> None:
    runtime = opened(made)
    compile_ = runtime.engine.compile
    refused = [
        runtime.graph(runtime.chain[name]).SerializeToString(deterministic=True)
        for name in ("large", "max")
    ]

    def refusing(graph: Any) -> Any:
        if graph.SerializeToString(deterministic=True) in refused:
            raise EngineError("no kernel")
        return compile_(graph)

    monkeypatch.setattr(runtime.engine, "compile", refusing)
    capped, free = runtime.answers([Request(X, Budget(drift=0.01)), Request(X)])
    assert capped.profile == free.profile == "med"
    assert any(warning.code is Code.CAP_UNCONFIRMED for warning in capped.warnings)
    assert not any(warning.code is Code.CAP_UNCONFIRMED for warning in free.warnings)
    for answer in (capped, free):
        assert Code.CANNOT_RUN in {w.code for w in answer.warnings if w.profile == "max"}
        assert Code.CANNOT_RUN in {w.code for w in answer.warnings if w.profile == "large"}
        np.testing.assert_allclose(answer.output, runtime(X, profile="med"), rtol=1e-4)


def test_a_shift_is_told_once_for_a_batch_and_flags_what_follows(
    made: Made, x: np.ndarray, monkeypatch: Patch
) -> None:
    config = MonitorConfig(hold=6)
    runtime = Runtime(Artifact(made.artifact), "openvino", 1, config)
    told, shift = list[Shift](), Shift(9, 3, 1e5, (("head", 4.0),), "activations have moved")
    runtime.on_shift = told.append
    budget = sized(runtime, "max")
    monitor = runtime.watches["max"].monitor
    with monkeypatch.context() as patch:
        patch.setattr(monitor, "observe", lambda features: shift)
        answers = runtime.answers([Request(x[i : i + 1], budget) for i in range(3)])
    assert told == [shift]
    assert [answer.shift for answer in answers] == [shift] * 3
    assert all((shift,) in [w.causes for w in answer.warnings] for answer in answers)
    assert runtime.stats()["shift"] == {"max": 1}
    monkeypatch.setattr(monitor, "observe", lambda features: None)
    flags = [runtime.answer(x[:3], budget).flagged for _ in range(3)]
    assert flags == [True, True, False]  # six calm samples end it


# -- async


def test_many_async_calls_get_their_own_answers(rt: Runtime, x: np.ndarray) -> None:
    names = [NAMES[i % 5] for i in range(20)]
    wanted = [rt(x[i : i + 1], profile=name) for i, name in enumerate(names)]
    before = sum(rt.stats()["calls"].values())

    async def ask() -> list[Answer]:
        calls = [
            rt.answer_async(x[i : i + 1], sized(rt, name))
            if i % 2
            else rt.answer_async(x[i : i + 1], profile=name)
            for i, name in enumerate(names)
        ]
        return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    assert [answer.profile for answer in answers] == names
    for answer, y in zip(answers, wanted, strict=True):
        np.testing.assert_array_equal(answer.output, y)
    assert sum(rt.stats()["calls"].values()) == before + 20


def test_async_calls_leave_the_loop_free_and_use_the_given_threads(
    rt: Runtime, monkeypatch: Patch
) -> None:
    used, go, run = set[str](), threading.Event(), rt.run

    def waiting(*given: Any) -> Any:
        used.add(threading.current_thread().name)
        assert go.wait(10)
        return run(*given)

    monkeypatch.setattr(rt, "run", waiting)

    async def ask(threads: ThreadPoolExecutor) -> None:
        calls = [asyncio.create_task(rt.answer_async(X, executor=threads)) for _ in range(4)]
        calls.append(asyncio.create_task(rt.answer_async(X[0], executor=threads)))
        await asyncio.sleep(0.01)
        go.set()  # only a loop that runs gets here
        *good, bad = await asyncio.gather(*calls, return_exceptions=True)
        assert {answer.profile for answer in good if isinstance(answer, Answer)} == {"max"}
        assert isinstance(bad, DataError)

    with ThreadPoolExecutor(2, thread_name_prefix="mine") as threads:
        asyncio.run(ask(threads))
    assert used
    assert all(name.startswith("mine") for name in used)


# -- what cannot be answered, however it is asked


def held(rt: Runtime, inputs: Any, budget: Any = None) -> object:
    with rt.hold(budget) as one:
        return one(inputs)


def batched(rt: Runtime, inputs: Any, budget: Any = None) -> object:
    return rt.answers([Request(inputs, budget)])


def awaited(rt: Runtime, inputs: Any, budget: Any = None) -> object:
    return asyncio.run(rt.answer_async(inputs, budget))


def plain(rt: Runtime, inputs: Any, budget: Any = None) -> object:
    return rt(inputs, budget)


Ask = Callable[..., object]
ways = pytest.mark.parametrize("ask", [plain, held, batched, awaited])


def spoiled(value: float, dtype: type = np.float32) -> np.ndarray:
    array = X.astype(dtype)
    array[0, 0, 31, 31] = value
    return array


@ways
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (spoiled(np.nan), "'input' holds NaN or infinite values"),
        (spoiled(np.nan, np.float64), "NaN"),
        (spoiled(np.inf, np.float16), "infinite"),
        (spoiled(-np.inf), "infinite"),
        (spoiled(4e38, np.float64), "infinite"),  # more than a float32 holds
        (X.astype(complex), "dtype complex128 does not fit float32"),
        (X.astype(object), "dtype object"),
        (np.full(X.shape, None), "dtype object"),
        (X.astype("datetime64[s]"), "dtype datetime64"),
        (X.astype(bytes), "dtype"),
        (np.zeros(X.shape, [("a", "f4")]), "dtype"),
        (X[0], r"shape \(1, 32, 32\) does not fit \(batch, 1, 32, 32\)"),
        (X[:, :, :31], r"shape \(1, 1, 31, 32\)"),
        (X[None], r"shape \(1, 1, 1, 32, 32\)"),
        ([X], r"shape \(1, 1, 1, 32, 32\)"),
        (X[:0], "empty batch"),
        (np.float32(1), r"shape \(\)"),
        (np.array(np.nan), r"shape \(\)"),
        (3, r"shape \(\)"),
        (None, r"shape \(\)"),
        ("one.npy", r"shape \(\)"),
        ((), "1 inputs are needed, got 0"),
        ((X, X), "1 inputs are needed, got 2"),
        ({}, "inputs must be input"),
        ({"x": X}, "inputs must be input"),
        ({0: X}, "inputs must be input"),
        ([[1.0], [1.0, 2.0]], "not an array"),
    ],
)  # fmt: skip
def test_bad_inputs_are_one_clear_error(rt: Runtime, ask: Ask, bad: Any, message: str) -> None:
    before = rt.stats()
    with pytest.raises(DataError, match=message) as caught:
        ask(rt, bad)
    assert "\n" not in str(caught.value)
    assert rt.stats() == before


@ways
@pytest.mark.parametrize("bad", [2.0, 0, "5ms", {"latency_ms": 5}])
def test_a_budget_is_a_budget(rt: Runtime, ask: Ask, bad: Any) -> None:
    with pytest.raises(T3CError, match=rf"a budget is a t3c\.Budget, got {type(bad).__name__}"):
        ask(rt, X, bad)


@ways
@pytest.mark.parametrize(
    "same",
    [
        lambda x: x.tolist(),
        lambda x: x.astype(np.float64),
        lambda x: x.astype(">f4"),
        lambda x: np.asfortranarray(x),
        lambda x: np.repeat(x, 2, axis=3)[..., ::2],
        lambda x: {"input": x},
        lambda x: (x,),
    ],
)
def test_inputs_may_come_as_they_are(
    rt: Runtime, x: np.ndarray, ask: Ask, same: Callable[[np.ndarray], object]
) -> None:
    got: Any = ask(rt, same(x[:2]))
    if ask is batched:
        got = got[0]
    output = got.output if isinstance(got, Answer) else got
    np.testing.assert_array_equal(output, rt(x[:2]))
