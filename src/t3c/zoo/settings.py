"""Configurations from YAML: every value of the type it should be, and nothing unknown."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from t3c.errors import DataError, MissingExtraError, SpecError

Config = TypeVar("Config")


def read_settings(path: Path, kind: type[Config]) -> Config:
    """The configuration that a YAML file holds."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {reason}") from error
    try:
        data = parse_yaml(text)
        if not isinstance(data, dict):
            raise SpecError("there are no settings: the file is a mapping of names to values")
        return build(kind, data, "")
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error


def build(kind: type[Config], data: Any, where: str) -> Config:
    """A configuration from plain values, each of the type it should be; nothing unknown."""
    if not isinstance(data, Mapping):
        raise SpecError(f"{where} is a mapping of settings, got {data!r}")
    _check_names(kind, data, where)
    hints = _hints(kind)  # type: ignore[arg-type]
    given = {name: _value(hints[name], v, join(where, name)) for name, v in data.items()}
    for entry in fields(kind):  # type: ignore[arg-type]
        optional = entry.default is not MISSING or entry.default_factory is not MISSING
        if not optional and entry.name not in given:
            raise SpecError(f"there is no {join(where, entry.name)}")
    try:
        return kind(**given)
    except SpecError as error:
        raise SpecError(join(where, str(error), ": ")) from error


def changed(config: Config, settings: Mapping[tuple[str, ...], Any], where: str) -> Config:
    """A configuration with the values at some paths below it exchanged, all at once."""
    kind = type(config)
    below: dict[str, dict[tuple[str, ...], Any]] = {}
    for path, value in settings.items():
        below.setdefault(path[0], {})[path[1:]] = value
    _check_names(kind, below, where)
    hints, given = _hints(kind), dict[str, Any]()  # type: ignore[arg-type]
    for name, inner in below.items():
        at, now = join(where, name), getattr(config, name)
        if () in inner:
            now = _value(hints[name], inner.pop(()), at)
        if inner and is_dataclass(now):
            now = changed(now, inner, at)
        elif inner and isinstance(now, Mapping):
            entries = {".".join(path): value for path, value in inner.items()}
            now = _value(hints[name], {**now, **entries}, at)
        elif inner:
            raise SpecError(f"{at} is {now}: it has no settings of its own")
        given[name] = now
    try:
        return replace(config, **given)  # type: ignore[type-var]
    except SpecError as error:
        raise SpecError(join(where, str(error), ": ")) from error


def _value(hint: Any, value: Any, where: str) -> Any:
    """A value of the type it should be; what merely could be read as one is refused."""
    kind = next((h for h in (hint, *get_args(hint)) if is_dataclass(h)), None)
    if kind is not None and get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise SpecError(f"{where} is a list, got {value!r}")
        return tuple(build(kind, v, f"{where}.{i}") for i, v in enumerate(value))  # type: ignore[arg-type]
    if kind is not None:
        if value is None:  # an empty section
            return None if NoneType in get_args(hint) else build(kind, {}, where)  # type: ignore[arg-type]
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
            raise SpecError(f"no setting {join(where, str(name))}: {near(str(name), known)}")


def near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def join(where: str, name: str, by: str = ".") -> str:
    return f"{where}{by}{name}" if where else name


def parse_yaml(text: str) -> Any:
    """Plain values of YAML 1.2: 1e-3 is a number there, and `off` a word; no name comes twice."""
    try:
        import yaml
    except ImportError as missing:
        raise MissingExtraError("pyyaml", "train") from missing

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
