"""Grids of groups of columns: one file, every view of which is a prefix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from t3c.nn.weight import ElasticWeight
from t3c.quant.groups import SIZES, group_of, group_scale
from t3c.quant.nested import encode, integers, unit_scale
from t3c.quant.settle import settled
from t3c.quant.straight_through import (
    fake_quantize,
    fit_gains,
    group_levels,
    group_shares,
    row_scale,
    view_scale,
)
from t3c.spec import Factorization, Kind, LayerPoint, LayerSpec

GROUP = 4
weights = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 5), st.just(12)), elements=st.floats(-4, 4, width=32)
)


def spiked(rows: int = 12, columns: int = 128) -> torch.Tensor:
    """Weights of which one column is far larger than the others."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weight[:, 5] *= 20
    return weight


@pytest.mark.parametrize(
    ("columns", "group"), [(64, None), (128, 64), (288, 48), (768, 64), (100, None), (96, 48)]
)
def test_the_first_size_that_divides_a_row_is_taken(columns: int, group: int | None) -> None:
    for kind in (Kind.LINEAR, Kind.EMBEDDING):
        assert group_of(LayerSpec("x", kind, Factorization.NONE, 8, columns)) == group
    conv = LayerSpec("x", Kind.CONV2D, Factorization.NONE, 8, columns)
    assert group_of(conv) is None
    assert group is None or group in SIZES


@given(weights, st.integers(2, 8))
def test_training_and_runtime_see_the_same_weights(weight: np.ndarray, q: int) -> None:
    tensor = torch.from_numpy(weight)
    gains = fit_gains(tensor, group=GROUP)
    trained = fake_quantize(tensor, gains, q, group=GROUP).numpy()
    even = tensor / group_levels(tensor, GROUP)
    shares = group_shares(tensor, GROUP).byte().numpy()
    scale = group_scale(unit_scale(view_scale(even, gains, q).numpy(), q), shares)
    codes = encode(even.numpy(), row_scale(even).numpy())
    run = integers(codes, q) * np.repeat(scale, GROUP, axis=1)
    assert shares.min() >= 1
    assert np.isfinite(trained).all()
    np.testing.assert_allclose(trained, run, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bits", [3, 4, 6, 8])
def test_an_outlier_costs_its_own_group_alone(bits: int) -> None:
    weight = spiked()
    errors = [
        float((fake_quantize(weight, fit_gains(weight, group=g), bits, group=g) - weight).norm())
        for g in (None, 64)
    ]
    assert errors[1] < 0.9 * errors[0]


def test_gradients_pass_straight_to_weights() -> None:
    weight = torch.randn(3, 12, dtype=torch.float64).requires_grad_()
    gains = fit_gains(weight, group=GROUP).requires_grad_()
    upstream = torch.randn(3, 12, dtype=torch.float64)
    (fake_quantize(weight, gains, 4, group=GROUP) * upstream).sum().backward()
    torch.testing.assert_close(weight.grad, upstream)
    assert gains.grad is not None
    assert bool(gains.grad[2].abs().min() > 0)


def test_settled_codes_keep_the_grids_and_err_less() -> None:
    weight, inputs = spiked(), torch.randn(400, 128, generator=torch.Generator().manual_seed(1))
    weight[:, 64:] *= 0.1
    weight[3, 64:] = 0
    even = weight / group_levels(weight, 64)
    gains, moment = fit_gains(weight, group=64), inputs.T @ inputs / len(inputs)
    for views in ((4, 8), (8,)):  # it is done for the first of them, which gains
        scales = {q: view_scale(even, gains, q) for q in views}
        made = settled(weight, row_scale(even), scales, moment, group=64)
        torch.testing.assert_close(group_shares(made, 64), group_shares(weight, 64))
        near, chosen = (fake_quantize(w, gains, views[0], group=64) for w in (weight, made))
        errors = [float(((w - weight) @ inputs.T).norm()) for w in (near, chosen)]
        assert errors[1] < 0.95 * errors[0]


def test_a_weight_takes_grids_of_groups_and_lets_go_of_them() -> None:
    spec = LayerSpec("x", Kind.LINEAR, Factorization.NONE, 12, 128)
    weight, point = ElasticWeight(spec, spiked(), None, 12), LayerPoint(12, 4)
    rows = weight.weight_at(point)
    assert not weight.group_(False)
    assert weight.group_(True)
    assert weight.group == 64
    errors = [(view - weight.dense).detach().norm() for view in (weight.weight_at(point), rows)]
    assert float(errors[0]) < float(errors[1])
    learned = weight.dense_gains.detach().clone() + 0.1
    with torch.no_grad():
        weight.dense_gains.copy_(learned)
    assert not weight.group_(True)  # what was learned stays
    torch.testing.assert_close(weight.dense_gains.detach(), learned)
    assert weight.group_(False)
    torch.testing.assert_close(weight.weight_at(point), rows)
