"""Train once for every profile, within the time that is left; kept only where validation gains."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from t3c.certify.drift import relative_drift
from t3c.compression.choice import Choice
from t3c.compression.data import Data
from t3c.compression.source import Task
from t3c.convert import state_of
from t3c.nn.inputs import Inputs, call, evaluating, select, tensors
from t3c.nn.view import at
from t3c.spec import Goal, Profile
from t3c.train import Keep, Objective, TrainConfig, fit
from t3c.train.lengths import lengths_of, like_lengths, trimmed
from t3c.train.targets import Targets
from t3c.train.validate import shown

PROBE = 0.12  # of the time for training is spent comparing optimizers and rates
PROBE_STEPS = 16  # at the least, for each way: fewer tell nothing
TIMED_STEPS = 6
LEAST_SECONDS = 20.0  # to try anything at all
VALIDATIONS = 4  # of `teach`
GUARD = 1.05  # of plain int8's drift, what the largest profile may drift
LEAST_STEPS = 16  # worth a run of its own
VALIDATED = 128  # samples that drift is validated on
# Samples of a step; with fewer than the default, weights are put together too often.
BATCH, DEFAULT_BATCH = {Task.LANGUAGE: 8}, 32
LOSS = {Task.LANGUAGE: "language_modelling", Task.EMBEDDING: "regression"}

Watch = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Way:
    """An optimizer and its learning rate."""

    optimizer: Literal["adamw", "sgd"]
    learning_rate: float

    def __str__(self) -> str:
        return f"{self.optimizer} at {self.learning_rate:g}"


# As many as there is time to try, in this order: benchmarks/trials.py compares them on ResNet-50.
WAYS = (
    Way("adamw", 3e-5), Way("sgd", 2e-5), Way("adamw", 1e-4), Way("sgd", 6e-5),
    Way("adamw", 3e-4), Way("sgd", 2e-4),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How the training will go: decided by a probe, and kept so that it can be replayed."""

    steps: int
    way: Way
    choice: Choice


@dataclass
class Batches:
    """Shuffled batches of inputs, with the answers if they are known; no labels.

    Texts come with others of like length, and without the padding that none of them needs.
    """

    inputs: Inputs
    answers: Tensor | None
    size: int
    seed: int
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which time the samples are gone through: their order follows from it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Inputs] | tuple[Inputs, Tensor]]:
        lengths = lengths_of(self.inputs)
        if lengths is None:
            lengths = np.zeros(len(tensors(self.inputs)[0]), np.int64)
        for rows in like_lengths(lengths, self.size, self.seed, self.epoch):
            chosen = torch.from_numpy(rows)
            inputs = trimmed(select(self.inputs, chosen))
            yield (inputs,) if self.answers is None else (inputs, self.answers[chosen])


@dataclass(frozen=True)
class Lesson:
    """A model with the data it is trained on and the profiles aimed at.

    `answers` are what the original answers to the training samples (n, ...); without them it is
    asked in every step.
    """

    model: nn.Module
    train: Data
    validation: Data
    task: Task
    goal: Goal
    targets: Targets
    seed: int
    answers: Tensor | None = None

    def batches(self) -> Batches:
        """Return the training samples in batches."""
        size = min(BATCH.get(self.task, DEFAULT_BATCH), len(self.train))
        return Batches(self.train.inputs, self.answers, size, self.seed)

    def config(self, steps: int, way: Way) -> TrainConfig:
        """Return how it is trained: at the profiles aimed at, towards the original's answers."""
        return TrainConfig(
            steps=steps, optimizer=way.optimizer, learning_rate=way.learning_rate,
            weight_decay=0.0, seed=self.seed, precision="auto",
            loss=LOSS.get(self.task, "classification"), curriculum="aimed", goal=self.goal,
            teacher="original" if self.answers is None else "targets",
            objective=Objective(augment=0.0, tail=0.0),
        )  # fmt: skip

    def profiles(self) -> list[Profile]:
        """Return the profiles that validation looks at."""
        chain = self.targets.profiles
        below = [profile for profile in shown(chain) if profile is not chain.top]
        return below or [chain.top]


@torch.no_grad()
def drift_of(model: nn.Module, profiles: Sequence[Profile], data: Data) -> float:
    """Return the mean relative drift of some profiles on validation samples."""
    original, total, count = state_of(model).original, 0.0, 0
    with evaluating(model):
        for start in range(0, min(len(data), VALIDATED), 16):
            inputs = select(data.inputs, slice(start, min(start + 16, VALIDATED)))
            wanted = call(original, inputs).cpu().numpy()
            for profile in profiles:
                with at(model, profile):
                    drifts = relative_drift(call(model, inputs).cpu().numpy(), wanted)
                total, count = total + float(drifts.sum()), count + len(drifts)
    return total / count


