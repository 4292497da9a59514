"""Quality sample by sample: what counts as lost for each task, and paired intervals."""

from __future__ import annotations

import numpy as np
import pytest

from t3c.evidence.quality import Judge, nearest, paired_interval, token_losses
from t3c.spec import Metric


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
