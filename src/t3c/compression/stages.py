"""Long work in stages: each is kept under the hash of what it was made from, and never made twice.

A stage has a folder of its own, which it finds again if it was stopped: what it leaves there, such
as checkpoints, it can go on from. It is done when its result is written. Stages that measure and
decide are apart from those that follow from their decisions: a record of the former is all that a
run depends on besides its inputs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from t3c.errors import DataError
from t3c.files import locked, write_atomic, writing

RESULT = "result.json"
FORMAT = 2  # of what stages keep: one more where a later t3c cannot go on from them
Say = Callable[[str], object]


@dataclass(frozen=True)
class Stage:
    """A finished stage: its folder, its key, what it found."""

    folder: Path
    key: str
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stages:
    """The stages below one folder."""

    root: Path
    say: Say = lambda text: None
    recorded: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def decide(
        self, name: str, made_from: Mapping[str, Any], make: Callable[[Path], Mapping[str, Any]]
    ) -> Stage:
        """Return a stage whose result depends on measured time; recorded ones are taken over."""
        known = self.recorded.get(name)
        return self.run(name, made_from, make if known is None else lambda folder: known)

    def run(
        self, name: str, made_from: Mapping[str, Any], make: Callable[[Path], Mapping[str, Any]]
    ) -> Stage:
        """The stage of this name and these inputs, made by `make(folder)` unless it is there.

        Inputs are plain values, or what `repr` tells apart; a stage that depends on another takes
        its key. `make` returns plain JSON.
        """
        told = json.dumps([FORMAT, made_from], sort_keys=True, default=repr)
        key = f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
        folder = self.root / key
        path = folder / RESULT
        if path.is_file():
            self.say(f"{name} is done")
            return Stage(folder, key, _read(path))
        with writing(folder, DataError):
            folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, error=DataError):
            self.say(name)
            started = time.perf_counter()
            with writing(folder, DataError):
                result = {**make(folder), "seconds": time.perf_counter() - started}
            write_atomic(path, json.dumps(result, indent=1).encode(), DataError)
        self.say(f"{name}: {result['seconds']:.0f} s")
        return Stage(folder, key, result)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}: remove it to make it again") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is no result of a stage: remove it to make it again")
    return found
