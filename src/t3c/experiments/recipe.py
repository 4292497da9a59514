"""A recipe: what `t3c train` trains and how, read from YAML."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from t3c.convert import ElasticConfig
from t3c.errors import DataError, MissingExtraError, SpecError
from t3c.exporter import ExportConfig
from t3c.runtime.engines import ENGINES
from t3c.train import BlockConfig, TrainConfig
from t3c.train.augment import AUGMENTATIONS
from t3c.train.losses import LOSSES
from t3c.zoo.subjects import SUBJECTS

OWN = ("batch", "samples")  # settings that go by one name and are not of `train`
Config = TypeVar("Config")


@dataclass(frozen=True)
class Sweep:
    """Values to try of settings, and the seeds each combination is tried with (paper E.2).

    Names are those of `train`, or lead to others: `elastic.rank_caps.linear`. The best is the
    least task loss, plus `slack` times the drift beyond `drift`, both means over tiny, med and max
    on the validation part.
    """

    settings: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (3407,)
    drift: float = 0.15
    slack: float = 1.0

    def __post_init__(self) -> None:
        if not self.seeds or not all(isinstance(s, int) for s in self.seeds):
            raise SpecError(f"seeds are whole numbers, got {self.seeds}")
        for name, values in self.settings.items():
            if not isinstance(values, Sequence) or isinstance(values, str) or not values:
                raise SpecError(f"settings.{name} is a list of values, got {values!r}")
            if _path(name) == ("train", "seed"):
                raise SpecError("settings has no seed: seeds lists them")
        for name in ("drift", "slack"):
            if not 0 <= getattr(self, name) < math.inf:
                raise SpecError(f"{name} must be at least 0, got {getattr(self, name):g}")


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
        _check_choice("subject", self.subject, SUBJECTS)
        _check_choice("train.loss", self.train.loss, LOSSES)
        for name in self.train.augmentations:
            _check_choice("train.augmentations", name, AUGMENTATIONS)
        if self.export is not None:
            _check_choice("export.engine", self.export.engine, ENGINES)
        for name in OWN:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name} must be at least 1, got {value}")

    def grid(self) -> list[Recipe]:
        """Every combination of the sweep's settings and seeds, as recipes without a sweep."""
        if self.sweep is None:
            raise SpecError("the recipe has no sweep: add `sweep: {settings: {...}}`")
        names = list(self.sweep.settings)
        found: dict[str, Recipe] = {}
        for values in product(*self.sweep.settings.values()):
            for seed in self.sweep.seeds:
                given = dict(zip(names, values, strict=True)) | {"seed": seed}
                point = replace(self.changed(given), sweep=None)
                if repr(point) in found:
                    raise SpecError(f"sweep: {given} is there twice")
                found[repr(point)] = point
        return list(found.values())

    def changed(self, settings: Mapping[str, Any]) -> Recipe:
        """The recipe with other settings: of `train`, or by paths such as `elastic.tile`."""
        return _changed(self, {_path(name): value for name, value in settings.items()}, "")

    def setting(self, name: str) -> Any:
        """The value of a setting, by the names that `changed` takes."""
        found: Any = self
        for part in _path(name):
            found = found[part] if isinstance(found, Mapping) else getattr(found, part)
        return found


