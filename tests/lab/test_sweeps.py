"""Sweeps: the grid of a recipe, trained once a point, and ranked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lab import sweeps
from lab.sweeps import SCORE, Sweep, SweepRow, folder_of, load_sweep, run_sweep, score
from small_recipe import RECIPE, StopError
from sweep import main
from t3c.errors import DataError, SpecError
from t3c.train import TrainConfig, loop
from t3c.zoo.recipe import Recipe
from t3c.zoo.subjects import Subject
from t3c.zoo.training import Trained

CONFIGS = Path(__file__).parents[2] / "configs"
GRID = Sweep({"learning_rate": [1e-3, 0.1], "elastic.rank_caps.convolution": [0.5]}, (1, 2))
SHORT = replace(RECIPE, train=replace(RECIPE.train, steps=2))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every second step, and validate once."""
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(loop, "VALIDATIONS", 1)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("sweeps/*.yaml")), ids=lambda p: p.stem)
def test_every_sweep_that_ships_loads(path: Path) -> None:
    recipe, sweep = load_sweep(CONFIGS / path.name)
    count = math.prod(len(values) for values in sweep.settings.values())
    points = sweep.points(recipe)
    assert len(points) == count * len(sweep.seeds)
    for name, values in sweep.settings.items():
        assert {sweeps._setting(point, name) for point in points} == set(values)


@pytest.mark.parametrize(
    ("name", "rates", "caps"),
    [
        # 1e-3 and 2e-3 by the linear rule, which is for batches of 256: these are of 128.
        ("cifar10-resnet20", {5e-4, 1e-3}, {"convolution": {0.6, 0.8, 1.0}}),
        ("stories15m", {2e-5, 3e-5}, {"projection": {0.5, 0.7}, "linear": {0.6, 0.8}}),
    ],
)
def test_the_papers_grids(name: str, rates: set[float], caps: dict[str, set[float]]) -> None:
    recipe, sweep = load_sweep(CONFIGS / f"{name}.yaml")
    points = sweep.points(recipe)
    assert {p.train.learning_rate for p in points} == rates
    assert {p.train.seed for p in points} == {3407, 2025, 9157}
    for role, shares in caps.items():
        assert {p.elastic.rank_caps[role] for p in points} == shares
    # No cap is without effect: each takes a rank away that the next has.
    fractions = points[0].elastic.rank_fractions
    for low, high in pairwise(sorted(set().union(*caps.values()))):
        assert any(low < fraction <= high for fraction in fractions)


def loaded(folder: Path, text: str, *settings: str) -> tuple[Recipe, Sweep]:
    (folder / "sweeps").mkdir(exist_ok=True)
    (folder / "some.yaml").write_text("subject: digits")
    (folder / "sweeps/some.yaml").write_text(text)
    return load_sweep(folder / "some.yaml", settings)


