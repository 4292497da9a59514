from __future__ import annotations

import json
import math
import os
import sys
import types
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import t3c
from t3c.errors import DataError, TrainError
from t3c.train import record
from t3c.train.record import DataFingerprint, Recorder, run_manifest, write_manifest


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Board:
    """What SummaryWriter is to us."""

    made: list[Board] = []  # noqa: RUF012

    def __init__(self, log_dir: str, purge_step: int | None = None) -> None:
        self.log_dir, self.purge_step = log_dir, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        self.closed = False
        Board.made.append(self)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert not self.closed
        if tag.endswith("full"):
            raise OSError(28, "No space left on device")
        self.scalars.append((tag, value, step))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Board]]:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Board  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    Board.made.clear()
    yield Board.made
    Board.made.clear()


@pytest.fixture
def no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)


def test_every_call_is_a_line_on_disk(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "new" / "run")
    values: dict[str, Any] = {
        "loss": 0.1 + 0.2,
        "rate": np.float32(0.5),
        "bad": math.nan,
        "worse": -math.inf,
    }
    for step in range(3):
        recorder.log(step, "train", values)
        assert len(lines(tmp_path / "new" / "run")) == step + 1
    recorder.log(2, "validation", {"accuracy": 0.25})
    shown = {"loss": 0.1 + 0.2, "rate": 0.5, "bad": None, "worse": None}
    assert lines(tmp_path / "new" / "run") == [
        *({"step": step, "kind": "train", "values": shown} for step in range(3)),
        {"step": 2, "kind": "validation", "values": {"accuracy": 0.25}},
    ]


def test_without_a_folder_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Recorder(None) as recorder:
        recorder.log(0, "train", {"loss": 1.0})
        assert recorder.rewind(0) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_board")
@pytest.mark.parametrize("torn", [b"", b'{"step": 1, "kind": "tra', b'{"step": 1}'])
def test_a_resumed_run_has_each_step_once(tmp_path: Path, torn: bytes) -> None:
    recorder = Recorder(tmp_path)
    for step in range(1, 8):
        recorder.log(step, "train", {"loss": float(step)})
        if step % 2 == 0:
            recorder.log(step, "validation", {"loss": step + 0.5})
    before = lines(tmp_path)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    resumed = Recorder(tmp_path)
    assert lines(tmp_path) == before  # a torn line is gone before another is written after it
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert resumed.rewind(5) == 4 + (torn != b"")
    assert lines(tmp_path) == [line for line in before if line["step"] <= 4]
    for step in range(5, 8):
        resumed.log(step, "train", {"loss": float(step)})
        if step % 2 == 0:
            resumed.log(step, "validation", {"loss": step + 0.5})
    assert lines(tmp_path) == before
    assert resumed.rewind(0) == len(before)
    assert lines(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_rewind_that_fails_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path)
    for step in range(3):
        recorder.log(step, "train", {"loss": 1.0})

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(TrainError, match=r"metrics\.jsonl: cannot be written: No space left"):
            recorder.rewind(0)
    assert len(lines(tmp_path)) == 3
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrainError, match=r"metrics\.jsonl: cannot be written: Is a directory"):
        recorder.log(3, "train", {"loss": 1.0})
    with pytest.raises(TrainError, match="cannot be written"):
        Recorder(tmp_path)


def test_scalars_go_to_tensorboard(tmp_path: Path, boards: list[Board]) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.log(1, "train", {"loss": 2.0, "rate": 0.1})
        recorder.log(2, "train", {"loss": 1.0})
        recorder.log(2, "validation", {"loss": 3.0})
        assert recorder.rewind(2) == 2
        recorder.log(2, "train", {"loss": 1.5})
        recorder.log(3, "train", {"loss": 1.25})
    assert [b.log_dir for b in boards] == [str(tmp_path / "tensorboard")] * 2
    assert [b.purge_step for b in boards] == [None, 2]
    assert all(b.closed for b in boards)
    assert [b.scalars for b in boards] == [
        [("train/loss", 2.0, 1), ("train/rate", 0.1, 1), ("train/loss", 1.0, 2),
         ("validation/loss", 3.0, 2)],
        [("train/loss", 1.5, 2), ("train/loss", 1.25, 3)],
    ]  # fmt: skip
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_tensorboard_is_never_an_error(
    tmp_path: Path, boards: list[Board], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "t3c.train")
    recorder = Recorder(tmp_path)
    recorder.log(0, "train", {"full": 1.0})
    assert "it cannot be written: [Errno 28] No space left on device" in caplog.text
    recorder.log(1, "train", {"loss": 1.0})
    recorder.close()
    assert len(lines(tmp_path)) == 2
    assert [b.scalars for b in boards] == [[]]


