from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.errors import SpecError
from t3c.measure import memory
from t3c.measure.memory import available, peak_live, peak_rss, reset_peak, rss

Steps = list[tuple[list[str], list[str]]]
NAMES = "abcdef"
names = st.lists(st.sampled_from(NAMES), max_size=3)


def alive_at(at: int, steps: Steps, keep: set[str]) -> set[str]:
    """The tensors alive in a step: written or given by then, and named in it or later."""
    alive = set()
    for name in NAMES:
        reads = [i for i, (inputs, _) in enumerate(steps) if name in inputs]
        writes = [i for i, (_, outputs) in enumerate(steps) if name in outputs]
        given_first = not writes or any(i <= writes[0] for i in reads)
        there = given_first or writes[0] <= at
        wanted = name in keep or any(i >= at for i in reads + writes)
        if (reads or writes or name in keep) and there and wanted:
            alive.add(name)
    return alive


@given(
    st.lists(st.tuples(names, names), max_size=6),
    st.lists(st.integers(0, 100), min_size=len(NAMES), max_size=len(NAMES)),
    st.sets(st.sampled_from(NAMES)),
)
def test_peak_is_that_of_the_fullest_step(steps: Steps, bytes_: list[int], keep: set[str]) -> None:
    sizes = dict(zip(NAMES, bytes_, strict=True))
    moments = [alive_at(at, steps, keep) for at in range(len(steps))] or [keep]
    expected = max(sum(sizes[name] for name in alive) for alive in moments)
    assert peak_live(steps, sizes, keep) == expected


def test_a_chain_holds_two_tensors_and_a_residual_three() -> None:
    sizes = {"x": 10, "a": 20, "b": 30, "y": 5}
    chain = [(["x"], ["a"]), (["a"], ["b"]), (["b"], ["y"])]
    assert peak_live(chain, sizes, ["y"]) == 20 + 30
    residual = [(["x"], ["a"]), (["a"], ["b"]), (["b", "x"], ["y"])]
    assert peak_live(residual, sizes, ["y"]) == 10 + 20 + 30
    assert peak_live(chain, sizes, ["a", "y"]) == 20 + 30 + 5
    with pytest.raises(SpecError, match="a, b"):
        peak_live(chain, {"x": 1, "y": 1})


def test_status_is_read_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t 900 kB\nVmHWM:\t     300 kB\nVmRSS:\t     200 kB\n")
    monkeypatch.setattr(memory, "STATUS", status)
    assert (peak_rss(), rss()) == (300 * 1024, 200 * 1024)
    status.write_text("Name:\tkthread\n")
    assert (peak_rss(), rss()) == (None, None)


def test_elsewhere_memory_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "STATUS", tmp_path / "no" / "status")
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "no" / "clear_refs")
    assert (peak_rss(), rss(), reset_peak()) == (None, None, False)


@pytest.mark.skipif(not memory.STATUS.exists(), reason="the system has no /proc")
def test_the_peak_remembers_what_was_freed_until_it_is_reset() -> None:
    """In a process of its own: in this one others may have let the allocator keep what is freed."""
    done = subprocess.run(
        [sys.executable, "-c", "import test_memory; test_memory.check_peak()"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def check_peak() -> None:
    held_bytes = 256 << 20
    enough = held_bytes // 2  # the kernel counts per processor, off by megabytes each
    before = rss()
    held = np.ones(held_bytes, dtype=np.uint8)
    full = rss()
    del held
    after, peak = rss(), peak_rss()
    assert None not in (before, full, after, peak)
    assert full - before > enough
    assert peak - after > enough
    if reset_peak():
        assert peak_rss() < peak - enough


def test_free_memory_is_what_the_system_says(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable:  40 kB\n")
    assert available(info) == 40 * 1024
    info.write_text("MemTotal: 100 kB\n")
    assert available(info) is None
    assert available(tmp_path / "none") is None
