"""The door: one call from a model and data to an artifact; it goes on where it was stopped."""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import t3c
from hurried import hurried
from t3c.artifact.reader import Artifact
from t3c.cli import main
from t3c.compression import compare, improve, pipeline
from t3c.compression.door import Compressed, compress
from t3c.compression.measure import beyond_int8
from t3c.errors import ArtifactError, DataError, SpecError, T3CError
from t3c.zoo.digits import Digits

NAMES = ("tiny", "small", "med", "large", "max")


def asked(trained: nn.Module, digits: Digits, out: Path, **more: Any) -> Compressed:
    settings: dict[str, Any] = {"minutes": 2, "progress": False, "threads": 1} | more
    return compress(
        copy.deepcopy(trained), [digits.calibration], out, example=digits.train[0][:2],
        test=[digits.test], **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(
    trained: nn.Module, digits: Digits, tmp_path_factory: pytest.TempPathFactory
) -> Compressed:
    with pytest.MonkeyPatch.context() as patch:
        hurried(patch)
        return asked(trained, digits, tmp_path_factory.mktemp("door") / "digits.t3c")


def test_an_artifact_with_its_table_its_report_and_its_record(
    made: Compressed, digits: Digits
) -> None:
    runtime = t3c.load(made.path, threads=1)
    names = [profile.name for profile in runtime.chain]
    assert names == [name for name in NAMES if name in names]
    assert names[-1] == "max"
    answers = runtime(digits.test[0][:100].numpy()).argmax(axis=-1)
    assert (answers == digits.test[1][:100].numpy()).mean() > 0.5
    rows = {variant.name: variant for variant in made.result.variants}
    assert list(rows) == ["full", "ptq8", *(f"t3c-{name}" for name in names)]
    assert {row.samples for row in rows.values()} == {500}
    assert rows["full"].below_full_ci95 is not None
    assert made.path.with_suffix(".html").read_text().count("<figure>") == 3
    record = json.loads((made.path.with_name("digits.t3c.work") / "record.json").read_text())
    assert {row["profile"] for row in record["candidates"]} == {*names, None} or names == ["max"]
    assert sum(record["samples"].values()) >= 1000
    told = [choice["what"] for choice in record["choices"]]
    assert told == [c.what for c in made.choices]
    assert "balance of both factors of a matrix" in told
    assert len(str(made).splitlines()) <= 6


def test_a_max_that_is_worse_than_plain_int8_is_said(made: Compressed) -> None:
    def worse(slower: float, further: float) -> list[str]:
        """What is said where max has int8's time and drift, times these."""
        plain = next(v for v in made.result.variants if v.name == "ptq8")
        assert plain.drift.mean is not None
        p50, p90, p99 = (slower * getattr(plain.latency_ms, name) for name in ("p50", "p90", "p99"))
        times = replace(plain.latency_ms, p50=p50, p90=p90, p99=p99)
        drift = plain.drift.model_copy(update={"mean": further * plain.drift.mean})
        top = plain.model_copy(update={"name": "t3c-max", "latency_ms": times, "drift": drift})
        return beyond_int8(made.result.model_copy(update={"variants": (plain, top)}))

    assert worse(1.02, 1.04) == []
    assert worse(1.5, 1.0) == ["max takes 1.50 of plain int8's time, 1.03 is aimed at"]
    assert [note.split()[1] for note in worse(1.5, 2.0)] == ["takes", "drifts"]


def test_certificates_are_of_samples_that_nothing_else_used(made: Compressed) -> None:
    artifact = Artifact(made.path)
    ledger = artifact.ledger()
    assert ledger is not None
    certified = {
        key for found in ledger.certifications for part in found.keys.values() for key in part
    }
    assert certified
    assert certified.isdisjoint(artifact.manifest.calibrated_on or ())


def test_bench_and_certify_find_what_was_kept(
    made: Compressed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, work = tmp_path / "a.t3c", tmp_path / "a.t3c.work"
    shutil.copytree(made.path, path)

    def told(*arguments: object) -> tuple[int, str, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["t3c", *map(str, arguments)])
            with pytest.raises(SystemExit) as stopped:
                main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err

    code, out, err = told("bench", path, "--json")
    assert (code, out) == (2, "")
    assert err == (
        f"error: {path}: there is no test.npz in {work} or beside the artifact: "
        "give one with --data\n"
    )
    (tmp_path / "calibration.npz").touch()  # what lies beside may have set ranges
    code, out, err = told("certify", path)
    assert (code, out) == (2, "")
    assert err == f"error: {path}: there is no calibration.npz in {work}: give one with --data\n"
    shutil.copytree(made.path.with_name("digits.t3c.work"), work)
    code, out, err = told("bench", path, "--rounds", 3, "--threads", 1, "--json")
    assert code == 0, err
    assert f"· test.npz, calibration.npz, original.onnx: as kept in {work}\n" in err
    rows = {row["name"]: row for row in json.loads(out)["variants"]}
    kept = {row.name: row for row in made.result.variants}
    assert list(rows) == list(kept)
    assert rows["full"]["accuracy"] == kept["full"].accuracy
    code, out, err = told("certify", path, "--threads", 1, "--gain-samples", 2, "--json")
    assert code == 0, err
    assert f"· calibration.npz, original.onnx: as kept in {work}\n" in err
    entries = json.loads(out)["entries"]
    assert [entry["worst_case"] for entry in entries] == [None] * len(entries)


def test_the_ledger_has_the_quality_of_what_placed_nothing(made: Compressed) -> None:
    runtime = t3c.load(made.path, threads=1)
    ledger = runtime.artifact.ledger()
    assert ledger is not None
    assert [row.profile for row in ledger.quality] == [profile.name for profile in runtime.chain]
    record = json.loads((made.path.with_name("digits.t3c.work") / "record.json").read_text())
    data = np.load(made.path.with_name("digits.t3c.work") / "calibration.npz")  # the certificate's
    for row in ledger.quality:
        answers = [runtime(x[None], profile=row.profile).argmax() for x in data["x"]]
        assert row.value == pytest.approx((np.array(answers) == data["y"]).mean())
        assert (row.metric, row.samples) == ("accuracy", record["samples"]["certificate"])
    assert runtime.answer(data["x"][:1], t3c.Budget(max_drop=1)).reason.code == (
        "fastest_within_drop"
    )
    assert "## Quality beside the original" in (made.path / "README.md").read_text()


def test_what_is_done_is_not_done_again(
    made: Compressed, trained: nn.Module, digits: Digits, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    hurried(monkeypatch)
    with pytest.raises(ArtifactError, match=r"digits.t3c exists: name another"):
        asked(trained, digits, made.path)
    kept = made.path.rename(tmp_path / "kept.t3c")
    for module, name in (
        (pipeline, "make_elastic"), (pipeline, "choose_kernels"), (improve, "probe"),
        (pipeline, "find_orders"), (pipeline, "choose_widths"),
        (improve, "teach"), (pipeline, "export"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, refuse(name, getattr(module, name)))
    again = asked(trained, digits, made.path)
    assert Artifact(again.path).content == Artifact(kept).content
    assert again.choices == made.choices


def interrupt(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def refuse(name: str, function: Any) -> Any:
    """A function that fails if it is called, but for the shapes of an elastic model."""
    if name != "make_elastic":
        return lambda *args, **kwargs: pytest.fail(f"{name} was called again")

    def few(model: nn.Module, example: Any, batches: Any, *args: Any, **kwargs: Any) -> Any:
        assert len(batches) == 1
        return function(model, example, batches, *args, **kwargs)

    return few


def test_a_run_that_was_stopped_goes_on(
    trained: nn.Module, digits: Digits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hurried(monkeypatch)
    whole = pipeline.export
    monkeypatch.setattr(pipeline, "export", interrupt)
    with pytest.raises(KeyboardInterrupt):
        asked(trained, digits, tmp_path / "a.t3c")
    assert not (tmp_path / "a.t3c").exists()
    monkeypatch.setattr(pipeline, "export", whole)
    monkeypatch.setattr(improve, "teach", lambda *_: pytest.fail("it was trained again"))
    assert asked(trained, digits, tmp_path / "a.t3c").path.is_dir()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minutes": 0.1}, "minutes must be at least 1, got 0.1"),
        ({"max_drop": 2}, "max_drop must be between 0 and 1"),
        ({"length": 1}, "length must be at least 2 tokens"),
        ({"engine": "abacus"}, "abacus"),
        ({"data": "no/such/folder"}, "no such file or folder"),
        ({"data": []}, "the data is empty"),
        ({"data": [np.zeros((200, 1, 32, 32), np.float32) * np.nan]}, "NaN or infinite"),
        ({"data": [np.zeros((200, 1, 8, 8), np.float32)]}, "the data has inputs of"),
        ({"data": [np.zeros((200, 1, 32, 32), np.float32)]}, "1 different samples are too few"),
    ],
)
def test_what_cannot_be_is_said_in_one_line_and_leaves_nothing(
    trained: nn.Module, digits: Digits, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    settings = {"data": [digits.calibration], "minutes": 2} | change
    data = settings.pop("data")
    with pytest.raises((SpecError, DataError, T3CError), match=message) as caught:
        compress(
            copy.deepcopy(trained), data, tmp_path / "a.t3c", example=digits.train[0][:2],
            progress=False, **settings,
        )  # fmt: skip
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_record_decides_again_and_the_content_is_the_same(
    made: Compressed, trained: nn.Module, digits: Digits, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    hurried(monkeypatch)
    measured = [
        (pipeline, "choose_kernels"), (pipeline, "choose_widths"), (pipeline, "time_points"),
        (improve, "probe"),
    ]  # fmt: skip
    for module, name in (*measured, (compare.Placing, "place")):
        monkeypatch.setattr(module, name, lambda *_, name=name, **__: pytest.fail(name))
    record = made.path.with_name("digits.t3c.work") / "record.json"
    with monkeypatch.context() as stopped:
        stopped.setattr(pipeline, "export", interrupt)
        with pytest.raises(KeyboardInterrupt):
            asked(trained, digits, tmp_path / "again.t3c", replay=record, minutes=3)
    again = asked(trained, digits, tmp_path / "again.t3c", replay=record, minutes=3)
    assert any(choice.what == "training" and choice.taken != "untrained" for choice in made.choices)
    assert Artifact(again.path).content == Artifact(made.path).content
    first, twice = (
        json.loads(path.read_text())["decided"]
        for path in (record, tmp_path / "again.t3c.work" / "record.json")
    )
    for stage in (*first.values(), *twice.values()):
        del stage["seconds"]
    assert twice == first


def test_a_record_of_something_else_is_refused(
    made: Compressed, trained: nn.Module, digits: Digits, tmp_path: Path
) -> None:
    record = made.path.with_name("digits.t3c.work") / "record.json"
    with pytest.raises(DataError, match="was recorded with another seed"):
        asked(trained, digits, tmp_path / "a.t3c", replay=record, seed=1)
    less = json.loads(record.read_text())
    del less["decided"]["time"]
    (tmp_path / "less.json").write_text(json.dumps(less))
    for name, message in (
        ("none.json", "No such file"),
        ("less.json", "no record of a run: decided.time: Field required"),
    ):
        with pytest.raises(DataError, match=message):
            asked(trained, digits, tmp_path / "a.t3c", replay=tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["less.json"]


def test_unlabelled_data_is_judged_by_unchanged_answers(
    trained: nn.Module, digits: Digits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    hurried(monkeypatch)
    made = compress(
        copy.deepcopy(trained), [torch.cat([digits.calibration[0], digits.train[0]])],
        tmp_path / "a.t3c", minutes=2, threads=1,
    )  # fmt: skip
    told = capfd.readouterr()
    assert told.out == ""
    lines = told.err.splitlines()
    assert all(re.match(r" *\d+:\d\d  ", line) for line in lines), told.err
    stages = [line[7:].strip() for line in lines]
    assert stages.count("tracing the model") == 1  # what is called within tells nothing twice
    assert stages[-1].startswith(f"done: {tmp_path / 'a.t3c'}")
    assert {variant.accuracy for variant in made.result.variants} == {None}
    assert made.result.variants[0].agreement == 1.0
