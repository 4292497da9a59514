"""One recipe from start to end: elastic, trained, compared with itself untrained, exported."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from t3c.convert import elasticize_, state_of
from t3c.errors import DataError
from t3c.evidence.original import write_original
from t3c.experiments.recipe import Recipe, Sweep
from t3c.exporter import export
from t3c.files import write_atomic
from t3c.nn.inputs import call, evaluating
from t3c.nn.view import at
from t3c.runtime.engines.protocol import Array
from t3c.spec import LayerPoint, Profile, ProfileChain
from t3c.train import History, Keep, TrainConfig, fit, reconstruct
from t3c.train.losses import Loss, loss_of
from t3c.train.targets import counted_shares
from t3c.train.validate import SHOWN
from t3c.zoo.subjects import SUBJECTS, Labelled, Subject, in_batches

RESULT = "result.json"
Z95 = 1.959963984540054
Say = Callable[[str], object]
Watch = Callable[[str, int, int], object]


@dataclass(frozen=True)
class View:
    """How a view did on the test part: loss and drift, and which samples it got right."""

    loss: float
    drift: float
    right: Array | None

    @property
    def accuracy(self) -> float | None:
        return None if self.right is None else float(self.right.mean())


@dataclass(frozen=True)
class Trained:
    """A recipe carried out: the model, its history, and one row for each view tested."""

    subject: Subject
    model: nn.Module
    history: History
    rows: list[dict[str, Any]]
    samples: int


def train_recipe(
    recipe: Recipe, out: Path, *, resume: bool = False, say: Say, watch: Watch
) -> Trained:
    """Make the subject elastic, train it, and test full and every profile, untrained beside it."""
    say(f"loading {recipe.subject}")
    subject = SUBJECTS[recipe.subject]()
    say(f"making it elastic, with factors that suit {len(subject.statistics) * 64} samples")
    elasticize_(subject.model, subject.example, recipe.elastic, calibration=subject.statistics)
    model, untrained = subject.model, copy.deepcopy(subject.model)
    out.mkdir(parents=True, exist_ok=True)
    config = recipe.train
    batches = subject.batches(recipe.batch, config.seed, recipe.samples)
    if recipe.blocks is not None:
        say("reconstructing block by block")
        reconstruct(model, batches, recipe.blocks, watch=lambda b, i, n: watch(b, i, n))
    say(f"training once for every profile: {config.steps} steps of {recipe.batch} samples")
    history = fit(
        model, batches, config, validation=in_batches(subject.validation), image=subject.image,
        keep=Keep(out, resume), on_step=told(config, watch),
    )  # fmt: skip
    say(f"testing on {len(subject.test[0])} samples that nothing was tuned on")
    rows = view_rows(model, untrained, history.profiles, subject.test, config, watch)
    payload = {"subject": subject.name, "samples": len(subject.test[0]), "profiles": rows}
    write_atomic(out / RESULT, json.dumps(payload, indent=1).encode())
    if recipe.export is not None:
        say("exporting")
        write_original(model, out / "original.onnx")
        export(
            model, out / f"{subject.name}.t3c", [subject.calibration], recipe.export,
            image=subject.image, classes=subject.classes, say=say, watch=watch,
        )  # fmt: skip
    return Trained(subject, model, history, rows, len(subject.test[0]))


def told(config: TrainConfig, watch: Watch) -> Callable[[int, Mapping[str, float]], object]:
    """Progress with the value of every term that weighs something."""

    def on_step(step: int, values: Mapping[str, float]) -> None:
        shown = " ".join(f"{name} {value:.3f}" for name, value in values.items() if value)
        watch(f"step {step + 1} of {config.steps}: {shown}", step + 1, config.steps)

    return on_step


def view_rows(
    model: nn.Module,
    untrained: nn.Module,
    profiles: ProfileChain,
    test: Labelled,
    config: TrainConfig,
    watch: Watch,
) -> list[dict[str, Any]]:
    """Full and every profile, smallest first: trained, untrained, and paired differences."""
    loss = loss_of(config.loss)
    plans = state_of(model).plan.layers
    shares = counted_shares(plans)
    views: list[Profile | None] = [*profiles, None]
    originals = outputs(state_of(model).original, None, test)
    rows: list[dict[str, Any]] = []
    found: list[View] = []
    for index, profile in enumerate(views):
        watch("testing", index + 1, len(views))
        trained, before = (
            tested(outputs(m, profile, test), originals, test[1], loss) for m in (model, untrained)
        )
        found.append(trained)
        taken = _shares(profile, shares)
        rows.append(
            {
                "name": "full" if profile is None else profile.name,
                "accuracy": trained.accuracy, "untrained": before.accuracy,
                "loss": trained.loss, "untrained_loss": before.loss,
                "drift": trained.drift, "untrained_drift": before.drift, **taken,
            }
        )  # fmt: skip
    for row, mine, above in zip(rows, found, [*found[1:], None], strict=True):
        row |= {"to_full": paired(mine, found[-1]), "to_next": above and paired(mine, above)}
    return rows


@torch.no_grad()
def outputs(model: nn.Module, profile: Profile | None, part: Labelled) -> Tensor:
    """What a view answers; weights are quantized as stored, activations are in float."""
    with evaluating(model), at(model, profile):
        return torch.cat([call(model, inputs) for inputs, _ in in_batches(part)])


def tested(answers: Tensor, originals: Tensor, target: Tensor, loss: Loss) -> View:
    """How answers did against the labels and against the original's."""
    change, size = (z.flatten(1).norm(dim=1) for z in (answers - originals, originals))
    drift = float((change / size.clamp_min(1e-12)).mean())
    right = (answers.argmax(-1) == target).numpy() if target.dim() == 1 else None
    return View(float(loss(answers, target)), drift, right)


