"""Settled codes: nested, within their cells, and nearer where they are meant to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from t3c.errors import DataError, SpecError
from t3c.quant.nested import encode, integers, unit_scale
from t3c.quant.settle import settled
from t3c.quant.straight_through import fit_gains, row_scale, view_scale


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, inputs that are correlated, and their moment."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, 40, generator=generator)
    x = torch.randn(600, 8, generator=generator) @ torch.randn(8, 40, generator=generator)
    x = x + 0.3 * torch.randn(600, 40, generator=generator)
    return weight, x, x.T @ x / len(x)


def view(weight: Tensor, scales: dict[int, Tensor], bits: int) -> Tensor:
    """What the runtime decodes of the codes of a weight."""
    codes = encode(weight.numpy(), row_scale(weight).numpy())
    scale = unit_scale(scales[bits].numpy(), bits)
    return torch.from_numpy(integers(codes, bits) * scale[:, None])


def scales_of(weight: Tensor) -> dict[int, Tensor]:
    gains = fit_gains(weight)
    return {bits: view_scale(weight, gains, bits) for bits in range(2, 9)}


def error(weight: Tensor, x: Tensor, rounded: Tensor) -> float:
    return float((x @ (rounded - weight).T).norm() / (x @ weight.T).norm())


@pytest.mark.parametrize("views", [(5, 8), (4, 6, 8), (8,)])
def test_views_that_are_settled_come_nearer(views: tuple[int, ...]) -> None:
    weight, x, moment = problem()
    scales = scales_of(weight)
    made = settled(weight, row_scale(weight), {q: scales[q] for q in views}, moment)
    first = views[0]
    before, after = (error(weight, x, view(w, scales, first)) for w in (weight, made))
    assert after < 0.75 * before
    # All bits are nearer still, whatever cells the first view chose.
    assert error(weight, x, view(made, scales, 8)) <= after


def test_codes_are_those_that_were_settled() -> None:
    weight, _, moment = problem(1)
    scales = scales_of(weight)
    made = settled(weight, row_scale(weight), {q: scales[q] for q in (5, 8)}, moment)
    torch.testing.assert_close(row_scale(made), row_scale(weight))
    again = torch.from_numpy(
        integers(encode(made.numpy(), row_scale(made).numpy()), 8)
        * row_scale(made).numpy()[:, None]
    )
    torch.testing.assert_close(again, made, rtol=1e-5, atol=1e-6)  # they are on their grid
    largest = weight.abs().argmax(dim=1)
    rows = torch.arange(len(weight))
    torch.testing.assert_close(made[rows, largest], weight[rows, largest], rtol=1e-5, atol=1e-5)


def test_independent_inputs_have_nothing_to_make_up_with() -> None:
    weight, _, _ = problem(2)
    scales = scales_of(weight)
    made = settled(weight, row_scale(weight), {8: scales[8]}, torch.eye(40))
    torch.testing.assert_close(made, weight, rtol=0, atol=float(1.1 * row_scale(weight).max()))


def test_rows_next_to_nothing_stay() -> None:
    weight, _, moment = problem(3)
    weight[4] *= 1e-9
    scales = scales_of(weight)
    made = settled(weight, row_scale(weight), {q: scales[q] for q in (4, 8)}, moment)
    assert torch.equal(made[4], weight[4])
    assert np.isfinite(made.numpy()).all()


def test_what_cannot_be_settled() -> None:
    weight, _, moment = problem()
    scales = scales_of(weight)
    with pytest.raises(SpecError, match="end there, got"):
        settled(weight, row_scale(weight), {5: scales[5]}, moment)
    with pytest.raises(DataError, match=r"has a moment of shape \(3, 3\)"):
        settled(weight, row_scale(weight), {8: scales[8]}, torch.eye(3))
