from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from t3c.errors import SpecError
from t3c.runtime.signals import (
    Asked,
    Battery,
    CpuPressure,
    Hysteresis,
    Pressure,
    Signals,
    Source,
    ThermalZones,
)

SOON = 10.0  # seconds after which a test that waits has failed


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """A source that says, or raises, one thing after the other, and the last for ever."""

    name = "scripted"

    def __init__(self, *script: int | BaseException) -> None:
        self.script = list(script)
        self.reads = 0

    def read(self) -> Pressure:
        said = self.script[min(self.reads, len(self.script) - 1)]
        self.reads += 1
        if isinstance(said, BaseException):
            raise said
        return Pressure(self.name, said, f"reading {self.reads}")


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("t3c-")]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def test_the_most_that_is_asked_for_counts() -> None:
    signals = Signals()
    assert (signals.steps, signals.reasons) == (0, ())
    assert signals.post(Pressure("a", 1, "a is warm"))
    assert signals.post(Pressure("b", 3, "b is hot"))
    assert not signals.post(Pressure("c", 2, "c is busy"))
    assert signals.asked == Asked(3, ("b is hot", "c is busy", "a is warm"))
    assert not signals.post(Pressure("a", 2, "a is warmer"))
    assert signals.asked == Asked(3, ("b is hot", "a is warmer", "c is busy"))
    assert signals.post(Pressure("b", 0, "b is fine"))
    assert signals.asked == Asked(2, ("a is warmer", "c is busy"))
    assert not signals.post(Pressure("b", 0, "b is fine"))
    with pytest.raises(SpecError, match="b: steps must not be negative, got -1"):
        Pressure("b", -1, "")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3))))
def test_the_last_word_of_each_source_is_what_counts(posts: list[tuple[str, int]]) -> None:
    signals, last = Signals(), dict.fromkeys("abc", 0)
    for source, steps in posts:
        before = max(last.values())
        last[source] = steps
        changed = signals.post(Pressure(source, steps, source))
        assert changed == (max(last.values()) != before)
        assert signals.steps == max(last.values())
        assert sorted(signals.reasons) == [name for name, asked in last.items() if asked]


def test_steps_and_reasons_are_of_one_moment() -> None:
    signals = Signals()
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            signals.post(Pressure("a", 2, "2"))
            signals.post(Pressure("a", 0, "0"))

    threads = [threading.Thread(target=flip) for _ in range(2)]
    for thread in threads:
        thread.start()
    seen = {signals.asked for _ in range(20_000)}
    stop.set()
    for thread in threads:
        thread.join(SOON)
    assert seen <= {Asked(0, ()), Asked(2, ("2",))}


def test_a_watched_source_is_polled_and_withdrawn() -> None:
    signals, source = Signals(), Scripted(0, 1, 1, 2)
    signals.post(Pressure("other", 1, "other"))
    with signals.watching(source, every=0.001):
        until(lambda: signals.steps == 2)
        assert signals.reasons[-1] == "other"
        assert [thread.daemon for thread in watchers()] == [True]
    assert signals.asked == Asked(1, ("other",))
    assert not watchers()
    reads = source.reads
    time.sleep(0.02)
    assert source.reads == reads


def test_leaving_is_prompt_and_polling_as_often_as_asked_for() -> None:
    signals, source = Signals(), Scripted(2)
    with within(SOON):
        with signals.watching(source, every=3600):
            until(lambda: signals.steps == 2)
        assert (signals.steps, source.reads) == (0, 1)
        with pytest.raises(ZeroDivisionError), signals.watching(source, every=3600):
            _ = 1 / 0
    assert not watchers()
    for every in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(SpecError, match="every"), signals.watching(source, every):
            pass


def test_a_read_that_ends_after_leaving_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("t3c.runtime.signals.PATIENCE", 0.01)
    entered, go = threading.Event(), threading.Event()

    class Stuck:
        name = "stuck"

        def read(self) -> Pressure:
            entered.set()
            assert go.wait(SOON)
            return Pressure(self.name, 3, "late")

    signals = Signals()
    with within(SOON / 2), signals.watching(Stuck()):
        assert entered.wait(SOON)
    [thread] = watchers()
    signals.post(Pressure("stuck", 1, "said by another"))
    go.set()
    thread.join(SOON)
    assert signals.asked == Asked(1, ("said by another",))


