"""Train a recipe with every combination of some settings, and rank what comes of it (paper E.2).

The settings to try for `configs/X.yaml` are in `configs/sweeps/X.yaml`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from t3c.errors import DataError, SpecError
from t3c.files import write_atomic
from t3c.nn.inputs import evaluating
from t3c.train import TrainConfig
from t3c.train.losses import loss_of
from t3c.train.validate import shown, validate
from t3c.zoo.recipe import Recipe, load_recipe, setting_path
from t3c.zoo.settings import read_settings
from t3c.zoo.training import Say, Trained, train_recipe
from t3c.zoo.views import Watch

SCORE = "score.json"


@dataclass(frozen=True)
class Sweep:
    """Values to try of settings, and the seeds each combination is tried with.

    Names are those of `train`, or lead to others: `objective.certificate`, which is of `train`, or
    `elastic.rank_caps.linear`. The best is the
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
            if setting_path(name) == ("train", "seed"):
                raise SpecError("settings has no seed: seeds lists them")
        for name in ("drift", "slack"):
            if not 0 <= getattr(self, name) < math.inf:
                raise SpecError(f"{name} must be at least 0, got {getattr(self, name):g}")

    def points(self, recipe: Recipe) -> list[Recipe]:
        """Return the recipe with every combination of settings and seeds."""
        names = list(self.settings)
        by_content: dict[str, Recipe] = {}
        for values in product(*self.settings.values()):
            for seed in self.seeds:
                given = dict(zip(names, values, strict=True)) | {"seed": seed}
                point = recipe.changed(given)
                if repr(point) in by_content:
                    raise SpecError(f"{given} is there twice")
                by_content[repr(point)] = point
        return list(by_content.values())


@dataclass(frozen=True)
class Score:
    """The figure that points are ranked by: the loss plus the weighed drift beyond its limit."""

    score: float
    loss: float
    slack: float


@dataclass(frozen=True)
class SweepRow:
    """A point of a sweep: its settings, its score (as in `Score`), and the folder of its run."""

    settings: Mapping[str, Any]
    score: float
    loss: float
    slack: float
    out: str


def load_sweep(path: Path, settings: Sequence[str] = ()) -> tuple[Recipe, Sweep]:
    """Load a recipe and its sweep; a value that cannot be is refused before anything is trained."""
    recipe, where = load_recipe(path, settings), path.parent / "sweeps" / path.name
    if not where.exists():
        raise SpecError(f"{path} has no sweep: {where} would list its settings")
    sweep = read_settings(where, Sweep)
    try:
        sweep.points(recipe)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error
    return recipe, sweep


def run_sweep(recipe: Recipe, sweep: Sweep, out: Path, *, say: Say, watch: Watch) -> list[SweepRow]:
    """Train every point of the grid; return rows with their scores, best first.

    A point that has its result in `out` already is not trained again, one that was stopped goes on.
    """
    points, rows = sweep.points(recipe), []
    for index, point in enumerate(points):
        settings = {name: _setting(point, name) for name in (*sweep.settings, "seed")}
        folder = out / folder_of(point, settings)
        say(f"point {index + 1} of {len(points)}: {folder.name}")
        path = folder / SCORE
        if not path.exists():
            # The test part is not looked at, and nothing exported, before one is chosen.
            point = replace(point, export=None)
            done = train_recipe(point, folder, resume=True, test=False, say=say, watch=watch)
            data = {"settings": settings, "validated": _validated(done, point.train)}
            write_atomic(path, json.dumps(data, indent=1, default=dict).encode())
        kept = _read(path)
        scored = asdict(score(kept["validated"], sweep))
        rows.append(SweepRow(kept["settings"], **scored, out=str(folder)))
    return sorted(rows, key=lambda row: row.score)


def folder_of(point: Recipe, settings: Mapping[str, Any]) -> str:
    """Return a name of a point's own: its settings as far as names hold them, and all of it hashed.

    Two points that differ in anything have different names.
    """
    told = "-".join(f"{key}={value}" for key, value in settings.items())
    shown = re.sub(r"[^\w.,=+-]+", "_", told, flags=re.ASCII)[:100]
    return f"{shown}-{hashlib.sha256(repr(point).encode()).hexdigest()[:12]}"


def score(validated: Mapping[str, float], rule: Sweep) -> Score:
    """Compute the task loss and the drift beyond the rule's: means over tiny, med and max."""
    names = [key.removesuffix("/loss") for key in validated if key.endswith("/loss")]
    names = [name for name in names if name != "full"]
    if not names:
        raise DataError("no profile was validated")
    loss = sum(validated[f"{n}/loss"] for n in names) / len(names)
    slack = sum(max(0.0, validated[f"{n}/drift"] - rule.drift) for n in names) / len(names)
    return Score(loss + rule.slack * slack, loss, slack)


def _setting(recipe: Recipe, name: str) -> Any:
    """Return the value of a setting, by the names that `Recipe.changed` takes."""
    value: Any = recipe
    for part in setting_path(name):
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return value


def _validated(done: Trained, config: TrainConfig) -> dict[str, float]:
    """Compute loss and drift on the validation part, labels not smoothed in any point."""
    part = done.subject.in_batches(done.subject.validation)
    with evaluating(done.model):
        return validate(done.model, shown(done.history.profiles), part, loss_of(config.loss))


def _read(path: Path) -> dict[str, Any]:
    """Return what was written about a point."""
    try:
        kept = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(kept, dict) or not kept.keys() >= {"settings", "validated"}:
        raise DataError(f"{path} is not what was written: it has no settings, validated")
    return kept