def paired(mine: View, other: View) -> dict[str, float] | None:
    """The difference of two accuracies on the same samples, and its 95% interval."""
    if mine.right is None or other.right is None:
        return None
    difference = mine.right.astype(float) - other.right
    mean, error = float(difference.mean()), float(difference.std()) / math.sqrt(len(difference))
    return {"difference": mean, "low": mean - Z95 * error, "high": mean + Z95 * error}


def _shares(
    profile: Profile | None, shares: Callable[[str, LayerPoint], tuple[float, float, float]]
) -> dict[str, float]:
    """The counted work and bytes of a profile, as shares of the all-dense 8-bit network."""
    if profile is None:
        return {"flops": 1.0, "bytes": 1.0}
    taken = [shares(name, point) for name, point in profile.points.items()]
    return {"flops": sum(t[0] for t in taken), "bytes": sum(t[1] for t in taken)}


def sweep(recipe: Recipe, out: Path, *, say: Say, watch: Watch) -> list[dict[str, Any]]:
    """Train every point of the recipe's grid; rows with their scores, best first.

    A point that has its result in `out` already is not trained again, one that was stopped goes on.
    """
    grid, rule = recipe.grid(), recipe.sweep
    assert rule is not None
    rows = []
    for index, point in enumerate(grid):
        changed = {n: getattr(point.train, n) for n in rule.settings} | {"seed": point.train.seed}
        name = "-".join(f"{key}={value}" for key, value in changed.items())
        folder = out / name
        say(f"point {index + 1} of {len(grid)}: {name}")
        path = folder / "score.json"
        if not path.exists():
            done = train_recipe(point, folder, resume=True, say=say, watch=watch)
            last = done.history.validation[max(done.history.validation)]
            row = {"settings": changed, **score(last, rule)}
            write_atomic(path, json.dumps(row, indent=1).encode())
        rows.append(json.loads(path.read_bytes()))
    return sorted(rows, key=lambda row: row["score"])


def score(validated: Mapping[str, float], rule: Sweep) -> dict[str, float]:
    """The task loss and the drift beyond the rule's, means over tiny, med and max (paper E.2)."""
    names = [n for n in SHOWN if f"{n}/loss" in validated]
    if not names:
        raise DataError(f"nothing was validated at {', '.join(SHOWN)}")
    loss = sum(validated[f"{n}/loss"] for n in names) / len(names)
    slack = sum(max(0.0, validated[f"{n}/drift"] - rule.drift) for n in names) / len(names)
    return {"score": loss + rule.slack * slack, "loss": loss, "slack": slack}