def load_recipe(path: Path, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file; `settings` like `steps=100` override those of `train`."""
    try:
        import yaml
    except ImportError as missing:
        raise MissingExtraError("pyyaml", "train") from missing
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {reason}") from error
    try:
        data = _parse(text, yaml)
        if not isinstance(data, dict):
            raise SpecError("there are no settings: a recipe is a mapping with a subject")
        recipe = build(Recipe, data, "")
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error
    try:
        recipe = recipe.changed(dict(_setting(text, yaml) for text in settings))
    except SpecError as error:
        raise SpecError(f"--set: {error}") from error
    if recipe.sweep is not None:
        try:
            recipe.grid()  # a setting that cannot be is known before the first point is trained
        except SpecError as error:
            raise SpecError(f"{path}: sweep: {error}") from error
    return recipe


def build(kind: type[Config], data: Any, where: str) -> Config:
    """A configuration from plain values, each of the type it should be; nothing unknown."""
    if not isinstance(data, Mapping):
        raise SpecError(f"{where} is a mapping of settings, got {data!r}")
    _check_names(kind, data, where)
    hints = _hints(kind)  # type: ignore[arg-type]
    given = {name: _value(hints[name], v, _join(where, name)) for name, v in data.items()}
    for entry in fields(kind):  # type: ignore[arg-type]
        optional = entry.default is not MISSING or entry.default_factory is not MISSING
        if not optional and entry.name not in given:
            raise SpecError(f"there is no {_join(where, entry.name)}")
    try:
        return kind(**given)
    except SpecError as error:
        raise SpecError(_join(where, str(error), ": ")) from error


def _changed(config: Config, settings: Mapping[tuple[str, ...], Any], where: str) -> Config:
    """A configuration with the values at some paths below it exchanged, all at once."""
    kind = type(config)
    below: dict[str, dict[tuple[str, ...], Any]] = {}
    for path, value in settings.items():
        below.setdefault(path[0], {})[path[1:]] = value
    _check_names(kind, below, where)
    hints, given = _hints(kind), dict[str, Any]()  # type: ignore[arg-type]
    for name, inner in below.items():
        at, now = _join(where, name), getattr(config, name)
        if () in inner:
            now = _value(hints[name], inner.pop(()), at)
        if inner and is_dataclass(now):
            now = _changed(now, inner, at)
        elif inner and isinstance(now, Mapping):
            entries = {".".join(path): value for path, value in inner.items()}
            now = _value(hints[name], {**now, **entries}, at)
        elif inner:
            raise SpecError(f"{at} is {now}: it has no settings of its own")
        given[name] = now
    try:
        return replace(config, **given)  # type: ignore[type-var]
    except SpecError as error:
        raise SpecError(_join(where, str(error), ": ")) from error


def _value(hint: Any, value: Any, where: str) -> Any:
    """A value of the type it should be; what merely could be read as one is refused."""
    kind = next((h for h in (hint, *get_args(hint)) if is_dataclass(h)), None)
    if kind is not None:
        if value is None:  # an empty section
            return None if NoneType in get_args(hint) else kind()  # type: ignore[operator]
        return build(kind, value, where)  # type: ignore[arg-type]
    try:
        # JSON, since strict there are lists for tuples and names for choices, yet no "12" for 12.
        return _adapter(hint).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join([where, *(str(part) for part in first["loc"])])
        expected = first["msg"].removeprefix("Input should be ")
        raise SpecError(f"{at} should be {expected}, got {first['input']!r}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"{where} is no plain value: {error}") from error


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _check_names(kind: type, given: Mapping[Any, Any], where: str) -> None:
    known = [f.name for f in fields(kind)]
    for name in given:
        if name not in known:
            raise SpecError(f"no setting {_join(where, str(name))}: {_hint(str(name), known)}")


def _check_choice(where: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise SpecError(f"no {where} {name!r}: {_hint(name, list(known))}")


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _path(name: str) -> tuple[str, ...]:
    parts = tuple(name.split("."))
    return parts if len(parts) > 1 or name in OWN else ("train", name)


def _join(where: str, name: str, by: str = ".") -> str:
    return f"{where}{by}{name}" if where else name


def _setting(text: str, yaml: Any) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SpecError(f"a setting is NAME=VALUE such as steps=100, got {text!r}")
    return name.strip(), _parse(value, yaml)


def _parse(text: str, yaml: Any) -> Any:
    """Plain values of YAML 1.2: 1e-3 is a number there, and `off` a word; no name comes twice."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [self.construct_object(key, deep=True) for key, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    line = node.start_mark.line + 1
                    raise SpecError(f"{name} is there twice, in what begins in line {line}")
            return super().construct_mapping(node, deep)

    for tag, pattern, first in (
        ("null", r"~|null|", ["~", "n", ""]),
        ("bool", r"true|True|false|False", list("tTfF")),
        ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
        (
            "float",
            r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
            list("-+.0123456789"),
        ),
    ):
        whole = re.compile(rf"(?:{pattern})\Z")
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", whole, first)
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise SpecError(f"this is not YAML: {' '.join(str(error).split())}") from error
