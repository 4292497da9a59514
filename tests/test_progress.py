"""What is told of long work: one display at a time, on stderr alone, and nothing where silenced."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from t3c import progress
from t3c.progress import Show, clock, showing


class Clock:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_log_has_stages_and_now_and_then_a_line(
    time: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with showing() as show:
        show.say("packing")
        for step in range(1, 101):
            time.now += 1
            show.watch("training", step, 100)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "  0:00  packing",
        "  0:20    training, 20 of 100, 1:20 left",
        "  0:40    training, 40 of 100, 1:00 left",
        "  1:00    training, 60 of 100, 0:40 left",
        "  1:20    training, 80 of 100, 0:20 left",
        "  1:40    training, 100 of 100, 0:00 left",
    ]


def test_time_left_is_of_the_piece_at_hand(time: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with showing() as show:
        for step in range(3):
            show.watch("slow", step, 3)
            time.now += 100
        show.watch("fast", 0, 50)
        time.now += 25
        show.watch("fast", 5, 50)
    lines = capsys.readouterr().err.splitlines()
    assert "slow, 1 of 3, 3:20 left" in lines[0]
    assert lines[-2:] == ["  5:00    fast, 0 of 50", "  5:25    fast, 5 of 50, 3:45 left"]


def test_what_is_opened_within_speaks_through_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with showing() as outer:
        with showing() as inner:
            assert inner is outer
        with showing(False) as silent, showing() as within:
            assert within is silent
            within.say("not told")
        outer.say("told")
    with showing() as after:
        assert after is not outer
    assert capsys.readouterr().err == "  0:00  told\n"


def test_silenced_work_silences_what_it_calls(capsys: pytest.CaptureFixture[str]) -> None:
    with showing(False), showing() as show:
        show.say("not told")
        show.watch("not told", 1, 2)
    assert capsys.readouterr().err == ""


def test_what_was_stopped_leaves_nothing_open() -> None:
    with pytest.raises(KeyError), showing(False):
        raise KeyError
    with showing() as after:
        assert after.enabled


def test_a_terminal_has_a_bar_and_stdout_nothing() -> None:
    code = (
        "from t3c.progress import showing\n"
        "with showing() as show:\n"
        "    show.say('packing')\n"
        "    show.watch('training', 1, 2)\n"
        "    show._bar.refresh()\n"
    )
    mine, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, check=True
    )
    os.close(theirs)
    told = os.read(mine, 65536).decode()
    os.close(mine)
    assert done.stdout == b""
    assert "0:00  packing" in told
    assert "training" in told
    assert "━" in told


def test_minutes_and_seconds() -> None:
    assert clock(125.7) == "  2:05"
    assert not Show(False).enabled
