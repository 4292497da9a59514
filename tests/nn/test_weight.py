"""Elastic weights: masks, orthonormal factors, order, gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from t3c.convert import ElasticConfig, elasticize_, state_of
from t3c.convert.config import KERNELS
from t3c.errors import ConvertError
from t3c.factor.compose import compose
from t3c.factor.ranks import RANK_AXES, strengths
from t3c.nn import Relaxation, at, elastic_weights, sort_
from t3c.nn.weight import Spectral
from t3c.quant.straight_through import fake_quantize, fit_gains, row_scale
from t3c.spec import Factorization, LayerPoint, Profile

X = torch.randn(4, 16, 8, 8, generator=torch.Generator().manual_seed(0))


def net(**options: object) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 5, padding=2, groups=32),
        nn.Flatten(), nn.Linear(512, 64), nn.Linear(64, 64),
    )  # fmt: skip
    elasticize_(model, X, ElasticConfig(store_ratio=1.0, **options))  # type: ignore[arg-type]
    return model


def lowest(model: nn.Module, bits: int = 8) -> Profile:
    layers = state_of(model).plan.layers
    return Profile("low", {p.spec.name: LayerPoint(p.ranks[0], bits) for p in layers})


@pytest.mark.parametrize("convolution", KERNELS)
def test_masks_become_the_hard_prefix(convolution: Factorization) -> None:
    """Without noise, and cold, a relaxed view is the prefix of as many ranks."""
    model = net(convolution=convolution)
    sort_(model)
    with at(model, lowest(model)):
        hard = model(X)
    cold = Relaxation(1e-6, None, stochastic_rounding=False)
    with at(model, lowest(model), cold):
        torch.testing.assert_close(model(X), hard, rtol=1e-3, atol=1e-4)
    warm = Relaxation(1.0, torch.Generator().manual_seed(0))
    with at(model, lowest(model), warm):
        first, second = model(X), model(X)
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, hard, rtol=1e-2)


def test_masks_reach_every_rank() -> None:
    """A prefix trains its own ranks alone; a mask trains them all."""
    model = net()
    weight = elastic_weights(model)["4"]
    rank = state_of(model).plan.layers[2].ranks[0]
    point = LayerPoint(rank, 8)
    weight.relaxation = Relaxation(1.0, torch.Generator().manual_seed(0))
    weight.weight_at(point).square().sum().backward()
    reduce = weight.stored_stages()[0].grad
    assert reduce is not None
    assert (reduce.abs().sum(1) > 0).all()


def test_spectral_factors_stay_orthonormal() -> None:
    model = net(spectral=True)
    weight = elastic_weights(model)["4"]
    assert isinstance(weight.factors, Spectral)
    k = weight.cap
    before = compose(weight.stored_stages())
    best = torch.linalg.svdvals(weight.dense.detach())[k:].norm()
    torch.testing.assert_close((weight.dense - before).norm(), best, rtol=1e-3, atol=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        with at(model, lowest(model)):
            model(X).square().mean().backward()
        optimizer.step()
    assert not torch.allclose(compose(weight.stored_stages()), before, atol=1e-4)
    for basis in (weight.factors.u, weight.factors.v):
        torch.testing.assert_close(basis.T @ basis, torch.eye(k), rtol=1e-4, atol=1e-4)
    assert copy.deepcopy(model)(X).shape == model(X).shape
    with pytest.raises(ConvertError, match="spectral factors are orthonormal"):
        elasticize_(nn.Sequential(nn.Linear(64, 64)), torch.ones(2, 64),
                    ElasticConfig(spectral=True), calibration=[torch.ones(2, 64)])  # fmt: skip


@pytest.mark.parametrize("spectral", [False, True])
def test_sorting_keeps_the_whole_and_orders_the_ranks(spectral: bool) -> None:
    model = net(spectral=spectral)
    weights = elastic_weights(model)
    sort_(model)
    assert sort_(model) == 0
    for weight in weights.values():
        stages = [stage.detach().clone() for stage in weight.stored_stages()]
        for axes in RANK_AXES[weight.spec.factorization]:
            order = torch.arange(stages[axes[0][0]].shape[axes[0][1]]).flip(0)
            for stage, axis in axes:
                stages[stage] = stages[stage].index_select(axis, order)
        assert weight.factors is not None
        with torch.no_grad():
            weight.factors.set_(stages)
    whole = {n: compose(w.stored_stages()).detach() for n, w in weights.items()}
    gains = {n: [g.detach().clone() for g in w.stage_gains] for n, w in weights.items()}
    assert sort_(model) == len(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(
            compose(weight.stored_stages()), whole[name], rtol=1e-3, atol=1e-5
        )
        for axes in RANK_AXES[weight.spec.factorization]:
            found = strengths(weight.stored_stages(), axes)
            assert (found.diff() <= 1e-5).all()
        rows = weight.stage_gains[0]
        torch.testing.assert_close(rows.detach(), gains[name][0].flip(1), rtol=1e-2, atol=1e-2)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(2, 8), st.integers(0, 1000))
def test_clipped_weights_get_no_gradient(rows: int, columns: int, bits: int, seed: int) -> None:
    weight = normal(rows, columns, seed=seed).requires_grad_()
    clip = torch.full((rows,), 0.5)
    gains = fit_gains(weight, clip).requires_grad_()
    view = fake_quantize(weight, gains, bits, clip)
    slope = torch.arange(1.0, 1 + view.numel()).view_as(view)
    (view * slope).sum().backward()
    reached = weight.detach().abs() <= 127.5 * row_scale(weight, clip)[:, None]
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, slope * reached)
    # A view is linear in its scale, whose logarithm is learned.
    assert gains.grad is not None
    exact = (slope * view).sum(1)
    torch.testing.assert_close(gains.grad[bits - 2], exact.detach(), rtol=1e-4, atol=1e-4)


@given(st.integers(3, 8), st.integers(0, 50))
def test_stochastic_rounding_has_no_bias_away_from_zero(bits: int, seed: int) -> None:
    """Weights between the lowest and the highest value of a view are hit in the mean."""
    weight = torch.tensor([[1.0, 0.613, 0.377, -0.521]]).repeat(4000, 1)
    clip = None
    gains = torch.zeros(7, len(weight))
    noise = torch.Generator().manual_seed(seed)
    view = fake_quantize(weight, gains, bits, clip, noise)
    step = 2.0 ** (8 - bits) / 127
    error = (view - weight).mean(0)[1:]
    assert (error.abs() < 5 * step / 2 / 4000**0.5).all()
    assert (view - weight).abs()[:, 1:].max() <= step * 1.001
