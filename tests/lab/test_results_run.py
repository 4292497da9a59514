"""A spec carried out on a small network: its stages, its tables, what it refuses."""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hurried import hurried
from lab import diagnostics, results, subjects
from lab.baselines import Task
from lab.baselines import rate as rates
from lab.baselines.baseline import Baseline
from lab.fingerprints import fingerprint
from lab.results import ARTIFACT, Results, ResultsSpec, load_results
from lab.zoo.bases import base_network
from t3c.artifact.reader import Artifact
from t3c.compression.data import Data
from t3c.compression.stages import Stage, Stages
from t3c.engines.openvino import OpenVINO
from t3c.errors import DataError, SpecError, TrainError
from t3c.zoo.digits import Digits
from t3c.zoo.settings import build

SPECS = sorted((Path(__file__).parents[2] / "configs" / "results").glob("*.yaml"))
PAPER = {
    "ptq8", "ptq4", "qat8", "mpqat", "magprune", "moveprune", "lrft", "loracomp", "sparsegpt",
    "kdptq",
}  # fmt: skip
TEXT = {"ptq8", "ptq8w", "ptq4", "lrft", "loracomp", "sparsegpt", "kdptq"}
ALLOWED = {"model", "data", "test", "minutes", "seeds", "baselines", "length", "threads"}
SPEC = ResultsSpec("cifar10-cnn", "cifar10/train", "cifar10/test", 1.0, (3407,), ("ptq8", "lrft"))
NETWORK = """
import torch
from safetensors.torch import load_file
from t3c.zoo.digits import DigitsNet

def network():
    model = DigitsNet((16, 32, 64))
    model.load_state_dict(load_file({weights!r}))
    return model, torch.zeros(2, 1, 32, 32)
"""


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_name_every_baseline_of_the_paper(path: Path) -> None:
    text = path.stem in ("minilm", "stories15m")
    assert set(load_results(path).baselines) == (TEXT if text else {*PAPER, "ptq8w"})


def test_a_spec_says_what_is_compared_and_for_how_long_and_nothing_else() -> None:
    assert {field.name for field in fields(ResultsSpec)} == ALLOWED


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "knob",
    ["rank_fractions: [0.5]", "options: {lrft: {rank: 0.4}}", "recipe: {subject: digits}",
     "learning_rate: 1.0e-4", "in_place: true", "limits: {size: 0.4}"],
)  # fmt: skip
def test_the_knob_of_a_method_is_refused_in_one_line(tmp_path: Path, path: Path, knob: str) -> None:
    told = tmp_path / path.name
    told.write_text(f"{path.read_text()}\n{knob}\n")
    with pytest.raises(SpecError) as caught:
        load_results(told)
    assert f"{told}: no setting {knob.partition(':')[0]}: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_specs_that_cannot_be() -> None:
    with pytest.raises(SpecError, match="no baseline 'ptq9'"):
        replace(SPEC, baselines=("ptq8", "ptq9"))
    with pytest.raises(SpecError, match="ptq8 has to be among"):
        replace(SPEC, baselines=("lrft",))
    with pytest.raises(SpecError, match=r"minutes must be at least 1, got 0\.5"):
        replace(SPEC, minutes=0.5)
    with pytest.raises(SpecError, match="there is no seed"):
        replace(SPEC, seeds=())
    with pytest.raises(SpecError, match="there is no test"):
        build(ResultsSpec, {"model": "a", "data": "b", "minutes": 1}, "")


@pytest.fixture(scope="module")
def spec(
    digits: Digits, trained: nn.Module, tmp_path_factory: pytest.TempPathFactory
) -> ResultsSpec:
    """The digits as a user has them: a Python file, arrays to compress with, arrays to test on."""
    folder = tmp_path_factory.mktemp("given")
    save_file(trained.state_dict(), folder / "weights.safetensors")
    told = NETWORK.format(weights=str(folder / "weights.safetensors"))
    (folder / "net.py").write_text(told)
    known = [torch.cat(pair).numpy() for pair in zip(digits.train, digits.calibration, strict=True)]
    np.savez(folder / "data.npz", x=known[0], y=known[1])
    np.savez(folder / "test.npz", x=digits.test[0][:60].numpy(), y=digits.test[1][:60].numpy())
    return ResultsSpec(
        f"{folder}/net.py:network", f"{folder}/data.npz", f"{folder}/test.npz", 1.0, (3407,),
        ("ptq8", "lrft"), threads=1,
    )  # fmt: skip


