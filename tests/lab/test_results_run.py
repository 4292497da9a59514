"""A spec carried out on a small network: its stages, its tables, what it refuses."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from conftest import LIGHT, quick, supply_times
from lab import diagnostics, results
from lab.baselines import Task
from lab.fingerprints import fingerprint
from lab.results import ARTIFACT, Limits, Results, ResultsSpec, load_results
from lab.zoo.bases import base_network
from t3c.artifact.reader import Artifact
from t3c.compression.stages import Stage, Stages
from t3c.convert import ElasticConfig
from t3c.engines.openvino import OpenVINO
from t3c.errors import DataError, SpecError
from t3c.exporter import ExportConfig
from t3c.spec import Goal
from t3c.train import TrainConfig
from t3c.zoo import subjects
from t3c.zoo.digits import CLASSES, IMAGE, Digits
from t3c.zoo.recipe import Recipe
from t3c.zoo.subjects import Subject

SPECS = Path(__file__).parents[2] / "configs" / "results"
PAPER = {
    "ptq8", "ptq4", "qat8", "mpqat", "magprune", "moveprune", "lrft", "loracomp", "sparsegpt",
    "kdptq",
}  # fmt: skip
TEXT = {"ptq8", "ptq8w", "ptq4", "lrft", "loracomp", "sparsegpt", "kdptq"}
SPEC = ResultsSpec(
    recipe=Recipe(
        "digits", batch=16, samples=32,
        elastic=ElasticConfig(bits=(4, 8), rank_fractions=(0.5,), store_ratio=1.0),
        train=TrainConfig(steps=2, goal=Goal(profiles=3, worst_drift=9.0)),
        export=ExportConfig(
            threads=1, goal=Goal(profiles=3, worst_drift=9.0), timing=quick(2), certificate=LIGHT
        ),
    ),
    methods=("ptq8", "lrft"), limits=Limits(0.5, 9.0, 9.0), minutes=0.001, calibrated=8,
    rounds=2, ablated=40,
)  # fmt: skip
TASK = Task(b"", np.zeros((8, 1, 32, 32), dtype=np.float32), OpenVINO(1))


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_specs_name_every_baseline_of_the_paper(path: Path) -> None:
    spec = load_results(path)
    assert set(spec.methods) == (
        TEXT if spec.recipe.subject in ("minilm", "stories15m") else {*PAPER, "ptq8w"}
    )


def test_specs_that_cannot_be() -> None:
    with pytest.raises(SpecError, match="no method 'ptq9'"):
        replace(SPEC, methods=("ptq8", "ptq9"))
    with pytest.raises(SpecError, match="ptq8 has to be among"):
        replace(SPEC, methods=("lrft",))
    with pytest.raises(SpecError, match="no export"):
        replace(SPEC, recipe=replace(SPEC.recipe, export=None))
    with pytest.raises(SpecError, match="minutes must be positive"):
        replace(SPEC, minutes=0.0)


@pytest.fixture(scope="module")
def small(digits: Digits, trained: torch.nn.Module) -> Subject:
    images, labels = digits.train
    test = (digits.test[0][:60], digits.test[1][:60])
    return Subject(
        "digits", trained, (images[:64], labels[:64]), (images[64:80], labels[64:80]),
        digits.calibration[0], test, IMAGE, CLASSES,
    )  # fmt: skip


def test_one_artifact_beside_baselines(
    tmp_path: Path, small: Subject, monkeypatch: pytest.MonkeyPatch, briefly: None
) -> None:
    supply_times(monkeypatch)
    monkeypatch.setitem(subjects.SUBJECTS, "digits", lambda: replace_model(small))
    monkeypatch.setattr(diagnostics, "DEVICES", (("openvino", 1),))
    said: list[str] = []
    timing, timed = sys.modules["t3c.exporter.timing"], list[object]()
    count = timing.time_layers

    def counting(*args: object, **kwargs: object) -> object:
        timed.append(args)
        return count(*args, **kwargs)

    monkeypatch.setattr(timing, "time_layers", counting)
    tables = Results(SPEC, tmp_path, said.append, lambda *_: None).tables()
    assert len(timed) == 1  # what it was trained for is what it is exported for
    rows = {row["name"]: row for row in tables["results"]}
    assert list(rows)[:3] == ["full", "ptq8", "lrft"]
    profiles = [name for name in rows if name.startswith("t3c-")]
    assert profiles[-1] == "t3c-max"
    assert all(row["samples"] == 60 for row in rows.values())
    assert rows["ptq8"]["to_ptq8"] == rows["ptq8"]["size_to_ptq8"] == 1.0
    assert rows["full"]["drop"] == rows["full"]["drift"] == 0.0
    assert rows["ptq8"]["size_mb"] < 0.6 * rows["full"]["size_mb"]
    assert rows["ptq8"]["steps"] == 0
    assert rows["lrft"]["steps"] > 0
    assert rows[profiles[0]]["size_mb"] < rows["t3c-max"]["size_mb"]
    assert rows["t3c-max"]["epsilon"] > 0
    assert {row["variant"] for row in tables["ablations"]} >= {"joint", "rank-only", "bit-only"}
    assert {row["name"] for row in tables["certificates"]} == {n[4:] for n in profiles}

    made = next(tmp_path.glob("t3c-*")) / ARTIFACT
    before = Artifact(made).content
    for name in (
        "train_recipe",
        "export_subject",
        "compare",
        "ablation_rows",
    ):  # all is there already
        monkeypatch.setattr(results, name, None)
    monkeypatch.setattr(results, "BASELINES", {})
    assert Results(SPEC, tmp_path, said.append, lambda *_: None).tables() == tables
    assert Artifact(made).content == before


def test_a_change_makes_the_stages_that_it_concerns(
    tmp_path: Path, small: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(subjects.SUBJECTS, "digits", lambda: replace_model(small))
    asked: list[str] = []

    def run(stages: Stages, name: str, made_from: object, make: object) -> Stage:
        key = f"{name} {json.dumps(made_from, sort_keys=True, default=repr)}"
        asked.append(key)
        return Stage(tmp_path / name, key, {"rows": [], "seconds": 0.0})

    monkeypatch.setattr(Stages, "run", run)
    monkeypatch.setattr(Results, "task", lambda self, made: TASK)

    def keys(spec: ResultsSpec) -> dict[str, str]:
        asked.clear()
        Results(spec, tmp_path, lambda _: None, lambda *_: None).tables()
        return {key.split()[0]: key for key in asked}

    def changed(spec: ResultsSpec) -> set[str]:
        after = keys(spec)
        return {name for name in before if after[name] != before[name]}

    before = keys(SPEC)
    everything = {"train-3407", "t3c-3407", "ablations", "ptq8", "lrft", "measured"}
    assert set(before) == everything
    assert changed(SPEC) == set()
    assert changed(replace(SPEC, rounds=3)) == {"measured"}
    assert changed(replace(SPEC, ablated=20)) == {"ablations"}
    assert changed(replace(SPEC, minutes=0.002)) == {"lrft", "measured"}
    assert changed(replace(SPEC, options={"lrft": {"rank": 0.4}})) == {"lrft", "measured"}
    export = replace(SPEC.export, goal=Goal(profiles=3, worst_drift=8.0))
    other = replace(SPEC, recipe=replace(SPEC.recipe, export=export))
    assert changed(other) == {"t3c-3407", "ablations", "measured"}
    steps = replace(SPEC.recipe, train=replace(SPEC.recipe.train, steps=3))
    assert changed(replace(SPEC, recipe=steps)) == everything - {"ptq8", "lrft"}
    less = replace(small, calibration=small.calibration[1:])
    monkeypatch.setitem(subjects.SUBJECTS, "digits", lambda: replace_model(less))
    assert changed(SPEC) == everything


def replace_model(subject: Subject) -> Subject:
    """The subject with a copy of its model: a run makes it elastic in place."""
    return replace(subject, model=copy.deepcopy(subject.model))


def test_other_weights_are_another_original(small: Subject) -> None:
    mine = replace_model(small)
    before = fingerprint(mine.model)
    assert before == fingerprint(small.model)
    with torch.no_grad():
        next(mine.model.parameters()).view(-1)[0] += 1e-3
    assert fingerprint(mine.model) != before
    same = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    other = nn.Sequential(same[0], nn.GELU())  # the same values, another function
    assert fingerprint(same) != fingerprint(other)


def test_weights_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("T3C_BASE", str(tmp_path))
    with pytest.raises(DataError, match=r"benchmarks/base.py cifar10-cnn"):
        base_network("cifar10-cnn")
