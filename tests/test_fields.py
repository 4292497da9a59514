"""Every setting does something: fields are read, and keys of YAML files change what is built."""

from __future__ import annotations

import ast
import copy
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import t3c
from lab.results import ResultsSpec
from lab.sentences import load_any
from lab.sweeps import Sweep
from t3c.errors import SpecError
from t3c.zoo.recipe import Recipe
from t3c.zoo.settings import build, parse_yaml

SOURCE = Path(t3c.__file__).parent
CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))


def settings() -> dict[str, type]:
    """Return by name every dataclass that a user or a YAML file can construct."""
    names = [
        m.name for m in pkgutil.walk_packages(t3c.__path__, "t3c.") if "__main__" not in m.name
    ]
    defined = [kind for name in names for kind in vars(importlib.import_module(name)).values()]
    public = [getattr(t3c, name) for name in t3c.__all__ if name != "Certificate"]  # a result
    named = [
        kind
        for kind in defined
        if isinstance(kind, type)
        and (kind.__name__.endswith("Config") or kind.__module__.endswith(".config"))
    ]
    found: dict[str, type] = {}
    waiting = [*public, *named, Recipe]
    while waiting:
        kind = waiting.pop()
        ours = isinstance(kind, type) and kind.__module__.startswith("t3c.")
        if not ours or not is_dataclass(kind) or kind in found.values():
            continue
        found[f"{kind.__module__}.{kind.__qualname__}"] = kind
        for hint in get_type_hints(kind).values():
            waiting += [hint, *get_args(hint)]
    return found


class Reads(ast.NodeVisitor):
    """Collect the attributes that code reads, apart by the class whose body reads them.

    `self.x` in a class is a read of that class alone. What a class reads of itself counts where it
    does more than check itself: in a method or property without a leading underscore.
    """

    def __init__(self) -> None:
        self.of_others: dict[str, set[str]] = {}  # by attribute, classes that read it of others
        self.of_self: dict[str, set[str]] = {}  # by class, what its public methods read of itself
        self._class, self._method = "", ""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before = self._method
        self._method = self._method or node.name
        self.generic_visit(node)
        self._method = before

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return
        if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            self.of_others.setdefault(node.attr, set()).add(self._class)
        elif not self._method.startswith("_"):
            self.of_self.setdefault(self._class, set()).add(node.attr)


def unread(kinds: Mapping[str, type], sources: Iterator[str]) -> list[str]:
    """Return the fields that no source reads outside the body of their own class."""
    reads = Reads()
    for source in sources:
        reads.visit(ast.parse(source))
    return [
        f"{name}.{field.name}"
        for name, kind in kinds.items()
        for field in fields(kind)
        if not reads.of_others.get(field.name, set()) - {kind.__name__}
        and field.name not in reads.of_self.get(kind.__name__, set())
    ]


def idle_keys(data: Any, load: Callable[[Any], Any]) -> list[str]:
    """Return the keys of plain values without which the same is loaded."""
    data = copy.deepcopy(data)  # and below entry by entry: an alias of YAML is one object twice
    whole = load(data)

    def walk(at: tuple[str | int, ...], value: Any) -> Iterator[str]:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in entries:
            if isinstance(value, dict) and _without(data, (*at, key), load) == whole:
                yield ".".join(map(str, (*at, key)))
            elif isinstance(inner, dict | list):
                yield from walk((*at, key), inner)

    return list(walk((), data))


def _without(data: Any, path: tuple[str | int, ...], load: Callable[[Any], Any]) -> Any:
    """Load the values without those at a path; None where they are required."""

    def cut(value: Any, at: tuple[str | int, ...]) -> Any:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        kept = {k: cut(v, at[1:]) if k == at[0] and at[1:] else v for k, v in entries if at != (k,)}
        return kept if isinstance(value, dict) else list(kept.values())

    try:
        return load(cut(data, path))
    except SpecError:
        return None


def loader(path: Path) -> Callable[[Any], Any]:
    """Return what makes an object of the plain values of a file."""
    kinds = {"configs": Recipe, "results": ResultsSpec, "sweeps": Sweep}
    kind = kinds.get(path.parent.name) or type(load_any(path))
    return lambda data: build(kind, data, "")


def test_every_field_is_read() -> None:
    kinds = settings()
    names = {name.rpartition(".")[2] for name in kinds}
    assert names >= {"TrainConfig", "Objective", "Goal", "Recipe", "ExportConfig"}
    assert names >= {"ControllerConfig", "CalibrationConfig", "ServeConfig"}
    found = unread(kinds, (path.read_text() for path in SOURCE.rglob("*.py")))
    assert not found, f"fields that nothing reads: {', '.join(found)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_key_changes_what_is_built(path: Path) -> None:
    found = idle_keys(parse_yaml(path.read_text()), loader(path))
    assert not found, f"{path} says what is so without it: {', '.join(found)}"


@dataclass(frozen=True)
class Planted:
    """A configuration with fields that are read, and two that are not."""

    used: int = 1
    derived: int = 2
    checked: int = 3
    forgotten: int = 4


PLANTED = """
class Planted:
    def __post_init__(self):
        assert self.checked > 0

    @property
    def twice(self):
        return 2 * self.derived

class Other:
    def run(self, planted):
        self.forgotten = Planted(forgotten=5)
        return planted.used + self.forgotten
"""


def test_a_planted_field_that_nothing_reads_is_found() -> None:
    found = unread({"Planted": Planted}, iter([PLANTED]))
    assert found == ["Planted.checked", "Planted.forgotten"]


def test_planted_keys_that_change_nothing_are_found() -> None:
    text = """
subject: digits
batch: 64
train: &train
  steps: 300
  goal: {profiles: 5, worst_drift: 0.3}
  objective: {augment: 0.25}
export: {goal: {worst_drift: 0.3}, timing: {rounds: 9, busy: false}}
blocks: {steps: 3, batch: 32}
"""
    found = idle_keys(parse_yaml(text), lambda data: build(Recipe, data, ""))
    assert found == [
        "batch", "train.goal.profiles", "train.objective", "export.timing.busy", "blocks.batch",
    ]  # fmt: skip
