from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from t3c.errors import DataError, SpecError
from t3c.train.losses import (
    LOSSES,
    classification,
    language_modelling,
    loss_of,
    regression,
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(2, 7), st.floats(0, 0.9), st.integers(0, 99))
def test_classes_and_shares_agree(n: int, classes: int, smoothing: float, seed: int) -> None:
    logits = torch.randn(n, classes, generator=seeded(seed))
    target = torch.randint(classes, (n,), generator=seeded(seed))
    hard = classification(logits, target, smoothing)
    torch.testing.assert_close(hard, F.cross_entropy(logits, target, label_smoothing=smoothing))
    torch.testing.assert_close(hard, classification(logits, target.int(), smoothing))
    shares = F.one_hot(target, classes).float()
    torch.testing.assert_close(hard, classification(logits, shares, smoothing))
    smooth = (1 - smoothing) * shares + smoothing / classes
    by_hand = -(smooth * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(hard, by_hand)


def test_mixed_shares_are_mixed_losses() -> None:
    logits = torch.randn(3, 4, generator=seeded(0))
    one, other = torch.tensor([0, 1, 2]), torch.tensor([3, 3, 1])
    mixed = 0.3 * F.one_hot(one, 4).float() + 0.7 * F.one_hot(other, 4).float()
    expected = 0.3 * classification(logits, one) + 0.7 * classification(logits, other)
    torch.testing.assert_close(classification(logits, mixed), expected)
    torch.testing.assert_close(classification(logits, mixed.double()), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_each_token_is_predicted_from_those_before(smoothing: float) -> None:
    logits = torch.randn(2, 5, 7, generator=seeded(1))
    tokens = torch.randint(7, (2, 5), generator=seeded(2))
    tokens[0, 3] = tokens[1, 0] = tokens[1, 4] = -100
    terms = [
        F.cross_entropy(logits[i, t], tokens[i, t + 1], label_smoothing=smoothing)
        for i in range(2)
        for t in range(4)
        if tokens[i, t + 1] != -100
    ]
    assert len(terms) == 6
    loss = language_modelling(logits, tokens, smoothing)
    torch.testing.assert_close(loss, torch.stack(terms).mean())
    other = tokens.clone()
    other[:, 0] = 6  # nothing comes before the first token
    assert torch.equal(loss, language_modelling(logits, other, smoothing))


def test_a_model_that_copies_its_input_is_not_rewarded() -> None:
    tokens = torch.tensor([[0, 1, 2, 3]])
    copies = 50 * F.one_hot(tokens, 5).float()
    foresees = 50 * F.one_hot(tokens.roll(-1, 1), 5).float()
    assert language_modelling(copies, tokens) > 40
    assert language_modelling(foresees, tokens) < 1e-6


@pytest.mark.parametrize("shape", [(2, 4), (2, 1)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_nothing_to_predict_is_zero_with_a_gradient(
    shape: tuple[int, int], smoothing: float
) -> None:
    logits = torch.randn(*shape, 3, generator=seeded(0), requires_grad=True)
    tokens = torch.full(shape, -100)
    tokens[:, 0] = 1
    loss = language_modelling(logits, tokens, smoothing)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_regression_is_a_mean_of_squares_without_broadcasting() -> None:
    outputs, target = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 4, 1])
    assert regression(outputs, target).item() == pytest.approx(13 / 3)
    assert regression(outputs, target[:, None]).item() == pytest.approx(13 / 3)
    with pytest.raises(DataError, match="one shape"):
        regression(outputs[:, 0], target[:, None])
    with pytest.raises(DataError, match="one shape"):
        regression(outputs[:0], target[:0])


def test_gradients_point_to_the_target() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    classification(logits, torch.tensor([2, 0])).backward()
    assert logits.grad is not None
    assert (logits.grad < 0).tolist() == [[False, False, True], [True, False, False]]


def test_losses_by_name() -> None:
    logits, target = torch.randn(4, 3, generator=seeded(0)), torch.tensor([0, 2, 1, 1])
    for name in ("classification", "sequence_classification"):
        expected = F.cross_entropy(logits, target, label_smoothing=0.1)
        torch.testing.assert_close(loss_of(name, 0.1)(logits, target), expected)
        torch.testing.assert_close(LOSSES[name](logits, target, 0.1), expected)
    assert not math.isclose(float(loss_of("classification")(logits, target)), float(expected))
    assert loss_of("regression")(logits, logits + 2).item() == pytest.approx(4)
    with pytest.raises(SpecError, match=r"one of classification, .* got 'hinge'"):
        loss_of("hinge")


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, math.nan])
def test_smoothing_has_its_range(smoothing: float) -> None:
    with pytest.raises(SpecError, match="smoothing must be in"):
        loss_of("classification", smoothing)
    with pytest.raises(SpecError, match="smoothing must be in"):
        classification(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), smoothing)
    with pytest.raises(SpecError, match="no classes to smooth"):
        regression(torch.zeros(1), torch.zeros(1), smoothing)


@pytest.mark.parametrize(
    ("logits", "target", "message"),
    [
        ((4, 3), torch.tensor([0, 1, 2]), r"logits \(4, 3\) need targets \(4,\) or \(4, 3\)"),
        ((4, 3), torch.tensor(1), r"got \(\)"),
        ((4, 3), torch.zeros(4, 2), r"got \(4, 2\)"),
        ((4, 3), torch.tensor([0, 1, 2, 3]), "classes are 0 to 2, got the label 3"),
        ((4, 3), torch.tensor([0, 1, -100, 2]), "classes are 0 to 2, got the label -100"),
        ((4, 3), torch.zeros(4), "classes are integers, got torch.float32"),
        ((4, 2, 3), torch.zeros(4), r"logits \(n, classes\), got \(4, 2, 3\)"),
        ((0, 3), torch.zeros(0, dtype=torch.long), r"got \(0, 3\)"),
    ],
)
def test_targets_that_do_not_fit(
    logits: tuple[int, ...], target: torch.Tensor, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        classification(torch.zeros(logits), target)


def test_tokens_that_do_not_fit() -> None:
    with pytest.raises(DataError, match=r"got \(2, 4, 5\) and \(2, 3\)"):
        language_modelling(torch.zeros(2, 4, 5), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(DataError, match="classes are 0 to 4, got the label 5"):
        language_modelling(torch.zeros(1, 2, 5), torch.tensor([[0, 5]]))
