"""Mixed precision: bits where they matter, within the budget, and weights on their grids."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lab.baselines import mpqat as module
from lab.baselines.finetune import copied, weighted
from lab.baselines.mpqat import (
    BITS,
    Rounded,
    allocate,
    clipped_scale,
    mpqat,
    sensitivities,
)
from lab.quant.uniform import Grid, fit_uniform, uniform_quantize
from t3c.errors import SpecError


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[Rounded]:
    """What weights were rounded by, with the scales they were trained to, layer by layer."""
    found: list[Rounded] = []

    class Noted(Rounded):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            found.append(self)

    monkeypatch.setattr(module, "Rounded", Noted)
    return found


def check_grids(model: nn.Module, rounded: list[Rounded], bits: float) -> float:
    """Every weight on its grid, and within the budget all together; the bits that they take."""
    spent, total = 0, 0
    for name, by in zip(tiny.LAYERS, rounded, strict=True):
        weight = model.get_submodule(name).weight.detach()
        levels = weight.flatten(1) / by.log_scale.detach().exp()
        assert (levels - levels.round()).abs().max() < 1e-3
        assert 1 <= levels.abs().max().round() <= 2 ** (by.grid.bits - 1) - 1
        spent, total = spent + by.grid.bits * weight.numel(), total + weight.numel()
    assert 4 * total <= spent <= bits * total
    return spent


def test_the_model_is_small_and_runs_what_was_trained(
    rounded: list[Rounded], monkeypatch: pytest.MonkeyPatch
) -> None:
    settled, task = tiny.recorded(monkeypatch, module), tiny.task(steps=4)
    assert task.training is not None
    with tiny.unchanged(task.training.model):
        made = mpqat(task)
    spent = check_grids(settled[0], rounded, 5.0)
    # Codes, and as floats the scales, biases and a norm.
    assert spent / 8 < tiny.stored(made) < spent / 8 + 4 * 400 + 1000
    assert (made.name, made.steps) == ("mpqat", 4)
    with torch.no_grad():
        wanted = settled[0](tiny.images(16, 4)).numpy()
    assert np.linalg.norm(tiny.answers(made) - wanted) < 0.05 * np.linalg.norm(wanted)


@pytest.mark.parametrize("bits", [4.0, 6.5, 8.0])
def test_any_average_is_met_and_two_runs_agree(
    rounded: list[Rounded], monkeypatch: pytest.MonkeyPatch, bits: float
) -> None:
    settled = tiny.recorded(monkeypatch, module, convert=False)
    for _ in range(2):
        mpqat(tiny.task(steps=3), bits=bits)
    check_grids(settled[0], rounded[:4], bits)
    one, other = (model.state_dict() for model in settled)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_training_with_the_rounding_brings_the_outputs_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settled = tiny.recorded(monkeypatch, module, convert=False)
    for rate in (1e-9, 1e-4):
        mpqat(tiny.task(steps=40), bits=4.0, learning_rate=rate)
    plain, trained = (tiny.drift(model, tiny.network()) for model in settled)
    assert 0.01 < plain < 0.1
    assert trained < 0.85 * plain


@pytest.mark.parametrize("bits", [3.9, 8.1, float("nan")])
def test_an_impossible_average_is_refused(bits: float) -> None:
    with pytest.raises(SpecError, match=r"^bits must be 4 to 8 on average, got"):
        mpqat(tiny.task(), bits=bits)


def test_a_clipped_scale_is_no_worse_than_covering_all_and_better_on_outliers() -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    weight[0, 0] = 12.0
    grid = Grid(4)
    whole, zero = fit_uniform(weight, grid)

    def errors(scale: torch.Tensor) -> torch.Tensor:
        return (uniform_quantize(weight, scale, zero, grid) - weight).square().sum(1)

    clipped = clipped_scale(weight, grid)
    assert torch.all(errors(clipped) <= errors(whole))
    assert clipped.shape == (6, 1)
    assert (errors(clipped) < 0.95 * errors(whole)).sum() >= 3


def test_sensitivities_fall_with_bits_and_leave_the_model_as_it_was() -> None:
    model = copied(tiny.network())
    with tiny.unchanged(model):
        drifts = sensitivities(model, weighted(model), tiny.images(16, 3))
    assert tuple(drifts) == tiny.LAYERS
    for of_layer in drifts.values():
        assert of_layer[4] > 5 * of_layer[6] > 25 * of_layer[8] > 0
    with torch.no_grad():
        wanted = model(tiny.images(16, 3))
        layer = model.get_submodule("body")
        scale = clipped_scale(layer.weight, Grid(4))
        layer.weight.copy_(
            uniform_quantize(layer.weight, scale, torch.zeros_like(scale), Grid(4))
        )  # fmt: skip
        drift = (model(tiny.images(16, 3)) - wanted).norm() / wanted.norm()
    assert drifts["body"][4] == pytest.approx(float(drift) ** 2, rel=1e-4)


LAYERS = st.lists(
    st.tuples(st.integers(1, 50), st.lists(st.floats(0, 1), min_size=3, max_size=3)),
    min_size=1,
    max_size=5,
)


@given(LAYERS, st.floats(4, 8))
def test_the_budget_is_met_and_used_up(layers: list[tuple[int, list[float]]], bits: float) -> None:
    sizes = {str(i): size for i, (size, _) in enumerate(layers)}
    drifts = {
        str(i): dict(zip(BITS, sorted(falling, reverse=True), strict=True))
        for i, (_, falling) in enumerate(layers)
    }
    chosen = allocate(sizes, drifts, bits)
    left = bits * sum(sizes.values()) - sum(chosen[name] * sizes[name] for name in sizes)
    assert left >= -1e-9
    assert all(chosen[name] == 8 or 2 * sizes[name] > left for name in sizes)

    def cost(taken: dict[str, int]) -> float:
        return sum(drifts[name][taken[name]] for name in sizes)

    def fits(taken: dict[str, int]) -> bool:
        return sum(taken[name] * sizes[name] for name in sizes) <= bits * sum(sizes.values())

    every = (
        dict(zip(sizes, taken, strict=True)) for taken in itertools.product(BITS, repeat=len(sizes))
    )
    best = min(cost(taken) for taken in every if fits(taken))
    # On the hulls the best is lost by at most what one layer's drift falls by.
    assert cost(chosen) <= best + max(of[4] - of[8] for of in drifts.values()) + 1e-9


def test_bits_go_where_they_matter() -> None:
    sizes = {"calm": 100, "touchy": 100}
    drifts = {"calm": {4: 0.02, 6: 0.001, 8: 0.0}, "touchy": {4: 2.0, 6: 0.1, 8: 0.01}}
    assert allocate(sizes, drifts, 6.0) == {"calm": 4, "touchy": 8}
    assert allocate(sizes, drifts, 7.0) == {"calm": 6, "touchy": 8}
    assert allocate(sizes, drifts, 8.0) == {"calm": 8, "touchy": 8}
    assert allocate(sizes, drifts, 4.9) == {"calm": 4, "touchy": 4}
