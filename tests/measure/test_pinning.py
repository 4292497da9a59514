from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from t3c.artifact.graph import to_onnx
from t3c.engines.openvino import OpenVINO
from t3c.errors import SpecError
from t3c.measure import pinning
from t3c.measure.pinning import choose_cores, pinned

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
needs_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores to choose from")


def test_the_least_busy_cores_are_chosen() -> None:
    busy = {0: 0.0, 1: 0.09, 2: 0.01, 3: 0.1}
    assert choose_cores({0, 1, 2, 3}, 2, busy, {}) == (0, 2)
    assert choose_cores({1, 3}, 1, busy, {}) == (1,)
    assert choose_cores({0, 1, 2}, 1, {}, {}) == (2,)


def test_a_physical_core_is_not_shared_without_need() -> None:
    physical = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}
    busy = {0: 0.0, 1: 0.0, 2: 0.05, 3: 0.06}
    assert choose_cores({0, 1, 2, 3}, 2, busy, physical) == (1, 2)
    assert choose_cores({0, 1, 2, 3}, 3, busy, physical) == (0, 1, 2)


@given(st.data(), st.sets(st.integers(0, 40), min_size=1, max_size=8))
def test_chosen_cores_are_as_many_as_asked_and_allowed(data: st.DataObject, cores: set) -> None:
    threads = data.draw(st.integers(1, len(cores)))
    busy = data.draw(st.dictionaries(st.sampled_from(sorted(cores)), st.floats(0, 1)))
    physical = {core: str(core // 2) for core in cores}
    chosen = choose_cores(cores, threads, busy, physical)
    assert len(set(chosen)) == threads
    assert set(chosen) <= cores
    shared = threads - len({physical[core] for core in chosen})
    assert shared == max(0, threads - len(set(physical.values())))


@needs_cores
def test_threads_started_inside_are_pinned_and_the_caller_is_restored() -> None:
    seen: list[set[int]] = []
    with pinned(1) as cores:
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        assert os.sched_getaffinity(0) == set(cores)
    assert len(cores) == 1
    assert seen == [set(cores)]
    assert os.sched_getaffinity(0) == CORES
    with pytest.raises(KeyError), pinned(1):
        raise KeyError
    assert os.sched_getaffinity(0) == CORES


@needs_cores
def test_nothing_is_done_where_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    with pinned(len(CORES)) as cores:
        assert cores == ()
        assert os.sched_getaffinity(0) == CORES

    def forbidden(pid: int, cores: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    with pinned(1) as cores:
        assert cores == ()
    monkeypatch.delattr(os, "sched_setaffinity")
    with pinned(1) as cores:
        assert cores == ()
    with pytest.raises(SpecError), pinned(0):
        pass


@needs_cores
def test_a_session_that_was_compiled_while_pinned_pins_nobody_afterwards() -> None:
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    graph = to_onnx(nn.Sequential(*layers).eval(), torch.zeros(2, 3, 8, 8))
    x = np.zeros((1, 3, 8, 8), np.float32)
    with pinned(1):
        session = OpenVINO(1).compile(graph)
        session.run([x])
    session.run([x])
    assert os.sched_getaffinity(0) == CORES


@needs_cores
def test_a_busy_core_is_avoided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, *others = sorted(CORES, reverse=True)
    readings = iter([0.0, 0.1])

    def core_times() -> dict[str, tuple[float, float]]:
        quiet = {f"cpu{core}": (5.0, 0.0) for core in others}
        return {"cpu": (99.0, 0.0), f"cpu{first}": (next(readings), 0.0), **quiet}

    monkeypatch.setattr(pinning, "core_times", core_times)
    monkeypatch.setattr(pinning, "CPUS", tmp_path)
    with pinned(1) as cores:
        assert cores == (others[0],)
