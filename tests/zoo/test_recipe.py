"""Recipes: every file that ships loads, and what cannot be is one line that says where."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.convert import ElasticConfig
from t3c.errors import DataError, SpecError, T3CError
from t3c.evidence.estimates import EstimateConfig
from t3c.exporter import ExportConfig
from t3c.quant.policy import RankTiedBits
from t3c.spec import Factorization
from t3c.train import BlockConfig, Objective, TrainConfig
from t3c.train.augment import Augmentation
from t3c.train.losses import loss_of
from t3c.zoo.digits import IMAGE
from t3c.zoo.recipe import Recipe, load_recipe
from t3c.zoo.settings import build

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some.yaml"


def loaded(file: Path, text: str, *settings: str) -> Recipe:
    file.write_text(text, encoding="utf-8")
    return load_recipe(file, settings)


def refusal(file: Path, text: str, *settings: str) -> str:
    """What is said of a recipe that cannot be: one line."""
    with pytest.raises(SpecError) as caught:
        loaded(file, text, *settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_there_are_recipes_for_pictures_and_for_language() -> None:
    names = {path.stem for path in CONFIGS}
    assert names >= {"digits", "cifar10-resnet20", "cifar10-resnet56", "stories15m"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_that_ships_loads(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.subject == path.stem
    loss_of(recipe.train.loss, recipe.train.label_smoothing)
    Augmentation(recipe.train.augmentations, IMAGE)
    if recipe.subject == "stories15m":
        assert recipe.train.loss == "language_modelling"
        assert recipe.train.objective.augment == 0, "tokens have no augmentation without a mask"


def test_defaults_and_empty_sections(file: Path) -> None:
    text = "subject: digits\nelastic:\ntrain:\nblocks:\nexport:\n"
    assert loaded(file, text) == loaded(file, "subject: digits") == Recipe("digits")


def test_every_section_is_read(file: Path) -> None:
    recipe = loaded(
        file,
        """
subject: digits
batch: 8
samples: 100
elastic:
  bits: [4, 8]
  rank_fractions: [0.25, 0.5]
  include: ["blocks.*"]
  rank_caps: {convolution: 0.5, linear: 1}
  convolution: cp
  rank_tied_bits: {a: 1, b: 1.5, offsets: [0, 1]}
train:
  steps: 10
  learning_rate: 1e-3
  augmentations: [shift, horizontal_flip]
  controller: off
  masks: true
blocks: {steps: 3}
export:
  engine: torch
  controller: {steps: 5, summary_units: [a, b]}
  timing: {rounds: 3, busy: true, starts: false}
  certificate:
    measures: [absolute, kl]
    estimates: {samples: 2, path_samples: 1}
