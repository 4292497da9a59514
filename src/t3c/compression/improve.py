"""Improve an elastic model before the export: round better, and train once for every profile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from t3c.compression.choice import Choice, best, choices_of
from t3c.compression.data import Data
from t3c.compression.elastic import keep_elastic, restore_elastic
from t3c.compression.judging import judge_of, view_losses
from t3c.compression.place import TINY_TIMES
from t3c.compression.rounding import SETTLED, VIEWS, compare_roundings, drift_on
from t3c.compression.source import Task
from t3c.compression.stages import Stage
from t3c.compression.teach import Lesson, Plan, Way, probe, teach
from t3c.convert import settle_, state_of
from t3c.engines.openvino import OpenVINO
from t3c.evidence.served import answers, run_of
from t3c.exporter import Timed
from t3c.exporter.allocate import measured_shares
from t3c.spec import Goal
from t3c.train.targets import Path as Route
from t3c.train.targets import find_path

if TYPE_CHECKING:
    from t3c.compression.pipeline import Compression

KEPT, ANSWERS = "elastic.safetensors", "answers.npy"
CANDIDATES = 8  # profiles asked of the exporter; it measures twice as many to choose from
LEAST_EPOCHS = 2.0  # that training goes through its samples, for the original's answers to be kept
ROUNDED = 32  # validation samples that roundings are compared on
ANSWERED = 32  # samples that the original is asked together
SIZE_WEIGHT = 0.2  # of bytes against time: profiles are placed by time, size is a by-product
AIMS = (0.1, 0.15, 0.22, 0.32, 0.5, 0.8)  # first-order drifts that the smallest profile may have
AIMED = 64  # samples that they are judged on


def goal_of(worst_drift: float) -> Goal:
    """Return what is aimed at: profiles placed by time, sizes being a by-product."""
    return Goal(profiles=CANDIDATES, worst_drift=worst_drift, size_weight=SIZE_WEIGHT)


def round_weights(run: Compression, timing: Stage) -> Stage:
    """Round the weights of linear layers so that they drift least on validation samples."""
    model, batches = run.source.model, run.statistics()

    def choose(folder: Path) -> Mapping[str, Any]:
        validation, plain = _parts(run)[1].at(slice(0, ROUNDED)), None
        if run.plain is not None:
            assert isinstance(run.engine, OpenVINO)
            int8 = run_of(run.engine.compile_read(run.plain.model))
            plain = drift_on(int8, run.answered(), validation)
        choice = compare_roundings(model, batches, validation, plain)
        return {"int8_drift": plain, "choices": [] if choice is None else [choice.model_dump()]}

    chosen = run.decide("round", {"of": timing.key}, choose)
    if not any(choice.taken == SETTLED for choice in choices_of(chosen.result)):
        return chosen

    def make(folder: Path) -> Mapping[str, Any]:
        settle_(model, batches, VIEWS)
        keep_elastic(model, folder / KEPT)
        return {}

    stage = run.stages.run("settle", {"of": chosen.key}, make)
    restore_elastic(model, stage.folder / KEPT)
    return Stage(stage.folder, stage.key, chosen.result)


def _parts(run: Compression) -> tuple[Data, Data]:
    """Return the samples that are trained on, and those that training is validated on."""
    train = run.parts.train
    held = max(8, min(128, len(train) // 10))
    return train.at(slice(held, None)), train.at(slice(held))


def train_once(run: Compression, timed: Timed, before: Stage) -> Stage:
    """Aim at the profiles that will be shipped, probe, train, keep what validates better."""
    model, training = run.source.model, _parts(run)
    shares = measured_shares(state_of(model).plan.layers, timed.layers)
    path = find_path(model, training[1].inputs, SIZE_WEIGHT, shares)
    known = _answers(run, training[0])

    def lesson(worst_drift: float) -> Lesson:
        goal = goal_of(worst_drift)
        seed, task = run.options.seed, run.source.task
        return Lesson(model, *training, task, goal, path.targets(goal), seed, known)

    def aim(folder: Path) -> Mapping[str, Any]:
        choice = _aim(run, training[1], path)
        worst = float(choice.taken)
        seconds = run.plan.left(time.monotonic() - run.plan.started)
        found = probe(lesson(worst), seconds, run.show.watch)
        return {
            "worst_drift": worst,
            "steps": found.steps,
            "way": asdict(found.way),
            "choices": [choice.model_dump(), found.choice.model_dump()],
        }

    aimed = run.decide("probe", {"of": before.key}, aim)
    worst = aimed.result["worst_drift"]
    planned = Plan(aimed.result["steps"], Way(**aimed.result["way"]), choices_of(aimed.result)[-1])

    def make(folder: Path) -> Mapping[str, Any]:
        if not planned.steps:
            return {"choices": [], "trained": False}
        choice = teach(lesson(worst), planned, folder / "run", before.result["int8_drift"])
        keep_elastic(model, folder / KEPT)
        return {"choices": [choice.model_dump()], "trained": True}

    stage = run.stages.run("train", {"of": aimed.key, "plan": repr(planned)}, make)
    run.choices += choices_of(stage.result)
    if stage.result["trained"]:
        restore_elastic(model, stage.folder / KEPT)
    return Stage(stage.folder, stage.key, {**stage.result, "goal": worst})


def _answers(run: Compression, train: Data) -> Tensor | None:
    """Return what the original answers to the training samples, if they come again and again.

    Training then need not ask it in every step, a quarter of its time.
    """
    again = run.source.task is not Task.LANGUAGE and run.plan.epochs >= LEAST_EPOCHS
    teacher = run.decide("teacher", run.made_from, lambda folder: {"kept": again})
    if not teacher.result["kept"]:
        return None

    def make(folder: Path) -> Mapping[str, Any]:
        run.show.say(f"asking the original for {len(train)} answers")
        np.save(folder / ANSWERS, answers(run.answered(), train.arrays(), ANSWERED))
        return {}

    stage = run.stages.run("answers", run.made_from, make)
    return torch.from_numpy(np.load(stage.folder / ANSWERS, allow_pickle=False))


def _aim(run: Compression, validation: Data, path: Route) -> Choice:
    """Return the drift that the smallest profile may have: where it loses what tiny may."""
    validation = validation.at(slice(0, AIMED))
    judge = judge_of(run.source, validation, run.options.max_drop)
    wanted = 2 * TINY_TIMES * judge.limit  # training and rounding move it; placement decides
    smallest = [path.profile(path.within(worst), "tiny") for worst in AIMS]
    losses = view_losses(run.source.model, smallest, validation, judge)
    before, tried = next(losses).mean(), dict[str, float]()
    for place, worst in enumerate(AIMS):
        run.show.watch(f"judging drifts up to {worst:g}", place, len(AIMS))
        lost = float(next(losses).mean() - before)
        tried[f"{worst:g}"] = abs(lost - wanted)
        if lost > wanted:
            break
    return best(
        "drift that the smallest profile may have", tried, "off the loss aimed at",
        f"{wanted:.3g}",
    )  # fmt: skip
