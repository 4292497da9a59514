from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from t3c.errors import DisturbedError, SpecError
from t3c.measure.quiet import (
    STAT,
    Conditions,
    Quiet,
    Reading,
    Verdict,
    combined,
    core_times,
    read_machine,
    settle,
    slowdown,
)

BUSY_LOOP = "print('on', flush=True)\nwhile True: pass"


def judged(
    busy: float | None,
    own: float = 0.0,
    stolen: float = 0.0,
    seconds: float = 1.0,
    slower: float | None = None,
) -> Verdict:
    """The verdict on a stretch in which these seconds were counted."""
    start = Reading(wall=50.0, own=7.0, busy=900.0 if busy is not None else None, stolen=3.0)
    end = None if busy is None else 900.0 + busy
    quiet = Quiet(read=lambda: Reading(50.0 + seconds, 7.0 + own, end, 3.0 + stolen))
    return quiet.judge(start, slower)


def test_what_others_use_disturbs() -> None:
    found = judged(busy=0.98)
    assert found.disturbed
    assert found.foreign == pytest.approx(0.98)
    assert found.reason == "other processes used 0.98 of a core"
    assert judged(busy=3.0, seconds=2.0).reason == "other processes used 1.50 cores"
    assert not judged(busy=0.1).disturbed


def test_ones_own_threads_do_not() -> None:
    assert judged(busy=4.05, own=4.0).foreign == pytest.approx(0.05)
    assert not judged(busy=4.05, own=4.0).disturbed
    # The system counts in ticks, the process exactly: less than nothing is nothing.
    assert judged(busy=3.97, own=4.0) == Verdict(False, 0.0)


def test_stolen_time_is_named() -> None:
    found = judged(busy=1.4, own=1.0, stolen=0.35)
    assert found.disturbed
    assert found.reason == "the host of this machine used 0.40 of a core"


def test_a_tick_is_no_disturbance() -> None:
    for seconds in (0.1, 0.25, 1.0):
        edge = 0.15 * seconds
        assert not judged(busy=edge + 0.009, seconds=seconds).disturbed
        assert judged(busy=edge + 0.011, seconds=seconds).disturbed
    assert judged(busy=0.05, seconds=0.05) == Verdict(False, None)


def test_slowness_is_a_sign_of_its_own() -> None:
    assert judged(busy=None) == Verdict(False, None)
    assert not judged(busy=None, slower=1.14).disturbed
    found = judged(busy=None, slower=1.16)
    assert found == Verdict(True, None, "all that is measured ran 1.16 times slower")
    assert judged(busy=0.1, slower=2.0).foreign == pytest.approx(0.1)


def test_slowdown_is_of_all_candidates() -> None:
    earlier = [{"a": [1.0] * 9, "b": [10.0] * 9, "c": [5.0] * 9}] * 2
    assert slowdown({"a": [1.3] * 9, "b": [13.0] * 9, "c": [5.0] * 9}, earlier) == pytest.approx(
        1.3
    )
    assert slowdown({"a": [9.0] * 9, "b": [10.0] * 9, "c": [5.0] * 9}, earlier) == 1
    assert slowdown({"a": [9.0], "b": [90.0], "c": [9.0]}, earlier) is None
    assert slowdown({"a": [9.0] * 9}, []) is None
    assert slowdown({}, [{}]) is None


def test_conditions_are_of_what_was_kept() -> None:
    paused: list[float] = []
    quiet = Quiet(retries=2, refuse=False, sleep=paused.append)
    assert quiet.conditions == Conditions(None, 0, False, "")
    assert quiet.keeps(Verdict(False, 0.02), 0)
    assert quiet.keeps(Verdict(False, None), 0)
    assert not quiet.keeps(Verdict(True, 0.9, "first"), 0)
    assert not quiet.keeps(Verdict(True, 0.9, "second"), 1)
    assert paused == [0.2, 0.4]
    assert quiet.conditions == Conditions(0.02, 2, False, "")
    assert quiet.keeps(Verdict(True, 0.5, "third"), 2)
    assert quiet.conditions == Conditions(0.5, 2, True, "third")


