"""A recipe carried out on a small network: what it reports, what it keeps, how it goes on."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict, astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import LIGHT, quick
from small_recipe import RECIPE, TESTED, StopError
from t3c.artifact.reader import Artifact
from t3c.convert import elasticize_, settle_, state_of
from t3c.errors import TrainError
from t3c.exporter import ExportConfig
from t3c.nn.inputs import evaluating
from t3c.nn.view import at
from t3c.progress import Show
from t3c.spec import Goal, Profile
from t3c.train import BlockConfig, loop
from t3c.zoo import subjects, training, views
from t3c.zoo.recipe import Recipe
from t3c.zoo.subjects import Subject
from t3c.zoo.training import RESULT, Trained
from t3c.zoo.views import View, paired


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every second step, and validate once."""
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(loop, "VALIDATIONS", 1)


def run(recipe: Recipe, out: Path, *, resume: bool = False, stop_at: int | None = None) -> Trained:
    """Carry a recipe out, or cut it off after a step."""

    def watch(show: Show, what: str, done: int, total: int) -> None:
        if what.startswith("training") and done == stop_at:
            raise StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Show, "watch", watch)
        return training.train_recipe(
            recipe, out, resume=resume, say=lambda _: None, watch=lambda *_: None
        )


def answers(model: nn.Module, profile: Profile | None, inputs: Tensor) -> Tensor:
    with torch.no_grad(), evaluating(model), at(model, profile):
        out: Tensor = model(inputs)
    return out


def interval(a: Tensor, b: Tensor) -> dict[str, float]:
    """Bonett and Price's interval of two shares of the same samples, from their counts."""
    n = len(a)
    won, lost = int((a & ~b).sum()), int((~a & b).sum())
    p, q = (won + 1) / (n + 2), (lost + 1) / (n + 2)
    error = 1.96 * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    return {"difference": (won - lost) / n, "low": p - q - error, "high": p - q + error}


def test_rows_are_what_the_views_answer(subject: Subject, tmp_path: Path) -> None:
    done = run(RECIPE, tmp_path / "a" / "run")
    test, labels = subject.test
    names = [row.name for row in done.rows]
    assert names == [*(p.name for p in done.history.profiles), "full"]
    for key in ("flops", "bytes"):
        taken = [getattr(row, key) for row in done.rows]
        assert taken == sorted(taken)
        assert taken[-1] == 1

    fresh = copy.deepcopy(subject.model)  # a second time from the start, and never trained
    elasticize_(fresh, subject.example, RECIPE.elastic, calibration=subject.statistics)
    original = answers(state_of(fresh).original, None, test)
    rights = []
    for row, profile in zip(done.rows, [*done.history.profiles, None], strict=True):
        now, before = (answers(model, profile, test) for model in (done.model, fresh))
        rights.append(now.argmax(1) == labels)
        for key, out in (("", now), ("untrained_", before)):
            drift = ((out - original).norm(dim=1) / original.norm(dim=1)).mean()
            assert getattr(row, f"{key}drift") == pytest.approx(float(drift), abs=1e-5)
            assert getattr(row, f"{key}loss") == pytest.approx(
                float(F.cross_entropy(out, labels)), abs=1e-4
            )
        assert row.accuracy == pytest.approx(float(rights[-1].float().mean()))
        assert row.untrained == pytest.approx(float((before.argmax(1) == labels).float().mean()))
    assert done.rows[0].loss != done.rows[0].untrained_loss
    for row, mine, above in zip(done.rows, rights, [*rights[1:], None], strict=True):
        assert row.to_full is not None
        assert asdict(row.to_full) == pytest.approx(interval(mine, rights[-1]), abs=1e-4)
        expected = None if above is None else pytest.approx(interval(mine, above), abs=1e-4)
        assert (row.to_next and asdict(row.to_next)) == expected
    assert any(row.to_next and row.to_next.difference for row in done.rows)
    written = json.loads((tmp_path / "a" / "run" / RESULT).read_text())
    assert written == {
        "subject": "small",
        "samples": TESTED,
        "profiles": [asdict(row) for row in done.rows],
    }


def test_paired_intervals() -> None:
    a = View(0, 0, np.array([True, True, True, False]))
    b = View(0, 0, np.array([True, False, False, True]))
    # Two won and one lost of four: of six, with one more of each, 1/6 better and 5/6 changed.
    half = 1.96 * math.sqrt((5 / 6 - 1 / 36) / 6)
    expected = {"difference": 0.25, "low": 1 / 6 - half, "high": 1 / 6 + half}
    found = paired(a, b)
    assert found is not None
    assert asdict(found) == pytest.approx(expected, abs=1e-4)
    # None differs, which does not show that none ever would: 2/6 changed.
    half = 1.96 * math.sqrt(2 / 6 / 6)
    found = paired(a, a)
    assert found is not None
    assert astuple(found) == pytest.approx((0, -half, half), abs=1e-4)
    assert paired(a, View(0, 0, None)) is None