def test_a_source_that_cannot_be_read_says_nothing_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    states: list[int] = []

    class Noted(Signals):
        def post(self, pressure: Pressure) -> bool:
            states.append(pressure.steps)
            return super().post(pressure)

    signals, source = Noted(), Scripted(2, OSError("gone"), OSError("gone"), 1, OSError("gone"))
    with caplog.at_level(logging.WARNING, "t3c.runtime"), signals.watching(source, every=0.001):
        until(lambda: len(states) >= 8)
    assert states[:6] == [2, 0, 0, 1, 0, 0]
    assert [record.getMessage() for record in caplog.records] == ["scripted cannot be read: gone"]


def test_a_source_that_breaks_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(str(args.exc_value)))
    signals = Signals()
    with signals.watching(Scripted(2, ZeroDivisionError("a defect")), every=0.01):
        until(lambda: bool(raised))
        assert signals.asked == Asked(0, ())
    assert raised == ["a defect"]


def test_a_source_is_watched_once_at_a_time() -> None:
    signals = Signals()
    with (
        signals.watching(Scripted(1)),
        pytest.raises(SpecError, match="scripted is watched already"),
        signals.watching(Scripted(2)),
    ):
        pass
    with signals.watching(Scripted(2)):
        until(lambda: signals.steps == 2)


def test_steps_take_readings_in_a_row_and_time() -> None:
    clock = Clock()
    state = Hysteresis(10, 5, again=2, dwell=4, most=2, clock=clock)
    # (seconds later, value, steps)
    script = [
        (0, 11, 0), (0, 11, 1), (1, 11, 1), (1, 11, 1), (1, 11, 1), (1, 11, 2),
        (9, 11, 2), (9, 10, 2), (9, 5, 2), (9, 4, 2), (9, 4, 1), (9, 7, 1), (9, 4, 1), (9, 7, 1),
        (9, 4, 1), (9, 11, 1), (9, 4, 1), (3, 4, 0), (9, 4, 0), (9, 4, 0),
        (9, 11, 0), (9, 4, 0), (9, 11, 0), (9, 11, 1),
    ]  # fmt: skip
    for index, (later, value, steps) in enumerate(script):
        clock.now += later
        assert state.take(value) == steps, index


VALUES = st.floats(0, 20) | st.sampled_from([4.9, 5.0, 7.0, 10.0, 10.1])


