"""A demo that is killed without warning goes on where it was, and ends as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from t3c.cli import main
from t3c.compression.stages import RESULT

TESTS = Path(__file__).parents[1]

# The demo on a tiny network; it kills itself where it says something that begins with argument 2.
DEMO = """
import os, signal, sys
import pytest
from test_door import hurried
from t3c.cli import main
from t3c.progress import Show
from t3c.zoo import demo

hurried(pytest.MonkeyPatch())
demo.EPOCHS, demo.DEPTH, demo.STRIDES = 1, 1, (2, 2, 2, 1)
demo.DigitsNet.__init__.__defaults__ = ((8, 16, 16), 1, (2, 1, 2, 1))
out, last = sys.argv[1:]
say = Show.say

def fatal(show, text):
    say(show, text)
    if last and text.startswith(last):
        os.kill(os.getpid(), signal.SIGKILL)

Show.say = fatal
sys.argv = ["t3c", "demo", "--out", out, "--json"]
main()
"""


def demo(out: Path, last: str = "") -> CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS), str(TESTS / "compression"), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", DEMO, str(out), last],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


STAGES = [
    "answers", "base", "choose", "convert", "int8", "order", "probe", "round", "teacher", "time",
    "widths",
]  # fmt: skip


def names_of(finished: dict[Path, int]) -> list[str]:
    return sorted(path.parent.name.rpartition("-")[0] for path in finished)


def results(out: Path) -> dict[Path, int]:
    """When each finished stage was finished."""
    return {path: path.stat().st_mtime_ns for path in out.rglob(f"*-*/{RESULT}")}


def test_no_finished_stage_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before: dict[Path, int] = {}
    for last, stages in (
        ("base", []), ("train", STAGES), ("certifying", sorted([*STAGES, "train", "place"]))
    ):  # fmt: skip
        killed = demo(tmp_path, last)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not (tmp_path / "digits.t3c").exists()
        now = results(tmp_path)
        assert now.items() >= before.items()
        assert names_of(now) == stages
        before = now
    done = demo(tmp_path)
    assert done.returncode == 0, done.stderr
    now = results(tmp_path)
    assert now.items() >= before.items()
    told = [line.strip().split("  ", 1)[-1] for line in done.stderr.splitlines()]
    for name in names_of(before):
        assert f"{name} is done" in told
        assert name not in told
    table = json.loads(done.stdout)
    assert table.keys() == {"device", "variants", "monotone", "artifact"}
    names = [variant["name"] for variant in table["variants"]]
    assert names[:2] == ["full", "ptq8"]
    assert names[-1] == "t3c-max"
    assert {variant["samples"] for variant in table["variants"]} == {500}
    artifact = tmp_path / "digits.t3c"
    monkeypatch.setattr(sys, "argv", ["t3c", "inspect", str(artifact), "--verify"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code in (0, None)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    again = demo(tmp_path)
    assert json.loads(again.stdout) == table
    assert results(tmp_path) == now