def test_a_loss_of_tokens_has_no_accuracy() -> None:
    tokens = torch.tensor([[0, 1, 2], [2, 1, 0]])
    logits = torch.randn(2, 3, 4)
    view = views.tested(logits, logits, tokens, views.loss_of("language_modelling"))
    assert (view.accuracy, view.drift) == (None, 0)
    values = torch.randn(5)
    view = views.tested(values[:, None], values[:, None], values, views.loss_of("regression"))
    assert (view.accuracy, view.loss) == (None, 0)


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        replace(RECIPE, blocks=BlockConfig(steps=3, batch=16)),
        replace(
            RECIPE, blocks=BlockConfig(steps=3, batch=16),
            train=replace(RECIPE.train, controller="gumbel", curriculum="aimed"),
        ),
    ],
    ids=["plain", "blocks", "blocks and a controller"],
)  # fmt: skip
def test_a_run_that_stopped_goes_on_as_if_it_had_not(
    subject: Subject, tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(recipe, tmp_path / "whole")
    with pytest.raises(StopError):
        run(recipe, tmp_path / "cut", stop_at=3)
    spent = float((tmp_path / "cut" / training.SPENT).read_text())
    monkeypatch.setattr(training, "reconstruct", None)  # once is enough
    again = run(recipe, tmp_path / "cut", resume=True)
    for (name, a), b in zip(
        whole.model.state_dict().items(), again.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    assert (again.history, again.rows) == (whole.history, whole.rows)
    assert 0 < spent < again.seconds
    finished = run(recipe, tmp_path / "cut", resume=True)
    assert finished.rows == whole.rows


def test_blocks_change_where_training_starts_and_nothing_else(
    subject: Subject, tmp_path: Path
) -> None:
    plain = run(RECIPE, tmp_path / "plain")
    recipe = replace(RECIPE, blocks=BlockConfig(steps=6, batch=16))
    blocks = run(recipe, tmp_path / "blocks")
    data = [
        json.loads((tmp_path / name / "run.json").read_text())["data"]
        for name in ("plain", "blocks")
    ]
    assert data[0] == data[1], "the same batches in the same order"
    assert blocks.history.terms["distill"] != plain.history.terms["distill"]
    # Full is kept, so it is the same; and so is every view untrained.
    for mine, other in zip(plain.rows[-1:], blocks.rows[-1:], strict=True):
        assert mine.untrained == other.untrained
        assert mine.untrained_loss == other.untrained_loss
        assert mine.untrained_drift == other.untrained_drift
    (tmp_path / "blocks" / training.RECONSTRUCTED).write_bytes(b"damaged")
    with pytest.raises(TrainError, match="not what the run started from"):
        run(recipe, tmp_path / "blocks", resume=True)


def test_weights_rounded_with_compensation_are_what_is_trained(
    subject: Subject, tmp_path: Path
) -> None:
    with_head = replace(RECIPE, elastic=replace(RECIPE.elastic, min_weights=0))
    plain = run(with_head, tmp_path / "plain")
    recipe = replace(with_head, settle=(2, 4, 8))
    settled = run(recipe, tmp_path / "settled")
    assert [row.untrained_loss for row in settled.rows] != [r.untrained_loss for r in plain.rows]
    assert settled.history.terms["distill"] != plain.history.terms["distill"]
    dense = [dict(done.model.named_parameters())["head.elastic.dense"] for done in (plain, settled)]
    expected = copy.deepcopy(subject.model)
    elasticize_(expected, subject.example, recipe.elastic, calibration=subject.statistics)
    assert settle_(expected, subject.statistics, recipe.settle) == ["head"]
    assert torch.equal(dense[1], dict(expected.named_parameters())["head.elastic.dense"])
    assert not torch.equal(*dense)
    with pytest.raises(TrainError, match="is of another recipe: settle "):
        run(with_head, tmp_path / "settled", resume=True)


def test_a_run_that_is_there_is_left_alone(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(RECIPE, tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    monkeypatch.setitem(subjects.SUBJECTS, "digits", lambda: pytest.fail("nothing is loaded"))
    with pytest.raises(TrainError, match="holds a run already: resume it or name another"):
        run(RECIPE, tmp_path)
    for other in ({"batch": 8}, {"samples": 32}, {"settle": (8,)}, {"blocks": BlockConfig()}):
        name = next(iter(other))
        with pytest.raises(TrainError, match=f"is of another recipe: {name} "):
            run(replace(RECIPE, **other), tmp_path, resume=True)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.usefixtures("known_device", "briefly")
def test_what_is_exported_is_the_trained_network(subject: Subject, tmp_path: Path) -> None:
    export = ExportConfig(
        timing=quick(3), certificate=LIGHT, goal=Goal(profiles=1, worst_drift=2.0)
    )
    run(replace(RECIPE, export=export), tmp_path)
    artifact = Artifact(tmp_path / "small.t3c")
    assert artifact.manifest.profiles[-1].name == "max"
    assert (tmp_path / "original.onnx").is_file()
    assert (tmp_path / RESULT).is_file()