@given(
    readings=st.lists(st.tuples(st.integers(0, 5), VALUES), max_size=60),
    again=st.integers(1, 3),
    dwell=st.integers(0, 6),
    most=st.integers(1, 3),
)
@example(readings=[(1, 11.0)] * 5 + [(1, 4.0)] * 5, again=2, dwell=0, most=3)
def test_hysteresis(readings: list[tuple[int, float]], again: int, dwell: int, most: int) -> None:
    clock = Clock()
    state = Hysteresis(10, 5, again=again, dwell=dwell, most=most, clock=clock)
    steps = 0
    changes: list[tuple[float, int]] = []
    values: list[float] = []
    for later, value in readings:
        clock.now += later
        before, steps = steps, state.take(value)
        values.append(value)
        assert 0 <= steps <= most
        assert steps - before in {-1, 0, 1}
        if 5 <= value <= 10:
            assert steps == before
        if steps != before:
            row = values[-again:]
            assert len(row) == again
            assert all(v > 10 for v in row) if steps > before else all(v < 5 for v in row)
            changes.append((clock.now, len(values)))
    for (then, index), (now, other) in itertools.pairwise(changes):
        assert now - then >= dwell
        assert other - index >= again  # no value counts for two steps
    for end, wanted in ((11.0, most), (4.0, 0)):  # what lasts is followed to the end
        for _ in range(again * most + again):
            clock.now += dwell
            steps = state.take(end)
        assert steps == wanted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"low": 11}, "low must not be above high, got low 11 and high 10"),
        ({"low": float("nan")}, "low must not be above high"),
        ({"again": 0}, "again 0"),
        ({"most": 0}, "most 0"),
        ({"dwell": -1}, "dwell -1"),
    ],
)
def test_a_hysteresis_that_cannot_be(options: dict[str, float], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Hysteresis(**{"high": 10, "low": 5, **options})  # type: ignore[arg-type]


def zone(root: Path, index: int, temp: str) -> None:
    folder = root / f"thermal_zone{index}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "temp").write_text(temp)


def test_the_hottest_zone_counts(tmp_path: Path) -> None:
    clock = Clock()
    source = ThermalZones(tmp_path, Hysteresis(85, 75, again=1, dwell=5, most=2, clock=clock))
    (tmp_path / "cooling_device0").mkdir()
    (tmp_path / "cooling_device0" / "temp").write_text("99000")
    (tmp_path / "thermal_zone7").mkdir()  # has no temperature
    zone(tmp_path, 8, "")
    zone(tmp_path, 9, "no number\n")
    zone(tmp_path, 0, "40000\n")

    def said(temp: str, later: float = 5) -> int:
        zone(tmp_path, 1, temp)
        clock.now += later
        pressure = source.read()
        assert pressure.source == "thermal"
        return pressure.steps

    assert said("85000\n") == 0
    assert said("85001\n") == 1
    assert source.read().reason == "thermal_zone1 is at 85.0 C (hot above 85, cool below 75)"
    assert said("90000", later=4.9) == 1
    assert said("90000", later=0.1) == 2
    assert said("99000") == 2
    assert said("80000") == 2
    assert said("74999") == 1
    assert said("-5000") == 0
    assert source.read().reason.startswith("thermal_zone0 is at 40.0 C")


def test_no_zone_asks_for_nothing_and_says_so(tmp_path: Path) -> None:
    source = ThermalZones(tmp_path / "absent", Hysteresis(85, 75, again=1))
    assert source.read() == Pressure(
        "thermal", 0, f"{tmp_path}/absent has no thermal zone that can be read"
    )
    zone(tmp_path / "absent", 0, "99000")
    assert source.read().steps == 1
    (tmp_path / "absent" / "thermal_zone0" / "temp").unlink()
    assert source.read().steps == 0


def test_processors_that_are_wanted_by_others(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "cpu"
    source = CpuPressure(path, Hysteresis(50, 20, again=1, dwell=5, most=2, clock=clock))
    with pytest.raises(OSError, match="cpu"):
        source.read()

    def said(some: float) -> int:
        rest = "avg60=99.00 avg300=99.00 total=123"
        path.write_text(f"full avg10=99.00 {rest}\nsome avg10={some:.2f} {rest}\n")
        clock.now += 5
        return source.read().steps

    assert [said(v) for v in (49.99, 50.01, 60, 70, 30, 19.99, 0, 0)] == [0, 1, 2, 2, 2, 1, 0, 0]
    said(61.25)
    assert source.read() == Pressure(
        "cpu", 1, "work waits for a cpu 61.2% of time (high above 50, low below 20)"
    )
    for text in ("", "\n", "some\n", "some avg10=x", "full avg10=99.00", "some avg60=99.00"):
        path.write_text(text)
        assert source.read() == Pressure("cpu", 0, f"{path} has no `some avg10`")


def test_a_battery_that_runs_out_asks_for_less(tmp_path: Path) -> None:
    clock = Clock()
    source = Battery(tmp_path, Hysteresis(-20, -40, again=1, dwell=5, most=2, clock=clock))

    def supply(name: str, kind: str, status: str, capacity: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        for file, text in (("type", kind), ("status", status), ("capacity", capacity)):
            (tmp_path / name / file).write_text(f"{text}\n")

    def said(capacity: str, status: str = "Discharging") -> int:
        supply("BAT0", "Battery", status, capacity)
        clock.now += 5
        return source.read().steps

    supply("AC", "Mains", "Discharging", "1")
    supply("BAT1", "Battery", "Full", "2")
    assert source.read() == Pressure(
        "battery", 0, f"{tmp_path} has no battery that is being drained"
    )
    assert [said(v) for v in ("90", "20", "19", "15", "9", "30", "41", "50")] == [
        0, 0, 1, 2, 2, 2, 1, 0,
    ]  # fmt: skip
    assert said("10") == 1
    assert source.read().reason == "BAT0 is at 10% (low below 20, full above 40)"
    assert said("10", "Charging") == 0
    assert said("no number") == 0


def test_ceilings_are_kept_by_source() -> None:
    signals = Signals()
    assert signals.post(Pressure("load", 0, "much", ceiling="med"))
    assert not signals.post(Pressure("load", 0, "much", ceiling="med"))
    assert signals.post(Pressure("other", 2, "hot", ceiling="small"))
    assert signals.asked == Asked(2, ("hot", "much"), (("small", "hot"), ("med", "much")))
    assert signals.post(Pressure("load", 0, "none"))
    assert signals.post(Pressure("other", 0, "none"))
    assert signals.asked == Asked(0, ())


def test_what_the_kernel_offers_here_can_be_watched() -> None:
    sources: list[Source] = [ThermalZones(), CpuPressure()]
    signals = Signals()
    with signals.watching(sources[0]), signals.watching(sources[1]):
        assert len(watchers()) == 2
    assert not watchers()
