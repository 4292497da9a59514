"""Pruning: exactly so many zeros, which are there in what runs, and the best are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lab.baselines import magprune as module
from lab.baselines.finetune import copied, descend, reparametrize_, weighted
from lab.baselines.magprune import (
    CUTTING,
    FEW,
    Masked,
    cubic,
    highest,
    magnitudes,
    magprune,
    prunable,
)
from lab.baselines.moveprune import Scored, moveprune
from t3c.errors import SpecError

METHODS = (magprune, moveprune)


@pytest.fixture(params=METHODS, ids=lambda method: method.__name__)
def method(request: pytest.FixtureRequest) -> Any:
    return request.param


def zeros_of(model: nn.Module) -> tuple[int, int]:
    """How many weights are 0, and how many there are."""
    weights = [model.get_submodule(name).weight for name in tiny.LAYERS]
    return sum(int((w == 0).sum()) for w in weights), sum(w.numel() for w in weights)


def test_zeros_are_as_many_as_promised_and_survive_in_what_runs(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled, given = tiny.recorded(monkeypatch, module), tiny.task(steps=5)
    assert given.training is not None
    with tiny.unchanged(given.training.model):
        made = method(given, sparsity=0.7)
    zeros, total = zeros_of(settled[0])
    assert zeros == round(0.7 * total)
    for name, codes in zip(tiny.LAYERS, tiny.codes(made.model), strict=True):
        zero = (settled[0].get_submodule(name).weight == 0).numpy().reshape(codes.shape)
        assert np.all(codes[zero] == 0)
        assert np.mean(codes[~zero] == 0) < 0.05
    assert (made.name, made.steps) == (method.__name__, 5)
    # A bit for every weight, eight for those left, float scales, biases and a norm.
    packed = total / 8 + (total - zeros)
    assert 0.95 * packed < tiny.stored(made) < packed + 4 * 400 + 1000
    with torch.no_grad():
        wanted = settled[0](tiny.images(16, 4)).numpy()
    assert np.linalg.norm(tiny.answers(made) - wanted) < 0.05 * np.linalg.norm(wanted)


def test_layers_with_few_of_the_weights_stay_dense(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = tiny.recorded(monkeypatch, module, convert=False)
    monkeypatch.setattr(module, "FEW", 0.03)  # the stem has 2.5%, the head 0.7%
    method(tiny.task(steps=3), sparsity=0.5)
    found = {name: settled[0].get_submodule(name).weight for name in tiny.LAYERS}
    assert not any((found[name] == 0).any() for name in ("stem", "head"))
    pruned = [found["body"], found["hidden"]]
    assert sum(int((w == 0).sum()) for w in pruned) == sum(w.numel() for w in pruned) // 2


def test_few_is_a_thousandth() -> None:
    sizes = {"large": 99_800, "small": 100, "smaller": 99, "whole": 1}
    assert FEW == 1e-3
    assert prunable({name: torch.zeros(size) for name, size in sizes.items()}) == {
        "large", "small",
    }  # fmt: skip


@pytest.mark.parametrize(("steps", "sparsity"), [(1, 0.5), (2, 0.9), (6, 0.0), (6, 0.123)])
def test_any_sparsity_is_met_in_any_number_of_steps(
    method: Any, monkeypatch: pytest.MonkeyPatch, steps: int, sparsity: float
) -> None:
    settled = tiny.recorded(monkeypatch, module, convert=False)
    for _ in range(2):
        method(tiny.task(steps=steps), sparsity=sparsity)
    zeros, total = zeros_of(settled[0])
    assert zeros == round(sparsity * total)
    one, other = (model.state_dict() for model in settled)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_left_is_trained(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settled = tiny.recorded(monkeypatch, module, convert=False)
    for prune, rate in ((magprune, 1e-9), (method, 3e-4)):
        prune(tiny.task(steps=40), learning_rate=rate)
    cut, trained = (tiny.drift(model, tiny.network()) for model in settled)
    assert 0.1 < cut < 0.5
    assert trained < 0.75 * cut


def test_an_impossible_sparsity_is_refused(method: Any) -> None:
    with pytest.raises(SpecError, match=r"^sparsity must be in \[0, 1\), got 1$"):
        method(tiny.task(), sparsity=1.0)


def test_zeros_grow_to_the_end_of_cutting_and_stay() -> None:
    shares = [cubic(share, 0.6) for share in np.linspace(0, 1, 21)]
    assert shares[0] == 0
    assert shares[10:] == pytest.approx([0.6] * 11)
    falls = -np.diff(np.diff(shares[:11]))
    assert np.all(falls > 0)
    assert cubic(CUTTING / 2, 0.8) == pytest.approx(0.8 * 7 / 8)


def test_masks_grow_while_cutting_and_then_stay(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    finetune = module.finetune_

    def noted(model: nn.Module, *arguments: Any, before_step: Any, **options: Any) -> Any:
        def look(share: float) -> None:
            before_step(share)
            parts = [part for part in model.modules() if isinstance(part, Masked)]
            seen.append(torch.cat([part.mask.flatten() for part in parts]).clone())

        return finetune(model, *arguments, before_step=look, **options)

    monkeypatch.setattr(module, "finetune_", noted)
    tiny.recorded(monkeypatch, module, convert=False)
    method(tiny.task(steps=8), sparsity=0.5, learning_rate=1e-2)
    zeros = [float((mask == 0).float().mean()) for mask in seen]
    wanted = [cubic(share, 0.5) for share in np.arange(8) / 8]
    assert zeros == pytest.approx(wanted, abs=1e-4)
    assert all(torch.equal(mask, seen[4]) for mask in seen[5:])


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=9), min_size=1, max_size=4),
    st.floats(0, 0.99),
)
def test_the_highest_scores_are_kept_exactly(rows: list[list[int]], sparsity: float) -> None:
    scores = [torch.tensor(row, dtype=torch.float32) for row in rows]
    kept, flat = torch.cat(highest(scores, sparsity)), torch.cat(scores)
    assert int((kept == 0).sum()) == round(sparsity * len(flat))
    if 0 < kept.sum() < len(kept):
        assert flat[kept == 1].min() >= flat[kept == 0].max()


def test_magnitudes_do_not_know_the_scale_of_a_layer() -> None:
    weight = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(magnitudes(weight), magnitudes(-1e3 * weight))
    assert magnitudes(weight).square().mean() == pytest.approx(1)
    assert torch.equal(magnitudes(torch.zeros(3)), torch.zeros(3))


def test_movement_tells_other_weights_apart_than_magnitude(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However few the steps and small the rate, scores of weights of one size change places."""
    settled = tiny.recorded(monkeypatch, module, convert=False)
    for prune in METHODS:
        prune(tiny.task(steps=6), sparsity=0.5, learning_rate=1e-5)
    kept = [
        torch.cat([model.get_submodule(n).weight.flatten() != 0 for n in tiny.LAYERS])  # type: ignore[operator]
        for model in settled
    ]
    assert 0.01 < (kept[0] != kept[1]).float().mean() < 0.1


def test_movement_raises_the_scores_of_weights_that_move_away_from_zero() -> None:
    """Two weights, both pulled up: the positive one gains in score, the negative one loses."""
    layer = copied(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.5, -0.5]]))
    scored = Scored(layer.weight.detach())
    before = scored.scores.detach().clone()
    assert torch.allclose(before, torch.ones(1, 2))
    reparametrize_(weighted(nn.Sequential(layer))["0"], scored)
    scored.mask.zero_()
    answer = layer(torch.ones(1, 2))
    assert answer.item() == 0
    descend(torch.optim.SGD(scored.parameters(), lr=0.1), -answer.sum())
    moved = scored.scores.detach() - before
    assert moved[0, 0] > 0 > moved[0, 1]
    assert moved.sum() == pytest.approx(0, abs=1e-6)