@pytest.mark.usefixtures("no_board")
def test_without_tensorboard_installed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "t3c.train")
    with Recorder(tmp_path) as recorder:
        recorder.log(0, "train", {"loss": 1.0})
        recorder.rewind(0)
    assert "no TensorBoard" in caplog.text
    assert "pip install 't3c[train]'" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_manifest_says_what_ran(tmp_path: Path) -> None:
    config = {"train": {"steps": 3, "clip": math.inf}, "loss": "classification", "ranks": (1, 2)}
    seen = DataFingerprint()
    seen.update(torch.ones(2, 3))
    before = datetime.now(UTC) - timedelta(seconds=1)
    manifest = run_manifest(config, {"torch": 3407}, seen.as_json())
    write_manifest(tmp_path / "run", manifest)
    back = json.loads((tmp_path / "run" / "run.json").read_text())
    assert back == manifest
    started = datetime.fromisoformat(back["started"])
    assert started.utcoffset() == timedelta(0)
    assert before <= started <= datetime.now(UTC)
    assert back["config"] == {
        "train": {"steps": 3, "clip": "inf"}, "loss": "classification", "ranks": [1, 2],
    }  # fmt: skip
    assert back["seeds"] == {"torch": 3407}
    assert back["data"] == {"sha256": seen.as_json()["sha256"], "batches": 1, "samples": 2}
    assert back["versions"] == {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__, "numpy": np.__version__, "t3c": t3c.__version__,
    }  # fmt: skip
    assert back["threads"]["torch"] == torch.get_num_threads()
    with pytest.raises(TrainError, match=r"config\.a\[1\] is of set, which JSON has not"):
        run_manifest({"a": [1, {2}]}, {}, {})


def test_the_codes_hash_is_of_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "t3c"
    (package / "train").mkdir(parents=True)
    for name in ("a.py", "b.py", "train/record.py"):
        (package / name).write_text(f"# {name}")
    monkeypatch.setattr(record, "__file__", str(package / "train" / "record.py"))

    def digest() -> str:
        code = run_manifest({}, {}, {})["code"]
        assert code["t3c"] == t3c.__version__
        return str(code["sha256"])

    found = [digest()]
    (package / "notes.txt").write_text("no code")
    assert digest() == found[0]
    (package / "train" / "record.py").write_text("# other")
    found.append(digest())
    (package / "b.py").rename(package / "c.py")
    found.append(digest())
    (package / "d.py").touch()
    found.append(digest())
    assert len(set(found)) == 4


def test_a_manifest_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="cannot be written"):
        write_manifest(tmp_path / "file", {})
    write_manifest(tmp_path, {"a": 1})
    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1}


def digest_of(*batches: Any) -> str:
    found = DataFingerprint()
    for batch in batches:
        found.update(batch)
    return str(found.as_json()["sha256"])


def test_all_of_a_batch_counts() -> None:
    x, y = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 2, 3])
    nudged = x.clone()
    nudged[3, 2] += 1e-6
    different: list[list[Any]] = [
        [], [x], [x, x], [(x,)], [[(x,)]], [(x, y)], [(y, x)], [(x, y), (x, y)], [x, y], [nudged],
        [x.double()], [x.reshape(3, 4)], [x.T], [x[:2], x[2:]], [x.view(torch.int32)], [-0.0 * x],
        [0.0 * x], [{"a": x, "b": y}], [{"b": x, "a": y}], [{"a": x}], [({"a": x}, y)],
        [torch.zeros(0, 3)], [torch.zeros(0, 4)], [torch.tensor(1.0)], [x.bfloat16()], [x > 2],
    ]  # fmt: skip
    found = [digest_of(*batches) for batches in different]
    assert len(set(found)) == len(found)
    assert digest_of((x, y)) == digest_of((x.T.contiguous().T, y.clone())) == digest_of([x, y])
    with pytest.raises(DataError, match="a batch holds tensors, got str"):
        digest_of((x, "label"))