def run(spec: ResultsSpec, folder: Path) -> dict[str, list[dict[str, Any]]]:
    return Results(spec, folder, lambda text: None, lambda *_: None).tables()


def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that train take a step at one rate, and all is timed a few times."""
    whole = rates.replace

    def stepped(value: Any, **changes: Any) -> Any:
        return whole(value, **changes | ({"steps": 1} if "minutes" in changes else {}))

    hurried(monkeypatch)
    monkeypatch.setattr(rates, "replace", stepped)
    monkeypatch.setattr(rates, "RATES", (1e-5, 1e-4))
    monkeypatch.setattr(results, "ROUNDS", 2)
    monkeypatch.setattr(results, "ABLATED", 40)
    monkeypatch.setattr(diagnostics, "DEVICES", (("openvino", 1),))


def test_one_artifact_beside_baselines(
    tmp_path: Path, spec: ResultsSpec, monkeypatch: pytest.MonkeyPatch, briefly: None
) -> None:
    brief(monkeypatch)
    tables = run(spec, tmp_path)
    rows = {row["name"]: row for row in tables["results"]}
    assert list(rows)[:3] == ["full", "ptq8", "lrft"]
    profiles = [name for name in rows if name.startswith("t3c-")]
    assert profiles[-1] == "t3c-max"
    assert all(row["samples"] == 60 for row in rows.values())
    assert rows["ptq8"]["to_ptq8"] == rows["ptq8"]["size_to_ptq8"] == 1.0
    assert rows["full"]["drop"] == rows["full"]["drift"] == 0.0
    assert rows["ptq8"]["size_mb"] < 0.6 * rows["full"]["size_mb"]
    assert rows["ptq8"]["steps"] == 0
    assert rows["lrft"]["steps"] == 3  # two rates tried, and the best of them
    assert rows["t3c-max"]["epsilon"] > 0
    assert rows["t3c-max"]["minutes"] > 0
    assert {row["variant"] for row in tables["ablations"]} >= {"joint", "rank-only", "bit-only"}
    assert {row["samples"] for row in tables["ablations"]} == {40}
    assert {row["name"] for row in tables["certificates"]} == {n[4:] for n in profiles}

    made = next(tmp_path.glob("t3c-*")) / ARTIFACT
    before = Artifact(made).content
    for name in ("compress", "compare", "ablation_rows", "at_best_rate"):  # all is there already
        monkeypatch.setattr(results, name, None)
    monkeypatch.setattr(results, "BASELINES", {})
    assert run(spec, tmp_path) == tables
    assert Artifact(made).content == before


def test_the_artifact_is_made_through_the_door_with_its_defaults(
    tmp_path: Path, spec: ResultsSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def compress(model: nn.Module | str, data: Any, out: Path, **settings: Any) -> None:
        seen.append({"model": model, "data": data, "out": out, **settings})
        out.mkdir()

    monkeypatch.setattr(results, "compress", compress)
    mine = Results(replace(spec, seeds=(1, 2)), tmp_path, lambda text: None, lambda *_: None)
    for seed in (1, 2, 1):
        mine.artifact(seed)
    assert [given["seed"] for given in seen] == [1, 2]
    for given in seen:
        assert set(given) == {
            "model", "data", "out", "test", "example", "minutes", "length", "engine", "threads",
            "seed",
        }  # fmt: skip
        assert given["minutes"] == spec.minutes
        assert (len(given["data"]), len(given["test"])) == (len(mine.subject.data), 60)
    # What was left of a run that was stopped while it copied the artifact is no obstacle.
    result = next(tmp_path.glob("t3c-1-*")) / "result.json"
    result.unlink()
    mine.artifact(1)
    assert len(seen) == 3


def test_a_change_makes_the_stages_that_it_concerns(
    tmp_path: Path, spec: ResultsSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(stages: Stages, name: str, made_from: object, make: object) -> Stage:
        key = f"{name} {json.dumps(made_from, sort_keys=True, default=repr)}"
        asked.append(key)
        return Stage(tmp_path / name, key, {"rows": [], "seconds": 0.0})

    monkeypatch.setattr(Stages, "run", run)
    task = Task(b"", torch.zeros(8, 1, 32, 32), OpenVINO(1))
    monkeypatch.setattr(Results, "task", lambda self, made: task)

    def keys(spec: ResultsSpec) -> dict[str, str]:
        asked.clear()
        Results(spec, tmp_path, lambda _: None, lambda *_: None).tables()
        return {key.split()[0]: key for key in asked}

    def changed(spec: ResultsSpec) -> set[str]:
        after = keys(spec)
        return {name for name in before if after.get(name) != before[name]}

    before = keys(spec)
    everything = {"t3c-3407", "ablations", "ptq8", "lrft", "measured"}
    assert set(before) == everything
    assert changed(spec) == set()
    assert changed(replace(spec, minutes=2.0)) == everything - {"ptq8"}
    assert changed(replace(spec, seeds=(3407, 1))) == {"measured"}
    fewer = tmp_path / "fewer.npz"
    arrays = np.load(spec.data)
    np.savez(fewer, x=arrays["x"][1:], y=arrays["y"][1:])
    assert changed(replace(spec, data=str(fewer))) == everything


def test_a_method_trains_at_the_rate_that_drifts_least(
    monkeypatch: pytest.MonkeyPatch, spec: ResultsSpec, tmp_path: Path
) -> None:
    subject = Results(spec, tmp_path, lambda _: None, lambda *_: None).subject
    minutes: list[tuple[float, float]] = []

    def method(task: Task, *, learning_rate: float) -> Baseline:
        training = task.trained("lrft")
        minutes.append((learning_rate, training.minutes))
        assert len(training) == len(subject.data) - rates.HELD
        if learning_rate == rates.RATES[-1]:
            raise TrainError("step 1: the loss is not finite: nan")
        return Baseline("lrft", "made", learning_rate, 1, 2, 3.0)  # type: ignore[arg-type]

    drifts = {1e-5: 0.4, 3e-5: 0.2, 1e-4: 0.1, 3e-4: 0.0}
    monkeypatch.setitem(rates.BASELINES, "lrft", method)
    monkeypatch.setattr(rates, "drift_of", lambda made, task, held: drifts[made.model])
    training = results.Training(subject.source.model, subject.data.inputs, 10.0)
    task = Task(b"", subject.data.inputs, OpenVINO(1), training=training)
    made = rates.at_best_rate("lrft", task)
    assert minutes == [*((rate, 0.5) for rate in drifts), (1e-4, 8.0)]
    assert sum(share for _, share in minutes) == training.minutes
    assert made.method == "made, learning rate 0.0001 of 4 tried"
    assert (made.steps, made.seconds) == (8, 12.0)


def test_a_language_model_is_tested_behind_what_was_seen() -> None:
    rows = torch.arange(30 * 11).reshape(30, 11)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subjects, "SEEN", 95)
        patch.setattr(subjects, "TOKENS", 45)
        found = subjects._unseen(Data({"input_ids": rows}), "a text")
        np.testing.assert_array_equal(found.arrays()[0], rows[10:15].numpy())
        with pytest.raises(DataError, match="a text has 100 tokens: 45 behind the first 95"):
            subjects._unseen(Data({"input_ids": rows[:10]}), "a text")


def test_what_is_nowhere_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T3C_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"no-model is neither here nor in T3C_DATA"):
        Results(replace(SPEC, model="no-model"), tmp_path, lambda _: None, lambda *_: None)


def test_other_weights_are_another_original(trained: nn.Module) -> None:
    mine = copy.deepcopy(trained)
    before = fingerprint(mine)
    assert before == fingerprint(trained)
    with torch.no_grad():
        next(mine.parameters()).view(-1)[0] += 1e-3
    assert fingerprint(mine) != before
    same = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    other = nn.Sequential(same[0], nn.GELU())  # the same values, another function
    assert fingerprint(same) != fingerprint(other)


def test_weights_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T3C_BASE", str(tmp_path))
    with pytest.raises(DataError, match=r"benchmarks/base.py cifar10-cnn"):
        base_network("cifar10-cnn")