def probe(lesson: Lesson, seconds: float, watch: Watch) -> Plan:
    """Try ways on copies of the model for a few steps each; plan the steps the time allows."""
    if seconds < LEAST_SECONDS:
        why = f"the plan leaves {seconds:.0f} s for it"
        return Plan(0, WAYS[0], _choice({}, "untrained", why))
    profiles, started = lesson.profiles(), time.perf_counter()
    tried = {"untrained": drift_of(lesson.model, profiles, lesson.validation)}
    validating = time.perf_counter() - started
    step = _step_seconds(lesson)
    ways, steps, left = _affordable(seconds, step, validating)
    if not ways or left < LEAST_STEPS:
        why = f"{seconds:.0f} s allow {left} steps of {step:.1f} s: too few"
        return Plan(0, WAYS[0], _choice(tried, "untrained", why))
    for place, way in enumerate(ways):
        watch(f"trying {way}", place, len(ways))
        trial = replace(lesson, model=copy.deepcopy(lesson.model))
        fit(trial.model, trial.batches(), trial.config(steps, way), targets=lesson.targets)
        tried[str(way)] = drift_of(trial.model, profiles, lesson.validation)
    taken = min(tried, key=tried.__getitem__)
    if taken == "untrained":
        return Plan(0, WAYS[0], _choice(tried, taken, f"none improved in {steps} steps"))
    chosen = next(way for way in ways if str(way) == taken)
    return Plan(left, chosen, _choice(tried, taken, f"after {steps} steps each"))


def _affordable(seconds: float, step: float, validating: float) -> tuple[tuple[Way, ...], int, int]:
    """Return the ways there is time to try, the steps of each, and the steps left for training."""
    for count in range(len(WAYS), 0, -1):
        rest = max(0.0, seconds - validating * (1 + count + VALIDATIONS))
        steps = int(PROBE * rest / step / count)
        if steps >= PROBE_STEPS or count == 1:
            break
    return WAYS[: count * (steps >= PROBE_STEPS)], steps, int((1 - PROBE) * rest / step)


def teach(lesson: Lesson, plan: Plan, folder: Path, int8: float | None) -> Choice:
    """Train the model in place; where validation drifts more than before, it is as it was.

    So it is where the largest profile came to drift more than plain `int8` may be exceeded by.
    """
    profiles, top = lesson.profiles(), [lesson.targets.profiles.top]
    before = drift_of(lesson.model, profiles, lesson.validation)
    allowed = max(GUARD * (int8 or 0.0), drift_of(lesson.model, top, lesson.validation))
    saved = {name: value.detach().clone() for name, value in lesson.model.named_parameters()}
    fit(
        lesson.model, lesson.batches(), lesson.config(plan.steps, plan.way),
        keep=Keep(folder, resume=True), targets=lesson.targets,
    )  # fmt: skip
    after = drift_of(lesson.model, profiles, lesson.validation)
    tried = {"untrained": before, f"{plan.steps} steps of {plan.way}": after}
    largest = drift_of(lesson.model, top, lesson.validation)
    if after >= before or largest > allowed:
        with torch.no_grad():
            for name, value in lesson.model.named_parameters():
                value.copy_(saved[name])
        why = "rolled back"
        if after < before:
            why += f": max drifts {largest:.3g} after, {allowed:.3g} is allowed"
        return _choice(tried, "untrained", why)
    return _choice(tried, min(tried, key=tried.__getitem__), "")


def _choice(tried: dict[str, float], taken: str, why: str) -> Choice:
    return Choice(what="training", tried=tried, unit="drift on validation", taken=taken, why=why)


def _step_seconds(lesson: Lesson) -> float:
    """Return what a step takes, in the mean of some after the first: texts differ in length."""
    trial = replace(lesson, model=copy.deepcopy(lesson.model))
    ends: list[float] = []
    fit(
        trial.model, trial.batches(), trial.config(1 + TIMED_STEPS, WAYS[0]),
        targets=lesson.targets, on_step=lambda step, _: ends.append(time.perf_counter()),
    )  # fmt: skip
    return max(1e-3, (ends[-1] - ends[0]) / TIMED_STEPS)
