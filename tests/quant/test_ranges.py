"""Activation grids and the ranges that are fitted to a tensor's values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from t3c.quant.grid import activation_grid
from t3c.quant.ranges import Spread


def rounded(value: Tensor, low: float, high: float) -> Tensor:
    scale, zero = activation_grid(low, high)
    limits = np.iinfo(zero.dtype)
    codes = ((value / float(scale)).round() + int(zero)).clamp(limits.min, limits.max)
    return (codes - int(zero)) * float(scale)


def error(value: Tensor, limits: tuple[float, float]) -> float:
    return float((rounded(value, *limits) - value).double().square().sum())


def spread_of(*parts: Tensor) -> Spread:
    spread = Spread()
    for part in parts:
        spread.add(part)
    return spread


def test_a_grid_covers_its_range() -> None:
    scale, zero = activation_grid(0.0, 5.1)
    assert (zero.dtype, float(scale) * 255) == (np.uint8, pytest.approx(5.1))
    scale, zero = activation_grid(-3.0, 3.0)
    assert (zero.dtype, int(zero), float(scale) * 127) == (np.int8, 0, pytest.approx(3.0))
    scale, zero = activation_grid(-1.0, 4.0)
    assert (zero.dtype, int(zero), float(scale) * 255) == (np.uint8, 51, pytest.approx(5.0))
    assert float(activation_grid(0.0, 0.0)[0]) > 0
    assert float(activation_grid(-1e-9, 1e-9)[0]) > 0


@given(st.floats(-100, 0), st.floats(0, 100))
def test_zero_is_exact_on_every_grid_and_no_end_is_a_step_away(low: float, high: float) -> None:
    values = torch.tensor([0.0, low, high], dtype=torch.float64)
    found = rounded(values, low, high)
    assert float(found[0]) == 0.0
    if max(-low, high) > 1e-6:
        assert float((found - values).abs().max()) <= float(activation_grid(low, high)[0]) * 1.01


@given(st.integers(0, 1000), st.floats(0.01, 100), st.floats(-2, 2))
@settings(max_examples=40)
def test_a_fitted_range_errs_no_more_than_the_extremes(seed: int, size: float, off: float) -> None:
    torch.manual_seed(seed)
    value = size * (torch.randn(4000) ** 3 + off)
    found = spread_of(value).fitted()
    most = float(value.abs().max())
    assert error(value, found) <= 1.1 * error(value, (-most, most))  # bins are a share of a step


def test_outliers_are_clipped_and_even_values_are_not() -> None:
    torch.manual_seed(0)
    value = torch.randn(1_000_000).clamp(-4, 4)
    value[:2] = 15.0
    assert 4.0 <= spread_of(value).fitted()[1] < 12
    even = torch.linspace(-1, 1, 1001)
    assert spread_of(even).fitted() == (-1.0, 1.0)
    assert spread_of(F.relu(even)).fitted() == (0.0, 1.0)


def test_what_is_lopsided_has_a_zero_point() -> None:
    torch.manual_seed(0)
    value = F.gelu(3 * torch.randn(20_000))
    low, high = spread_of(value).fitted()
    assert low == pytest.approx(float(value.min()), rel=0.3)
    assert error(value, (low, high)) < 0.4 * error(value, (-high, high))


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5), st.integers(0, 100))
@settings(max_examples=30)
def test_the_order_of_parts_does_not_matter(sizes: list[float], seed: int) -> None:
    torch.manual_seed(seed)
    parts = [size * torch.randn(500) for size in sizes]
    one, other = spread_of(*parts), spread_of(*reversed(parts))
    assert (one.low, one.high, one.reach) == (other.low, other.high, other.reach)
    assert float(one.counts.sum()) == 500 * len(parts)
    assert one.fitted() == pytest.approx(other.fitted(), rel=0.12)


def test_a_tensor_of_zeros_and_one_that_never_ran() -> None:
    assert spread_of(torch.zeros(10)).fitted() == (0.0, 0.0)
    assert not Spread().seen
