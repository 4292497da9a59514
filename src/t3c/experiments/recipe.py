"""A recipe: what `t3c train` trains and how, read from YAML."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from t3c.convert import ElasticConfig
from t3c.errors import DataError, MissingExtraError, SpecError
from t3c.exporter import ExportConfig
from t3c.train import BlockConfig, TrainConfig
from t3c.zoo.subjects import SUBJECTS

Config = TypeVar("Config")


@dataclass(frozen=True)
class Sweep:
    """Values to try of settings of `train`, and the seeds each is tried with (paper E.2).

    The best is the least task loss, plus `slack` times the drift beyond `drift`, both means over
    tiny, med and max on the validation part.
    """

    settings: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (3407,)
    drift: float = 0.15
    slack: float = 1.0

    def __post_init__(self) -> None:
        if not self.seeds or not all(isinstance(s, int) for s in self.seeds):
            raise SpecError(f"sweep.seeds are whole numbers, got {self.seeds}")
        for name, values in self.settings.items():
            if not isinstance(values, Sequence) or isinstance(values, str) or not values:
                raise SpecError(f"sweep.settings.{name} is a list of values, got {values!r}")


@dataclass(frozen=True)
class Recipe:
    """A subject of the zoo, how it is made elastic, trained and, if `export` is there, exported.

    `samples` limits the training part; `blocks` reconstructs block by block first.
    """

    subject: str
    batch: int = 64
    samples: int | None = None
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    blocks: BlockConfig | None = None
    export: ExportConfig | None = None
    sweep: Sweep | None = None

    def __post_init__(self) -> None:
        if self.subject not in SUBJECTS:
            known = ", ".join(SUBJECTS)
            raise SpecError(f"subject is one of {known}, got {self.subject!r}")
        for name in ("batch", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name} must be at least 1, got {value}")

    def grid(self) -> list[Recipe]:
        """Every combination of the sweep's settings and seeds, as recipes without a sweep."""
        if self.sweep is None:
            raise SpecError("the recipe has no sweep: add `sweep: {settings: {...}}`")
        names = list(self.sweep.settings)
        found = []
        for values in product(*self.sweep.settings.values()):
            for seed in self.sweep.seeds:
                given = dict(zip(names, values, strict=True)) | {"seed": seed}
                found.append(self.changed(given))
        return found

    def changed(self, settings: Mapping[str, Any]) -> Recipe:
        """The recipe with other settings of `train`, and without a sweep."""
        now = {f.name: getattr(self.train, f.name) for f in fields(TrainConfig)}
        train = _config(TrainConfig, now | dict(settings), "train")
        return replace(self, train=train, sweep=None)


def load_recipe(path: Path, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file; `settings` like `steps=100` override those of `train`."""
    try:
        import yaml
    except ImportError as missing:
        raise MissingExtraError("pyyaml", "train") from missing
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        given = dict(_setting(text, yaml) for text in settings)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise SpecError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise SpecError(f"{path} holds no settings: a recipe is a mapping with a subject")
    try:
        recipe = _recipe(data)
        return recipe if not given else replace(recipe.changed(given), sweep=recipe.sweep)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error


def _recipe(data: Mapping[str, Any]) -> Recipe:
    parts = {
        "elastic": ElasticConfig, "train": TrainConfig, "blocks": BlockConfig,
        "export": ExportConfig, "sweep": Sweep,
    }  # fmt: skip
    plain = dict(data)
    for name, kind in parts.items():
        if plain.get(name) is not None:
            plain[name] = _config(kind, plain[name], name)
        elif name in plain and name not in ("blocks", "export", "sweep"):
            del plain[name]  # an empty section is its defaults
    return _config(Recipe, plain, "")


def _config(kind: type[Config], data: Any, where: str) -> Config:
    """A configuration from plain values, each of the type it should be; nothing unknown."""
    prefix = f"{where}." if where else ""
    if not isinstance(data, Mapping):
        raise SpecError(f"{where} is a mapping of settings, got {data!r}")
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f": did you mean {near[0]}?" if near else f": known are {', '.join(known)}"
            raise SpecError(f"no setting {prefix}{name}{hint}")
    try:
        return TypeAdapter(kind).validate_python(dict(data))
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"{prefix}{at}: {first['msg']}" if at else first["msg"]) from error


def _setting(text: str, yaml: Any) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SpecError(f"a setting is NAME=VALUE such as steps=100, got {text!r}")
    return name.strip(), yaml.safe_load(value)