def test_impossible_limits_are_refused() -> None:
    for wrong in ({"most_foreign": -0.1}, {"retries": -1}, {"most_slowdown": 0.9}):
        with pytest.raises(SpecError):
            Quiet(**wrong)


def machine(*foreign: float) -> Quiet:
    """A machine on which others use these shares of a core, one after each pause."""
    now, busy, shares = 0.0, 0.0, iter(foreign)

    def sleep(seconds: float) -> None:
        nonlocal now, busy
        now += seconds
        busy += seconds * next(shares)

    return Quiet(read=lambda: Reading(now, 0.0, busy), sleep=sleep)


def test_a_busy_machine_is_refused_before_the_start() -> None:
    settle(machine(0.0))
    settle(machine(0.98, 0.98, 0.0))
    with pytest.raises(DisturbedError, match=r"^the machine is busy: .* 0\.98 of a core: .*--busy"):
        settle(machine(0.98, 0.98, 0.98))
    busy = machine(0.98, 0.98, 0.98)
    busy.refuse = False
    settle(busy)


def test_times_are_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  100 20 30 4000 500 6 7 80 900 10\n"
        "cpu0 100 0 0 7 7 0 0 0 0 0\n"
        "intr 5 0\n\n"
        "cpu1 3 4 5 6\n"
    )
    assert core_times(stat) == {"cpu": (2.43, 0.8), "cpu0": (1.0, 0.0), "cpu1": (0.12, 0.0)}
    stat.write_text("cpu  0 0 0 0 0 0 0 0 0 0\n")
    assert core_times(stat) == {}
    assert core_times(tmp_path / "missing") == {}
    monkeypatch.setattr("t3c.measure.quiet.core_times", dict)
    assert read_machine().busy is None


needs_stat = pytest.mark.skipif(not STAT.exists(), reason="the system has no /proc/stat")


@needs_stat
def test_a_busy_process_is_noticed() -> None:
    command = [sys.executable, "-c", BUSY_LOOP]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            process.stdout.readline()
            quiet = Quiet()
            start = quiet.read()
            time.sleep(1.0)
            found = quiet.judge(start)
        finally:
            process.kill()
    assert found.disturbed
    assert found.foreign is not None
    assert found.foreign > 0.4


@needs_stat
def test_work_of_ones_own_threads_is_ones_own() -> None:
    # Hashing large buffers releases the lock, so that several threads run at once.
    code = (
        "import hashlib, threading, time\n"
        "from t3c.measure.quiet import Conditions, Verdict, combined, read_machine\n"
        "end = time.perf_counter() + 0.6\n"
        "def work():\n"
        "    while time.perf_counter() < end: hashlib.sha256(bytes(1 << 20))\n"
        "threads = [threading.Thread(target=work) for _ in range(2)]\n"
        "start = read_machine()\n"
        "cpu = time.process_time()\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "cpu = time.process_time() - cpu\n"
        "print(read_machine().own - start.own, cpu)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    own, cpu = map(float, out.stdout.split())
    assert own == pytest.approx(cpu, abs=0.03)


def test_a_machine_that_is_slower_of_itself_is_kept_and_later_load_still_repeated() -> None:
    quiet = Quiet(retries=2, sleep=lambda seconds: None)
    slow = Verdict(True, 0.01, "all that is measured ran 1.30 times slower")
    loaded = Verdict(True, 0.9, "other processes used 0.90 of a core", by_others=True)
    assert [quiet.keeps(slow, repeated) for repeated in (0, 1, 2)] == [False, False, True]
    assert quiet.conditions.disturbed
    assert not quiet.keeps(loaded, 0)  # thrown away and repeated, not refused at once
    with pytest.raises(DisturbedError, match=r"0\.90 of a core, after 2 repeats"):
        quiet.keeps(loaded, 2)
    unknown = Verdict(True, None, "all that is measured ran 1.30 times slower")
    with pytest.raises(DisturbedError):
        quiet.keeps(unknown, 2)


def test_conditions_of_a_run_taken_up_again_are_those_of_both_parts() -> None:
    first, second = Conditions(0.1, 2, True, "load"), Conditions(None, 3, False, "")
    assert combined(first, second) == Conditions(0.1, 5, True, "load")
    assert combined(None, second) == second
