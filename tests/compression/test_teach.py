"""Training by the door: batches, and what is put back where validation says so."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from t3c.compression import teach as module
from t3c.compression.choice import Choice
from t3c.compression.data import Data
from t3c.compression.source import Task
from t3c.compression.teach import WAYS, Lesson, Plan, Way, teach
from t3c.spec import Goal
from t3c.train.targets import find_targets
from t3c.zoo.digits import Digits

PLAN = Plan(1, WAYS[0], Choice(what="training", tried={}, unit="", taken=""))


@pytest.fixture
def lesson(elastic: nn.Module, digits: Digits) -> Lesson:
    model, goal = copy.deepcopy(elastic), Goal(worst_drift=0.5)
    train, validation = Data(digits.train[0][:64]), Data(digits.calibration[0][:32])
    targets = find_targets(model, train.inputs, goal)
    return Lesson(model, train, validation, Task.OUTPUTS, goal, targets, 1)


def moving(model: nn.Module, *_: Any, **__: Any) -> None:
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.01)


@pytest.mark.parametrize(
    ("drifts", "int8", "why"),
    [
        ((0.5, 0.1, 0.4, 0.1), None, ""),
        ((0.5, 0.1, 0.4, 0.3), 0.4, ""),
        ((0.5, 0.1, 0.4, 0.3), 0.2, "rolled back: max drifts 0.3 after, 0.21 is allowed"),
        ((0.5, 0.1, 0.4, 0.3), None, "rolled back: max drifts 0.3 after, 0.1 is allowed"),
        ((0.5, 0.1, 0.5, 0.1), None, "rolled back"),
    ],
)
def test_training_is_kept_where_profiles_gain_and_max_stays_as_good_as_int8(
    lesson: Lesson, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    drifts: tuple[float, ...], int8: float | None, why: str,
) -> None:  # fmt: skip
    given: Iterator[float] = iter(drifts)
    monkeypatch.setattr(module, "drift_of", lambda *_: next(given))
    monkeypatch.setattr(module, "fit", moving)
    before = copy.deepcopy(lesson.model.state_dict())
    choice = teach(lesson, PLAN, tmp_path, int8)
    assert choice.why == why
    kept = all(torch.equal(value, before[n]) for n, value in lesson.model.state_dict().items())
    assert kept == bool(why)
    assert (choice.taken == "untrained") == bool(why)


@pytest.mark.parametrize(
    ("seconds", "ways", "steps"),
    [(10, 0, 0), (250, 1, 20), (800, 5, 16), (1000, 6, 17), (10_000, 6, 197)],
)
def test_as_many_ways_are_tried_as_there_is_time_for(seconds: float, ways: int, steps: int) -> None:
    """Each has enough steps to tell something; what is left is for training."""
    tried, found, left = module._affordable(seconds, 1.0, 10.0)
    assert tried == WAYS[:ways]
    assert (found, left) == pytest.approx((steps, 0.88 * seconds), rel=0.5, abs=40)
    assert not tried or found >= module.PROBE_STEPS
    assert len(tried) * found <= module.PROBE * seconds


def test_batches_follow_from_seed_and_epoch_and_carry_the_answers(lesson: Lesson) -> None:
    images = lesson.train.inputs
    assert isinstance(images, torch.Tensor)
    answers = images.flatten(1).sum(dim=1, keepdim=True)
    known = Lesson(**{**vars(lesson), "answers": answers})
    batches = known.batches()
    first = list(batches)
    assert [len(batch[0]) for batch in first] == [32, 32]
    for inputs, given in first:  # type: ignore[misc]
        torch.testing.assert_close(given, inputs.flatten(1).sum(dim=1, keepdim=True))  # type: ignore[union-attr]
    batches.set_epoch(1)
    assert not torch.equal(first[0][0], next(iter(batches))[0])  # type: ignore[arg-type]
    assert torch.equal(first[0][0], next(iter(known.batches()))[0])  # type: ignore[arg-type]
    assert known.config(3, Way("adamw", 1e-4)).teacher == "targets"
    assert lesson.config(3, Way("sgd", 1e-4)).teacher == "original"
    assert all(len(batch) == 1 for batch in lesson.batches())
