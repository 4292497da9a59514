from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lab.quant.fp8 import Fp8, from_fp8, to_fp8
from t3c.errors import CorruptError, DataError

kinds = st.sampled_from(Fp8)
anything = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=3, max_side=6),
    elements=st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.floats(0, 2.0**-120, width=32),
)
LEAST_NORMAL = {Fp8.E4M3: 2.0**-6, Fp8.E5M2: 2.0**-14}
MANTISSA = {Fp8.E4M3: 3, Fp8.E5M2: 2}


@given(anything, kinds)
def test_half_a_step_of_error_over_all_of_float32(raw: np.ndarray, kind: Fp8) -> None:
    weight = torch.from_numpy(raw)
    codes, scale = to_fp8(weight, kind)
    back = from_fp8(codes, scale, kind)
    assert codes.dtype == torch.uint8
    assert bool(torch.isfinite(back).all())
    exact, rows = weight.double(), scale.double().reshape(-1, *[1] * (weight.dim() - 1))
    step = torch.maximum(exact.abs(), LEAST_NORMAL[kind] * rows) * 2.0 ** -MANTISSA[kind]
    below_float32 = 2.0**-150  # decoding may end among its subnormals
    assert bool(((back.double() - exact).abs() <= step / 2 + below_float32).all())


@given(anything, kinds)
def test_scales_are_the_least_powers_of_two_in_range(raw: np.ndarray, kind: Fp8) -> None:
    weight = torch.from_numpy(raw)
    _, scale = to_fp8(weight, kind)
    assert bool((torch.frexp(scale)[0] == 0.5).all())
    top = weight.flatten(1).abs().amax(1).double() / scale.double()
    assert bool((top <= kind.largest).all())
    assert bool(((top > kind.largest / 2) | (top == 0) | (scale <= 2.0**-126)).all())


@pytest.mark.parametrize("kind", Fp8)
def test_every_finite_code_survives(kind: Fp8) -> None:
    codes = torch.arange(256).to(torch.uint8)
    codes = codes[torch.isfinite(codes.view(kind.dtype).float())][None]
    assert codes.shape[1] == {Fp8.E4M3: 254, Fp8.E5M2: 248}[kind]
    for scale in (torch.tensor([1.0]), torch.tensor([2.0**-30])):
        again, found = to_fp8(from_fp8(codes, scale, kind), kind)
        assert torch.equal(again, codes)
        assert torch.equal(found, scale)


def test_e4m3_is_finer_and_e5m2_wider() -> None:
    weight = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    fine, wide = (float((from_fp8(*to_fp8(weight, k), k) - weight).norm()) for k in Fp8)
    assert fine < 0.6 * wide
    weight[:, 0], weight[:, 1] = 1.0, 2.0**-25
    narrow, whole = (float(from_fp8(*to_fp8(weight[:, :2], k), k)[0, 1]) for k in Fp8)
    assert (narrow, whole) == (0.0, 2.0**-25)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 1e39])
def test_weights_that_are_not_finite(wrong: float) -> None:
    weight = torch.ones(3, 4, dtype=torch.float64)
    weight[2, 1] = wrong
    with pytest.raises(DataError, match=r"\(3, 4\).*rows \[2\]"):
        to_fp8(weight, Fp8.E4M3)


def test_broken_codes() -> None:
    codes, scale = to_fp8(torch.ones(3, 4), Fp8.E5M2)
    for bad, scales in ((codes, scale[:2]), (codes.int(), scale)):
        with pytest.raises(CorruptError, match="do not go with"):
            from_fp8(bad, scales, Fp8.E5M2)
    infinite = codes.clone()
    infinite[0, 0] = 0x7C
    for bad, scales in ((infinite, scale), (codes, scale / 0)):
        with pytest.raises(CorruptError, match="not finite"):
            from_fp8(bad, scales, Fp8.E5M2)
