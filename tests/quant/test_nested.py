from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from t3c.errors import CorruptError
from t3c.quant.nested import encode, integers, unit_scale
from t3c.quant.pack import pack_planes, plane_bytes, unpack_planes
from t3c.quant.straight_through import fake_quantize, fit_gains, row_scale, view_scale

codes = hnp.arrays(np.uint8, st.integers(0, 70))
every_q = st.integers(2, 8)
weights = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=st.floats(-4, 4, width=32)
)


@given(codes, every_q)
def test_a_view_needs_only_its_own_planes(code: np.ndarray, q: int) -> None:
    planes = pack_planes(code)
    assert planes.shape == (8, plane_bytes(len(code)))
    back = unpack_planes(planes[:q], len(code))
    np.testing.assert_array_equal(integers(back, q), integers(code, q))
    if q == 8:
        np.testing.assert_array_equal(back, code)


@given(codes)
def test_views_are_nested(code: np.ndarray) -> None:
    for q in range(2, 8):
        wide, narrow = (
            unpack_planes(pack_planes(code)[: q + 1], len(code)),
            unpack_planes(pack_planes(code)[:q], len(code)),
        )
        mask = np.uint8((0xFF << (8 - q)) & 0xFF)
        np.testing.assert_array_equal(wide & mask, narrow)


def test_planes_of_the_wrong_size() -> None:
    with pytest.raises(CorruptError):
        unpack_planes(np.zeros((4, 3), np.uint8), 30)


@given(weights, every_q)
def test_rounding_stays_within_half_a_step(weight: np.ndarray, q: int) -> None:
    scale = row_scale(torch.from_numpy(weight)).numpy()
    view = integers(encode(weight, scale), q) * unit_scale(scale * 2 ** (8 - q), q)[:, None]
    step = scale[:, None] * 2 ** (8 - q)
    slack = 0.5 * scale[:, None] if q < 8 else 0
    assert np.all(np.abs(view - weight) <= 0.5 * step * (1 + 1e-5) + slack + 1e-6)


@given(weights, every_q)
def test_views_have_no_offset(weight: np.ndarray, q: int) -> None:
    scale = row_scale(torch.from_numpy(weight)).numpy()
    there = integers(encode(weight, scale), q).astype(np.int16)
    back = integers(encode(-weight, scale), q).astype(np.int16)
    np.testing.assert_array_equal(there, -back)


@given(weights, every_q)
def test_training_and_runtime_see_the_same_weights(weight: np.ndarray, q: int) -> None:
    tensor = torch.from_numpy(weight)
    gains = fit_gains(tensor)
    trained = fake_quantize(tensor, gains, q).numpy()
    scale = unit_scale(view_scale(tensor, gains, q).numpy(), q)
    run = integers(encode(weight, row_scale(tensor).numpy()), q) * scale[:, None]
    assert np.isfinite(trained).all()
    np.testing.assert_allclose(trained, run, rtol=1e-4, atol=1e-6)


def test_rows_of_zeros_stay_zero() -> None:
    weight = torch.zeros(3, 6)
    weight[1] = 1.0
    gains = fit_gains(weight)
    assert torch.isfinite(gains).all()
    view = fake_quantize(weight, gains, 8)
    torch.testing.assert_close(view, weight)
    assert fake_quantize(weight, gains, 4)[0].abs().max() < 1e-5


def test_more_bits_are_closer() -> None:
    weight = torch.randn(16, 200, generator=torch.Generator().manual_seed(0))
    gains = fit_gains(weight)
    errors = [float((fake_quantize(weight, gains, q) - weight).norm()) for q in range(2, 9)]
    assert all(above < 0.6 * below for below, above in itertools.pairwise(errors))


def test_gradients_pass_straight_to_weights_and_exactly_to_scales() -> None:
    weight = torch.randn(3, 7, dtype=torch.float64).requires_grad_()
    gains = fit_gains(weight).requires_grad_()
    upstream = torch.randn(3, 7, dtype=torch.float64)
    (fake_quantize(weight, gains, 4) * upstream).sum().backward()
    torch.testing.assert_close(weight.grad, upstream)
    assert gains.grad is not None
    step = 1e-6
    for row in range(3):
        moved = gains.detach().clone()
        moved[2, row] += step
        rise = fake_quantize(weight.detach(), moved, 4) - fake_quantize(
            weight.detach(), gains.detach(), 4
        )
        expected = float((rise * upstream).sum() / step)
        assert float(gains.grad[2, row]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    untouched = [i for i in range(len(gains)) if i != 2]
    assert not gains.grad[untouched].any()
