from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from conftest import Made
from t3c.errors import EngineError, RefusedError, UnavailableError
from t3c.runtime.remarks import Code
from t3c.runtime.runtime import Runtime, load
from t3c.runtime.signals import Pressure
from t3c.serve import policy as policies
from t3c.serve.pace import Pace
from t3c.serve.policy import LoadPolicy
from t3c.serve.refusals import Refused
from t3c.serve.scheduler import Scheduler
from t3c.serve.tickets import Served
from t3c.spec import Budget

MS = {"tiny": 4.0, "max": 80.0}  # what a call takes here, whatever its batch


@pytest.fixture(scope="module")
def warm(made: Made) -> Runtime:
    runtime = load(made.artifact, threads=1)
    runtime.warm()
    return runtime


@pytest.fixture
def slow(warm: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """A runtime whose calls take known times, and all that ran on it."""
    monkeypatch.setattr(policies, "WINDOW", 0.5)
    run, top = warm.run, warm.chain.top.name

    def slower(profile: str, session: Any, arrays: Any) -> Any:
        time.sleep((MS["max"] if profile == top else MS["tiny"]) / 1e3)
        return run(profile, session, arrays)

    monkeypatch.setattr(warm, "run", slower)
    return warm


def times(runtime: Runtime, batch: int = 1) -> Pace:
    sizes = [1 << bit for bit in range(batch.bit_length())]
    top = runtime.chain.top.name
    names = [candidate.profile for candidate in runtime.candidates]
    return Pace({n: dict.fromkeys(sizes, MS["max" if n == top else "tiny"]) for n in names})


def driven(
    runtime: Runtime,
    drive: Callable[[Scheduler], Awaitable[Any]],
    objective: float = 200.0,
    batch: int = 1,
    **options: Any,
) -> Any:
    """What a scheduler of its own makes of it; nothing is left waiting."""

    async def main() -> Any:
        names = [candidate.profile for candidate in runtime.candidates]
        pace = times(runtime, batch)
        policy = LoadPolicy(objective, 0.2, names, pace)
        scheduler = Scheduler(runtime, pace, policy, **options)
        try:
            return await drive(scheduler)
        finally:
            await scheduler.close()
            assert scheduler.waiting == 0
            assert runtime.signals.asked.ceilings == ()
            runtime.warm()

    return asyncio.run(main())


def sample(made: Made, index: int = 0, rows: int = 1) -> list[Any]:
    return [made.digits.test[0][index : index + rows].numpy()]


def test_answers_are_those_of_the_runtime_with_their_profile(slow: Runtime, made: Made) -> None:
    async def drive(scheduler: Scheduler) -> list[Served]:
        found = [await scheduler.answer(sample(made, i), Budget()) for i in range(3)]
        return [*found, await scheduler.answer(sample(made), Budget(), "tiny")]

    found = driven(slow, drive, objective=5000)
    top = slow.chain.top.name
    assert [served.answer.profile for served in found] == [top, top, top, "tiny"]
    for index, served in enumerate(found[:3]):
        wanted = slow(sample(made, index)[0], profile=top)
        assert np.array_equal(served.answer.output, wanted)
        assert not served.late
        assert served.answer.certificate is not None


def test_a_burst_is_answered_in_time_by_smaller_profiles(slow: Runtime, made: Made) -> None:
    async def drive(scheduler: Scheduler) -> list[Served]:
        return list(
            await asyncio.gather(*(scheduler.answer(sample(made), Budget()) for _ in range(10)))
        )

    found = driven(slow, drive, objective=800)  # of max, 10 take 800 ms
    assert not any(served.late for served in found)
    held = [served for served in found if served.answer.profile != slow.chain.top.name]
    assert held
    assert {served.answer.reason.code for served in held} == {Code.HELD_BACK}
    assert all("load would take" in str(served.answer.reason) for served in held)


def test_a_request_keeps_its_own_cap_under_load(slow: Runtime, made: Made) -> None:
    top = slow.candidates[-1]
    assert top.drift is not None
    capped = Budget(drift=top.drift)

    async def drive(scheduler: Scheduler) -> list[Any]:
        loose = [scheduler.answer(sample(made), Budget()) for _ in range(8)]
        strict = scheduler.answer(sample(made), capped)
        return list(await asyncio.gather(*loose, strict, return_exceptions=True))

    *_, strict = driven(slow, drive, objective=600)
    if isinstance(strict, Served):
        assert strict.answer.profile == top.profile
    else:
        assert isinstance(strict, RefusedError)  # rather that than a profile it does not allow


def test_more_than_can_be_in_time_is_refused_at_once_and_the_rest_is_in_time(
    slow: Runtime, made: Made
) -> None:
    async def drive(scheduler: Scheduler) -> list[Any]:
        start = time.monotonic()

        async def one() -> Any:
            try:
                return await scheduler.answer(sample(made), Budget())
            except RefusedError as error:
                return error, time.monotonic() - start

        return list(await asyncio.gather(*(one() for _ in range(500))))

    # Of tiny, 500 take 2 s.
    found = driven(slow, drive, objective=800, waiting=1000)
    answered = [one for one in found if isinstance(one, Served)]
    refused = [one for one in found if not isinstance(one, Served)]
    assert len(answered) >= 50
    assert refused
    assert sum(served.late for served in answered) <= 0.05 * len(answered)
    at_once = [seconds for _, seconds in refused if seconds < 0.3]
    assert len(at_once) > len(refused) / 2
    assert Refused.BEHIND_OTHERS in {error.reason.code for error, _ in refused}
    assert all("cannot be answered within 800 ms" in str(error) for error, _ in refused)
    assert all(error.retry_seconds > 0 for error, _ in refused)


def test_a_deadline_that_no_profile_keeps_is_refused(slow: Runtime, made: Made) -> None:
    async def drive(scheduler: Scheduler) -> None:
        with pytest.raises(RefusedError, match="cannot be answered within 2 ms"):
            await scheduler.answer(sample(made), Budget(), deadline_ms=2)
        served = await scheduler.answer(sample(made), Budget(), deadline_ms=75)
        assert served.answer.profile != slow.chain.top.name  # which would take 80 ms
        assert not served.late

    driven(slow, drive, objective=5000)


def test_a_server_that_believes_itself_too_slow_finds_out_again(slow: Runtime, made: Made) -> None:
    async def drive(scheduler: Scheduler) -> None:
        scheduler.pace.factor = 100.0  # as after a time in which others had the machine
        for _ in range(200):
            await scheduler.answer(sample(made), Budget(), "tiny")
        assert scheduler.pace.factor < 3

    driven(slow, drive, objective=150)


def test_deadlines_that_cannot_be_are_no_load(slow: Runtime, made: Made) -> None:
    async def drive(scheduler: Scheduler) -> None:
        for _ in range(500):
            with pytest.raises(RefusedError):
                await scheduler.answer(sample(made), Budget(), deadline_ms=0.01)
        served = await scheduler.answer(sample(made), Budget())
        assert served.answer.profile == slow.chain.top.name

    driven(slow, drive, objective=5000)


def test_what_is_more_urgent_goes_first(slow: Runtime, made: Made) -> None:
    order: list[str] = []

    async def drive(scheduler: Scheduler) -> None:
        async def one(name: str, deadline: float) -> None:
            await scheduler.answer(sample(made), Budget(), deadline_ms=deadline)
            order.append(name)

        first = asyncio.ensure_future(one("first", 9000))
        await asyncio.sleep(0.005)
        await asyncio.gather(first, one("patient", 9000), one("urgent", 3000))

    driven(slow, drive, objective=9000)
    assert order == ["first", "urgent", "patient"]


def test_requests_that_wait_run_as_one_batch(
    slow: Runtime, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = slow.run

    def counted(profile: str, session: Any, arrays: Any) -> Any:
        sizes.append(len(arrays[0]))
        return run(profile, session, arrays)

    monkeypatch.setattr(slow, "run", counted)

    async def drive(scheduler: Scheduler) -> list[Served]:
        asked = [scheduler.answer(sample(made, i), Budget(), "tiny") for i in range(7)]
        return [*await asyncio.gather(*asked), await scheduler.answer(sample(made, 0, 7), Budget())]

    found = driven(slow, drive, objective=5000, batch=4)
    assert sorted(sizes)[-3:] == [4, 4, 4] or sorted(sizes)[-2:] == [4, 4]
    assert set(sizes) <= {1, 2, 4}  # no other shapes are compiled
    assert sum(sizes) == 14
    for index, served in enumerate(found[:7]):
        wanted = slow(sample(made, index)[0], profile="tiny")
        assert np.allclose(served.answer.output, wanted, atol=1e-4)
    assert found[-1].answer.output.shape == (7, 10)


def test_an_engine_that_fails_is_told_to_those_who_wait_and_no_others(
    slow: Runtime, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, broken = slow.run, [True]

    def breaking(profile: str, session: Any, arrays: Any) -> Any:
        if broken.pop() if broken else False:
            raise EngineError("no more")
        return run(profile, session, arrays)

    monkeypatch.setattr(slow, "run", breaking)

    async def drive(scheduler: Scheduler) -> None:
        with pytest.raises(EngineError, match="no more"):
            await scheduler.answer(sample(made), Budget())
        assert (await scheduler.answer(sample(made), Budget())).answer.output.shape == (1, 10)
        assert not scheduler.broken

    driven(slow, drive, objective=5000)


def test_the_queue_is_bounded_and_a_closed_one_takes_nothing(slow: Runtime, made: Made) -> None:
    async def drive(scheduler: Scheduler) -> None:
        asked = [asyncio.ensure_future(scheduler.answer(sample(made), Budget())) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="the most there may be"):
            await scheduler.answer(sample(made), Budget())
        closing = asyncio.ensure_future(scheduler.close())
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="stopping"):
            await scheduler.answer(sample(made), Budget())
        await closing
        assert len(await asyncio.gather(*asked)) == 4  # what was admitted is answered

    driven(slow, drive, objective=5000, waiting=4)


def test_profiles_come_back_while_nobody_asks(slow: Runtime, made: Made) -> None:
    async def drive(scheduler: Scheduler) -> None:
        burst = (scheduler.answer(sample(made), Budget()) for _ in range(60))
        await asyncio.gather(*burst, return_exceptions=True)
        assert scheduler.ceiling != slow.chain.top.name
        end = time.monotonic() + 10
        while scheduler.ceiling != slow.chain.top.name:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        served = await scheduler.answer(sample(made), Budget())
        assert served.answer.profile == slow.chain.top.name

    driven(slow, drive, objective=1500)


def test_an_alarm_overrides_load_but_no_limits(slow: Runtime, made: Made) -> None:
    async def drive(scheduler: Scheduler) -> None:
        slow.alarm.strike("tiny")  # tiny is not to be trusted
        served = await asyncio.gather(
            *(scheduler.answer(sample(made), Budget()) for _ in range(6)),
            scheduler.answer(sample(made), Budget(size_mb=slow.candidates[0].size_mb)),
        )
        *free, limited = (one.answer for one in served)
        assert "tiny" not in {answer.profile for answer in free}
        assert limited.profile == "tiny"
        assert limited.flagged

    try:
        driven(slow, drive, objective=3000)
    finally:
        slow.alarm.clear()


def test_what_others_ask_for_counts_beside_load(slow: Runtime, made: Made) -> None:
    async def drive(scheduler: Scheduler) -> str:
        slow.signals.post(Pressure("thermal", 1, "83 C"))
        served = await scheduler.answer(sample(made), Budget())
        slow.signals.post(Pressure("thermal", 0, "cool"))
        return served.answer.profile

    assert driven(slow, drive, objective=5000) == slow.candidates[-2].profile


def test_a_shadow_tells_how_far_answers_are_from_the_largest(slow: Runtime, made: Made) -> None:
    seen: list[tuple[str, list[float]]] = []

    async def drive(scheduler: Scheduler) -> None:
        await scheduler.answer(sample(made), Budget(), "tiny")
        await scheduler.answer(sample(made), Budget(), slow.chain.top.name)
        await scheduler.drain()

    before = slow.counters.snapshot()["calls"]
    driven(
        slow, drive, objective=5000, shadow=1.0,
        on_drift=lambda profile, drifts: seen.append((profile, list(drifts))),
    )  # fmt: skip
    ((profile, (drift,)),) = seen
    tiny, top = (slow(sample(made)[0], profile=n) for n in ("tiny", slow.chain.top.name))
    assert profile == "tiny"
    assert drift == pytest.approx(np.linalg.norm(tiny - top) / np.linalg.norm(top), rel=1e-4)
    calls = slow.counters.snapshot()["calls"]
    assert sum(calls.values()) - sum(before.values()) == 4  # a shadow is no call of a client's
