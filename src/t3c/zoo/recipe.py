"""A recipe: what `t3c train` trains and how, read from YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from t3c.convert import ElasticConfig
from t3c.engines import ENGINES
from t3c.errors import SpecError
from t3c.exporter import ExportConfig
from t3c.train import BlockConfig, TrainConfig
from t3c.train.augment import AUGMENTATIONS
from t3c.train.losses import LOSSES
from t3c.zoo.settings import changed, near, parse_yaml, read_settings
from t3c.zoo.subjects import SUBJECTS


@dataclass(frozen=True)
class Recipe:
    """A subject of the zoo, how it is made elastic, trained and, if `export` is there, exported.

    `batch` samples are taken at a step; `samples` limits the training part.
    `smooth` makes activations of linear layers easier to round (SmoothQuant), before anything else.
    `settle` are the bit widths that weights are rounded for with second-order compensation (GPTQ),
    ending with the most there are; without them weights are rounded to the nearest.
    `blocks` reconstructs block by block before training end to end.
    """

    subject: str
    batch: int = 64
    samples: int | None = None
    smooth: bool = False
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    settle: tuple[int, ...] = ()
    train: TrainConfig = field(default_factory=TrainConfig)
    blocks: BlockConfig | None = None
    export: ExportConfig | None = None

    def __post_init__(self) -> None:
        _check_choice("subject", self.subject, SUBJECTS)
        _check_choice("train.loss", self.train.loss, LOSSES)
        for name in self.train.augmentations:
            _check_choice("train.augmentations", name, AUGMENTATIONS)
        if self.export is not None:
            _check_choice("export.engine", self.export.engine, ENGINES)
        for name in ("batch", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name} must be at least 1, got {value}")

    def changed(self, settings: Mapping[str, Any]) -> Recipe:
        """The recipe with other settings: of `train`, or by paths such as `elastic.tile`."""
        return changed(self, {setting_path(name): value for name, value in settings.items()}, "")


def load_recipe(path: Path, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file; `settings` like `steps=100` override those of `train`."""
    recipe = read_settings(path, Recipe)
    try:
        return recipe.changed(dict(_setting(text) for text in settings))
    except SpecError as error:
        raise SpecError(f"--set: {error}") from error


def _check_choice(where: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise SpecError(f"no {where} {name!r}: {near(name, list(known))}")


def setting_path(name: str) -> tuple[str, ...]:
    """Return where a setting is in a recipe: what is no part of the recipe itself is of `train`."""
    parts = tuple(name.split("."))
    return parts if parts[0] in Recipe.__dataclass_fields__ else ("train", *parts)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SpecError(f"a setting is NAME=VALUE such as steps=100, got {text!r}")
    return name.strip(), parse_yaml(value)
