"""A spec carried out on a small network: its stages, its tables, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import LIGHT, quick, supply_times
from t3c.artifact.reader import Artifact
from t3c.convert import ElasticConfig
from t3c.errors import DataError, SpecError
from t3c.experiments import diagnostics, results
from t3c.experiments.recipe import Recipe
from t3c.experiments.results import ARTIFACT, Limits, Results, ResultsSpec, load_results
from t3c.exporter import ExportConfig
from t3c.train import TrainConfig
from t3c.zoo import subjects
from t3c.zoo.digits import CLASSES, IMAGE, Digits
from t3c.zoo.subjects import Subject

SPECS = Path(__file__).parents[2] / "configs" / "results"
PAPER = {
    "ptq8", "ptq4", "qat8", "mpqat", "magprune", "moveprune", "lrft", "loracomp", "sparsegpt",
    "kdptq",
}  # fmt: skip
SPEC = ResultsSpec(
    recipe=Recipe(
        "digits", batch=16, samples=32,
        elastic=ElasticConfig(bits=(4, 8), rank_fractions=(0.5,), store_ratio=1.0),
        train=TrainConfig(steps=2, profiles=3, worst_drift=9.0),
        export=ExportConfig(
            threads=1, profiles=3, worst_drift=9.0, calibration=quick(2), certificate=LIGHT
        ),
    ),
    methods=("ptq8", "lrft"), limits=Limits(0.5, 9.0, 9.0), minutes=0.001, calibrated=8,
    rounds=2, ablated=40,
)  # fmt: skip


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_specs_name_every_baseline_of_the_paper(path: Path) -> None:
    assert set(load_results(path).methods) == PAPER


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
    tables = Results(SPEC, tmp_path, said.append, lambda *_: None).tables()
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
    monkeypatch.setattr(results, "train_recipe", None)  # all that is made is there
    monkeypatch.setattr(results, "BASELINES", {})
    said.clear()
    again = Results(SPEC, tmp_path, said.append, lambda *_: None).tables()
    assert Artifact(made).content == before
    assert sum("is done" in text for text in said) == 3
    for row in again["results"]:
        assert row["accuracy"] == rows[row["name"]]["accuracy"]


def replace_model(subject: Subject) -> Subject:
    """The subject with a copy of its model: a run makes it elastic in place."""
    import copy

    return replace(subject, model=copy.deepcopy(subject.model))


def test_other_weights_are_another_stage(tmp_path: Path, small: Subject) -> None:
    mine = replace_model(small)
    before = results.fingerprint(mine.model)
    assert before == results.fingerprint(small.model)
    with torch.no_grad():
        next(mine.model.parameters()).view(-1)[0] += 1e-3
    assert results.fingerprint(mine.model) != before


def test_weights_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from t3c.zoo.bases import base_network

    monkeypatch.setenv("T3C_BASE", str(tmp_path))
    with pytest.raises(DataError, match=r"benchmarks/base.py cifar10-cnn"):
        base_network("cifar10-cnn")