""",
    )
    assert recipe.elastic == ElasticConfig(
        bits=(4, 8), rank_fractions=(0.25, 0.5), include=("blocks.*",),
        convolution=Factorization.CP, rank_caps={"convolution": 0.5, "linear": 1.0},
        rank_tied_bits=RankTiedBits(1.0, 1.5, offsets=(0, 1)),
    )  # fmt: skip
    assert isinstance(recipe.elastic.convolution, Factorization)
    assert recipe.train == TrainConfig(
        steps=10, learning_rate=1e-3, augmentations=("shift", "horizontal_flip"), masks=True
    )
    assert recipe.blocks == BlockConfig(steps=3)
    assert recipe.export is not None
    assert recipe.export.controller is not None
    assert recipe.export.controller.summary_units == ("a", "b")
    assert (recipe.export.timing.rounds, recipe.export.timing.starts) == (3, False)
    assert recipe.export.certificate.measures == ("absolute", "kl")
    assert recipe.export.certificate.estimates == EstimateConfig(samples=2, path_samples=1)


@pytest.mark.parametrize(
    ("text", "setting", "hint"),
    [
        ("subjekt: digits", "subjekt", "subject"),
        ("subject: digit", "'digit'", "digits"),
        ("subject: digits\ntrain: {stepz: 3}", "train.stepz", "steps"),
        ("subject: digits\ntrain: {loss: clasification}", "train.loss", "classification"),
        ("subject: digits\ntrain: {augmentations: [shft]}", "train.augmentations", "shift"),
        ("subject: digits\nelastic: {tiles: 4}", "elastic.tiles", "tile"),
        ("subject: digits\nelastic: {rank_tied_bits: {of: 1}}", "elastic.rank_tied_bits.of", None),
        ("subject: digits\nblocks: {step: 4}", "blocks.step", "steps"),
        ("subject: digits\nexport: {engine: openvin}", "export.engine", "openvino"),
        (
            "subject: digits\nexport: {timing: {round: 1}}",
            "export.timing.round", "rounds",
        ),
        (
            "subject: digits\nexport: {certificate: {estimates: {sample: 1}}}",
            "export.certificate.estimates.sample", "samples",
        ),
        ("subject: digits\n1: 2", "1", None),
        ("subject: digits\n~: 2", "None", None),
    ],
)  # fmt: skip
def test_what_is_unknown(file: Path, text: str, setting: str, hint: str | None) -> None:
    said = refusal(file, text)
    assert said.startswith(f"{file}: ")
    assert f"{setting}" in said
    assert said.endswith(f"did you mean {hint}?") if hint else "known are" in said


@pytest.mark.parametrize(
    "line",
    [
        'steps: "12"', "steps: 12.7", "steps: 12.0", "steps: true", "steps: [12]", "steps: ~",
        "steps: {a: 1}", "steps: 2020-01-01", "steps: 0o12", "learning_rate: true",
        "learning_rate: fast", 'learning_rate: "0.1"', "masks: 1", "masks: yes", 'masks: "true"',
        "loss: 3", "full: 1", "full: mostly", "augmentations: shift", "augmentations: [1]",
        "augmentations: {shift: 1}", "seed: 1.0", "steps: !!python/tuple 1",
    ],
)  # fmt: skip
def test_values_of_another_type_are_not_read_as_if(file: Path, line: str) -> None:
    said = refusal(file, f"subject: digits\ntrain:\n  {line}\n")
    assert str(file) in said
    assert f"train.{line.partition(':')[0]}" in said or "not YAML" in said


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train: {steps: 0}", "train: steps must be at least 1, got 0"),
        ("train: {learning_rate: .nan}", "train: learning_rate must be positive, got nan"),
        ("train: {learning_rate: .inf}", "train: learning_rate must be positive, got inf"),
        ("train: {objective: {distill: -1}}", "train.objective: distill must be at least 0"),
        ("train: 3", "train is a mapping of settings, got 3"),
        ("train: [steps, 3]", "train is a mapping of settings"),
        ("blocks: {batch: 0}", "blocks: batch must be at least 1"),
        ("elastic: {bits: [8, 4]}", "elastic: bits must rise"),
        ("elastic: {convolution: svd}", "elastic: convolution must be one of tucker1, tucker2, cp"),
        ("elastic: {convolution: cpp}", "elastic.convolution should be 'none', 'svd'"),
        ("elastic: {rank_caps: {lineal: 0.5}}", "elastic: rank_caps are shares"),
        ("elastic: {rank_caps: {linear: x}}", "elastic.rank_caps.linear should be a valid number"),
        ("elastic: {bits: [4, x]}", "elastic.bits.1 should be a valid integer, got 'x'"),
        ("export: {timing: {rounds: 0}}", "export.timing: rounds must be positive"),
        ("export: {timing: 3}", "export.timing is a mapping"),
        ("batch: 0", "batch must be at least 1"),
        ("samples: -1", "samples must be at least 1"),
        ("batch: 1.5", "batch should be a valid integer, got 1.5"),
        ("batch: 1\nbatch: 2", "batch is there twice"),
        ("train: {steps: 1, steps: 2}", "steps is there twice"),
        ("train: {", "not YAML"),
        ("train: &a {steps: *a}", "train.steps"),
        ("\ttrain: 1", "not YAML"),
    ],
)
def test_what_cannot_be(file: Path, text: str, told: str) -> None:
    said = refusal(file, f"subject: digits\n{text}\n")
    assert said.startswith(f"{file}: ")
    assert told in said


@pytest.mark.parametrize("text", ["", "~", "# nothing", "digits", "[subject, digits]", "3"])
def test_a_file_without_settings(file: Path, text: str) -> None:
    assert "there are no settings" in refusal(file, text)


def test_a_recipe_has_a_subject(file: Path) -> None:
    assert refusal(file, "batch: 3") == f"{file}: there is no subject"


def test_files_that_cannot_be_read(file: Path, tmp_path: Path) -> None:
    file.write_bytes(b"subject: \xff")
    for path in (file, tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(DataError, match=re.escape(f"{path} cannot be read: ")) as caught:
            load_recipe(path)
        assert str(caught.value).count(str(path)) == 1


def test_settings_given_beside_the_file(file: Path) -> None:
    text = "subject: digits\ntrain: {steps: 5, seed: 7}"
    recipe = loaded(
        file, text, "steps=9", "learning_rate=1e-4", "controller=off", "augmentations=[shift]",
        "batch=4", "elastic.tile=4", "train.masks=true", "elastic.rank_caps.linear=0.5",
    )  # fmt: skip
    assert recipe.train == TrainConfig(
        steps=9, seed=7, learning_rate=1e-4, augmentations=("shift",), masks=True
    )
    assert recipe.elastic == ElasticConfig(tile=4, rank_caps={"linear": 0.5})
    assert recipe.batch == 4
    # Neither can be alone: they are taken together.
    zero = ("objective.distill=0", "objective.augment=0", "objective.tail=0")
    recipe = loaded(file, text, *zero, "train.objective.spectral=1")
    assert recipe.train.objective == Objective(distill=0, augment=0, tail=0, spectral=1)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("steps=abc", "train.steps should be a valid integer, got 'abc'"),
        ("steps=1.5", "train.steps should be a valid integer, got 1.5"),
        ("steps=", "train.steps should be a valid integer, got None"),
        ("steps=0", "steps must be at least 1"),
        ("steps", "a setting is NAME=VALUE such as steps=100, got 'steps'"),
        ("stpes=1", "no setting train.stpes: did you mean steps?"),
        ("elastic.tille=1", "no setting elastic.tille: did you mean tile?"),
        ("train.steps.x=1", "train.steps is 2000: it has no settings of its own"),
        ("export.engine=torch", "export is None: it has no settings of its own"),
        ("masks=[", "not YAML"),
        ("=3", "no setting train."),
    ],
)
def test_settings_that_cannot_be_given(file: Path, setting: str, told: str) -> None:
    said = refusal(file, "subject: digits", setting)
    assert said.startswith("--set: ")
    assert told in said
    assert str(file) not in said, "the file is not at fault"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=8) | st.sampled_from(["steps", "linear"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [f.name for kind in (Recipe, TrainConfig, ElasticConfig, ExportConfig) for f in fields(kind)]
)


@given(st.dictionaries(NAMES | st.text(max_size=6), PLAIN, max_size=4))
def test_nothing_but_our_own_errors_leaves(data: dict[str, Any]) -> None:
    for kind in (Recipe, TrainConfig, ElasticConfig, ExportConfig):
        given = {"subject": "digits"} | data if kind is Recipe else data
        try:
            made = build(kind, given, "")
        except T3CError:
            continue
        assert isinstance(made, kind)
