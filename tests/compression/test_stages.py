"""Stages: made once, kept by what they were made from, gone on with after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from t3c.compression.stages import RESULT, Stages
from t3c.errors import DataError
from t3c.files import locked


def test_a_stage_is_made_once_and_again_when_its_inputs_change(tmp_path: Path) -> None:
    calls: list[Path] = []

    def make(folder: Path) -> dict[str, Any]:
        calls.append(folder)
        return {"found": len(calls)}

    stages = Stages(tmp_path)
    first = stages.run("a", {"x": 1, "y": (2, 3)}, make)
    again = stages.run("a", {"y": (2, 3), "x": 1}, make)
    assert again == first
    assert first.result["found"] == 1
    other = stages.run("a", {"x": 2, "y": (2, 3)}, make)
    assert other.result["found"] == 2
    assert other.key != first.key
    assert stages.run("b", {"x": 1, "y": (2, 3)}, make).key != first.key
    assert calls[:2] == [first.folder, other.folder]
    assert len(calls) == 3


def test_a_stage_that_was_stopped_finds_its_folder_again(tmp_path: Path) -> None:
    def stopped(folder: Path) -> dict[str, Any]:
        (folder / "half").write_text("kept")
        raise KeyboardInterrupt

    stages = Stages(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        stages.run("a", {}, stopped)
    done = stages.run("a", {}, lambda folder: {"half": (folder / "half").read_text()})
    assert done.result["half"] == "kept"


def test_two_writers_and_broken_results_are_refused(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    done = stages.run("a", {}, lambda folder: {})
    (done.folder / RESULT).write_text("{")
    with pytest.raises(DataError, match="remove it to make it again"):
        stages.run("a", {}, lambda folder: {})
    (done.folder / RESULT).unlink()
    with locked(done.folder), pytest.raises(DataError):
        stages.run("a", {}, lambda folder: {})
    assert not (done.folder / RESULT).exists()


def test_what_was_recorded_is_taken_over(tmp_path: Path) -> None:
    stages = Stages(tmp_path, recorded={"a": {"found": 7}})
    found = stages.decide("a", {}, lambda folder: pytest.fail("it was measured again"))
    assert found.result["found"] == 7
    assert stages.decide("b", {}, lambda folder: {"found": 8}).result["found"] == 8