def test_every_setting_of_a_sweep_is_read(tmp_path: Path) -> None:
    text = "{settings: {steps: [1, 2]}, seeds: [1, 2], drift: 0, slack: 2}"
    _, sweep = loaded(tmp_path, text)
    assert sweep == Sweep({"steps": [1, 2]}, (1, 2), 0.0, 2.0)
    recipe, beside = loaded(tmp_path, text, "batch=4", "learning_rate=0.1")
    assert (recipe.batch, recipe.train.learning_rate, beside) == (4, 0.1, sweep)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seeds: []", "seeds are whole numbers"),
        ("seeds: [1.5]", "seeds.0 should be a valid integer"),
        ("slack: -1", "slack must be at least 0"),
        ("setting: {}", "no setting setting: did you mean settings?"),
        ("settings: {steps: 3}", "settings.steps should be"),
        ("settings: {steps: []}", "settings.steps is a list of values"),
        ("settings: {steps: [x]}", "train.steps should be a valid integer"),
        ("settings: {seed: [1]}", "settings has no seed"),
        ("settings: {stepz: [1]}", "train.stepz: did you mean steps?"),
        ("settings: {elastic.tiles: [1]}", "elastic.tiles: did you mean tile?"),
        ("settings: {weight_decay: [0, 0.0]}", "is there twice"),
        ("seeds: [1, 1]", "is there twice"),
        ("settings: {blocks.steps: [1]}", "blocks is None"),
    ],
)
def test_what_cannot_be(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(SpecError) as caught:
        loaded(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'sweeps/some.yaml'}: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_grid_is_the_product_of_settings_times_seeds() -> None:
    sweep = Sweep({"steps": [1, 2, 3], "elastic.rank_caps.linear": [0.5, 1]}, seeds=(4, 5))
    points = sweep.points(Recipe("digits", batch=8))
    wanted = [(steps, cap, seed) for steps in (1, 2, 3) for cap in (0.5, 1.0) for seed in (4, 5)]
    assert [
        (p.train.steps, p.elastic.rank_caps["linear"], p.train.seed) for p in points
    ] == wanted  # fmt: skip
    assert all(p.batch == 8 for p in points)
    assert [p.train.seed for p in Sweep(seeds=(1, 2)).points(Recipe("digits"))] == [1, 2]


def test_the_script_prints_the_points_best_first(
    subject: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "settings: {learning_rate: [1e-3, 0.5]}"
    loaded(tmp_path, text)
    path, out = tmp_path / "some.yaml", tmp_path / "out"
    path.write_text("subject: digits\nbatch: 16\nsamples: 48\ntrain: {steps: 2}")
    given = [str(path), "--out", str(out)]
    assert main([*given, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    rates = [row["settings"]["learning_rate"] for row in printed["sweep"]]
    assert sorted(rates) == [0.001, 0.5]
    assert printed["out"] == str(out)
    assert all(Path(row["out"]).is_dir() for row in printed["sweep"])
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "best first" in shown
    assert shown.index(f"learning_rate {rates[0]}") < shown.index(f"learning_rate {rates[1]}")
    (tmp_path / "sweeps/some.yaml").unlink()
    assert main(given) == 2
    assert f"error: {path} has no sweep" in capsys.readouterr().err


def swept(sweep: Sweep, out: Path, recipe: Recipe = SHORT) -> list[SweepRow]:
    return run_sweep(recipe, sweep, out, say=lambda _: None, watch=lambda *_: None)


def test_a_sweep_ranks_its_points_and_trains_each_once(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried: list[tuple[float, int]] = []
    real = sweeps.train_recipe

    def counted(point: Recipe, *args: Any, **kwargs: Any) -> Trained:
        carried.append((point.train.learning_rate, point.train.seed))
        if len(carried) == 3:
            raise StopError
        return real(point, *args, **kwargs)

    monkeypatch.setattr(sweeps, "train_recipe", counted)
    with pytest.raises(StopError):
        swept(GRID, tmp_path)
    rows = swept(GRID, tmp_path)
    assert carried == [(1e-3, 1), (1e-3, 2), (0.1, 1), (0.1, 1), (0.1, 2)]
    scores = [row.score for row in rows]
    assert scores == sorted(scores)
    assert len(set(scores)) == 4
    assert {(r.settings["learning_rate"], r.settings["seed"]) for r in rows} == set(carried)
    assert all(r.settings["elastic.rank_caps.convolution"] == 0.5 for r in rows)
    assert swept(GRID, tmp_path) == rows
    # Another rule ranks what was trained already.
    strict = swept(replace(GRID, drift=0.0, slack=9.0), tmp_path)
    for row in strict:
        old = next(r for r in rows if r.settings == row.settings)
        assert row.loss == old.loss
        assert row.score == pytest.approx(row.loss + 9 * row.slack)
        assert row.slack > old.slack
    assert len(carried) == 5
    # Another recipe is trained anew, whatever the sweep's own settings are called.
    swept(replace(GRID, seeds=(1,)), tmp_path, replace(SHORT, batch=8))
    assert len(carried) == 7
    (folder,) = {Path(r.out) for r in rows if r.settings == rows[0].settings}
    (folder / SCORE).write_text("{}")
    with pytest.raises(DataError, match=r"score\.json is not what was written"):
        swept(GRID, tmp_path)


def test_smoothed_labels_do_not_change_what_is_compared(subject: Subject, tmp_path: Path) -> None:
    sweep = Sweep({"label_smoothing": [0.0, 0.5]})
    # The full view is kept and the task is not computed: smoothing trains nothing here.
    rows = swept(sweep, tmp_path)
    assert rows[0].score == pytest.approx(rows[1].score)


def test_no_two_points_share_a_folder(tmp_path: Path) -> None:
    values: list[Any] = [["a/b"], ["a b"], ["a", "b"], ["a, b"], ["../a"], ["x" * 300], ["x" * 301]]
    points = [replace(RECIPE, elastic=replace(RECIPE.elastic, exclude=tuple(v))) for v in values]
    names = [
        folder_of(point, {"elastic.exclude": value})
        for point, value in zip(points, values, strict=True)
    ]
    rates = [1e-3, 1e-3 + 1e-18, 1e-4]
    names += [
        folder_of(replace(RECIPE, train=TrainConfig(learning_rate=rate)), {"learning_rate": rate})
        for rate in rates
    ]
    assert len(set(names)) == len(names)
    for name in names:
        (tmp_path / name).mkdir()  # a plain name: neither too long nor of several parts
        assert (tmp_path / name).resolve().parent == tmp_path.resolve()
    assert names[0] == folder_of(points[0], {"elastic.exclude": values[0]})
    assert "learning_rate=0.001" in names[7]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda v: v, 2.0 + 3 * (0.0 + 0.1 + 0.0) / 3),
        (lambda v: v | {"full/loss": 99.0, "full/drift": 9.0}, 2.1),
        (lambda v: {k: x for k, x in v.items() if k.startswith("max")}, 1.0),
    ],
)
def test_score(change: Callable[[dict[str, float]], dict[str, float]], expected: float) -> None:
    validated = {
        "tiny/loss": 3.0, "tiny/drift": 0.1, "med/loss": 2.0, "med/drift": 0.25,
        "max/loss": 1.0, "max/drift": 0.05,
    }  # fmt: skip
    found = score(change(validated), Sweep(drift=0.15, slack=3.0))
    assert found.score == pytest.approx(expected)
    with pytest.raises(DataError, match="no profile was validated"):
        score({"full/loss": 1.0, "full/drift": 0.0}, Sweep())
