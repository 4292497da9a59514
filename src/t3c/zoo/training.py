"""One recipe from start to end: elastic, trained, compared with itself untrained, exported."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from t3c.convert import elasticize_, settle_, smooth_
from t3c.errors import DataError, TrainError
from t3c.evidence.original import write_original
from t3c.exporter import ExportConfig, Timed, export
from t3c.exporter.content import topology
from t3c.files import write_atomic, writing
from t3c.spec import TextSpec
from t3c.train import History, Keep, fit, reconstruct
from t3c.train.processes import Processes
from t3c.train.run import to_resume
from t3c.train.targets import find_targets
from t3c.zoo.recipe import Recipe
from t3c.zoo.subjects import SUBJECTS, Subject
from t3c.zoo.views import ViewRow, Watch, view_rows

RESULT, RECIPE, SPENT = "result.json", "recipe.json", "seconds"
BLOCK_SAMPLES = 512  # that blocks are reconstructed on: their inputs are held in memory
RECONSTRUCTED = "reconstructed.safetensors"
# What has to be the same for a run to go on.
SAME = ("subject", "batch", "samples", "smooth", "elastic", "settle", "blocks")
Say = Callable[[str], object]


@dataclass(frozen=True)
class Trained:
    """A recipe carried out: the model, its history, and one row for each view tested.

    `seconds` were spent on training, by all runs that had a part in it; loading, making the model
    elastic and testing are not in them. Of several processes only the main one tests and has
    rows, and none where no test is wanted.
    """

    subject: Subject
    model: nn.Module
    history: History
    seconds: float
    rows: list[ViewRow]
    samples: int


def train_recipe(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    test: bool = True,
    validated: bool = True,
    say: Say,
    watch: Watch,
) -> Trained:
    """Make the subject elastic, train it, and test full and every profile, untrained beside it.

    Where it is not `validated` on the way, all its time is that of training.
    """
    begun = _begun(recipe, out, resume, say)
    say(f"loading {recipe.subject}")
    subject = SUBJECTS[recipe.subject]()
    if recipe.smooth:
        smooth_(subject.model, subject.statistics)
    say(f"making it elastic, with factors that suit {subject.observed} samples")
    elasticize_(subject.model, subject.example, recipe.elastic, calibration=subject.statistics)
    if recipe.settle:
        rounded = settle_(subject.model, subject.statistics, recipe.settle)
        say(f"rounded {len(rounded)} linear layers with second-order compensation")
    if recipe.export is not None:
        topology(subject.model, subject.axes)  # what cannot be exported is known before training
    model, untrained = subject.model, copy.deepcopy(subject.model)
    config = recipe.train
    batches = subject.batches(recipe.batch, config.seed, recipe.samples)
    with _timed(out):
        _reconstruct(recipe, subject, out, begun, say)
        say(f"training once for every profile: {config.steps} steps of {recipe.batch} samples")
        history = fit(
            model, batches, config,
            validation=subject.in_batches(subject.validation) if validated else None,
            image=subject.image, keep=Keep(out, resume),
        )  # fmt: skip
    seconds = _spent(out)
    if not (test and Processes().main):
        return Trained(subject, model, history, seconds, [], 0)
    say(f"testing on {len(subject.test[0])} samples that nothing was tuned on")
    rows = view_rows(model, untrained, history.profiles, subject, config, watch)
    payload = {
        "subject": subject.name,
        "samples": len(subject.test[0]),
        "profiles": [asdict(row) for row in rows],
    }
    write_atomic(out / RESULT, json.dumps(payload, indent=1).encode())
    if recipe.export is not None:
        say("exporting")
        export_subject(
            subject, model, recipe.export, out / "original.onnx", out / f"{subject.name}.t3c"
        )
    return Trained(subject, model, history, seconds, rows, len(subject.test[0]))


def export_subject(
    subject: Subject,
    model: nn.Module,
    config: ExportConfig,
    original: Path,
    path: Path,
    *,
    timed: Timed | None = None,
) -> None:
    """Write a subject's trained model as an artifact, and its original beside it."""
    write_original(model, original, axes=subject.axes)
    export(
        model, path, [subject.calibration], config, name=subject.name, image=subject.image,
        classes=subject.classes, axes=subject.axes, timed=timed,
        tokenizer=subject.text.tokenizer if subject.text else None,
        text=TextSpec(subject.text.bos) if subject.text else None,
    )  # fmt: skip


@contextmanager
def _timed(out: Path) -> Iterator[None]:
    """Add the time within to that of the run so far, even where it is stopped."""
    before, started = _spent(out), time.perf_counter()
    try:
        yield
    finally:
        if Processes().main:
            spent = before + time.perf_counter() - started
            write_atomic(out / SPENT, str(spent).encode(), TrainError)


def _spent(out: Path) -> float:
    path = out / SPENT
    return float(path.read_text()) if path.exists() else 0.0


def _begun(recipe: Recipe, out: Path, resume: bool, say: Say) -> bool:
    """Whether `out` holds a run to go on with, which has to be of the same recipe."""
    path, told = out / RECIPE, {name: repr(getattr(recipe, name)) for name in SAME}
    checkpoint = to_resume(Keep(out, resume), say)
    if checkpoint is None:
        with writing(out, TrainError):
            out.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(told, indent=1).encode(), TrainError)
        return False
    if path.exists():  # the trainer sees to its own settings
        before = _read(path)
        for name, now in told.items():
            if before[name] != now:
                raise TrainError(f"{out} is of another recipe: {name} {before[name]}, not {now}")
    say(f"going on from {checkpoint.name} of {out}")
    return True


def _reconstruct(
    recipe: Recipe,
    subject: Subject,
    out: Path,
    begun: bool,
    say: Say,
) -> None:
    """Reconstruct block by block, if that is asked for; a run begun starts from what it had."""
    path = out / RECONSTRUCTED
    if recipe.blocks is None:
        return
    parameters = dict(subject.model.named_parameters())
    if begun:
        try:
            kept = load(path.read_bytes())
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(kept[name])
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise TrainError(f"{path} is not what the run started from: {error}") from error
        return
    say("reconstructing block by block")
    # Batches of their own: those of the training begin where they begin without blocks.
    count = min(recipe.samples or BLOCK_SAMPLES, BLOCK_SAMPLES)
    batches = subject.batches(recipe.batch, recipe.train.seed, count)
    targets = find_targets(subject.model, subject.train[0], recipe.train.goal).profiles
    reconstruct(subject.model, batches, recipe.blocks, profiles=list(targets))
    write_atomic(path, save({n: p.detach().contiguous() for n, p in parameters.items()}))


def _read(path: Path) -> dict[str, Any]:
    """Return what was written about the recipe of a run."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not found.keys() >= set(SAME):
        raise DataError(f"{path} is not what was written: it has no {', '.join(SAME)}")
    return found
