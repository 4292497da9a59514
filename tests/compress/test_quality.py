"""Quality sample by sample: what counts as lost for each task, and paired intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from t3c.compress.quality import Judge, Metric, judge_for, nearest, paired_interval, token_losses
from t3c.compress.source import Task
from t3c.errors import SpecError


def test_each_task_is_judged_by_its_own_metric() -> None:
    labels, ids = np.array([0, 1]), np.ones((2, 4), np.int64)
    assert judge_for(Task.IMAGES, labels, None, None, (10,)).metric is Metric.ACCURACY
    assert judge_for(Task.IMAGES, None, None, None, (10,)).metric is Metric.AGREEMENT
    assert judge_for(Task.LANGUAGE, None, ids, None, (4, 9)).metric is Metric.PERPLEXITY
    assert judge_for(Task.EMBEDDING, labels, None, None, (384,)).metric is Metric.NEIGHBOURS
    assert (
        judge_for(Task.OUTPUTS, np.array([0.5, 1.5]), None, None, (1,)).metric is Metric.NEIGHBOURS
    )
    assert judge_for(Task.IMAGES, labels, None, 0.02, (10,)).max_drop == 0.02
    for wrong in (0.0, 1.0, math.nan):
        with pytest.raises(SpecError, match="max_drop must be between 0 and 1"):
            judge_for(Task.IMAGES, labels, None, wrong, (10,))


def test_wrong_and_changed_answers() -> None:
    original = np.array([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]])
    answers = np.array([[1.0, 2.0], [0.0, 1.0], [3.0, 0.0]])
    right = Judge(Metric.ACCURACY, 0.005, np.array([1, 1, 0]))
    assert right.losses(answers, original).tolist() == [0, 0, 0]
    assert right.losses(original, original).tolist() == [1, 0, 0]
    changed = Judge(Metric.AGREEMENT, 0.01)
    assert changed.losses(answers, original).tolist() == [1, 0, 0]
    assert changed.value(changed.losses(answers, original)) == pytest.approx(2 / 3)
    assert changed.beyond_int8
    assert not right.beyond_int8


def test_expected_losses_have_the_mean_of_losses_and_less_variance() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4000, 5)) * 2
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = np.array([rng.choice(5, p=row) for row in chances])
    answers = logits + rng.normal(size=logits.shape) * 0.5
    sharp = logits * 3  # as trained networks are: too sure of themselves
    judge = Judge(Metric.ACCURACY, 0.005, labels)
    real = judge.losses(answers, sharp) - judge.losses(sharp, sharp)
    expected = judge.expected_losses(answers, sharp) - judge.expected_losses(sharp, sharp)
    assert (expected >= 0).all()
    assert expected.std() < 0.5 * real.std()
    low, high = paired_interval(judge.losses(answers, sharp), judge.losses(sharp, sharp), errors=4)
    assert low < expected.mean() < high


def test_perplexity_is_of_the_tokens_and_its_limit_is_its_growth() -> None:
    ids = np.array([[0, 1, 2], [0, 2, 1]])
    logits = np.zeros((2, 3, 4))
    judge = Judge(Metric.PERPLEXITY, 0.02, ids)
    losses = judge.losses(logits, logits)
    assert judge.value(losses) == pytest.approx(4.0)
    assert judge.value(losses + judge.limit) == pytest.approx(4.0 * 1.02)
    sure = np.full((1, 3, 4), -100.0)
    sure[0, 0, 1] = sure[0, 1, 2] = 100.0
    assert token_losses(sure, ids[:1])[0] == pytest.approx(0.0, abs=1e-9)


def test_neighbours_are_by_angle_and_never_oneself() -> None:
    vectors = np.array([[1.0, 0.0], [10.0, 1.0], [0.0, 1.0], [0.1, 5.0]])
    assert nearest(vectors).tolist() == [1, 0, 3, 2]
    judge = Judge(Metric.NEIGHBOURS, 0.01)
    assert judge.losses(vectors, vectors).sum() == 0


def test_intervals_narrow_with_samples_and_are_never_empty() -> None:
    same = np.zeros(100)
    low, high = paired_interval(same, same)
    assert low < 0 < high
    wide = paired_interval(np.eye(1, 100)[0], same)
    narrow = paired_interval(np.tile(np.eye(1, 100)[0], 100), np.zeros(10_000))
    assert narrow[1] - narrow[0] < wide[1] - wide[0]
    assert narrow[0] < 0.01 < narrow[1]
