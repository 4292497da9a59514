from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from lab.quant.uniform import Grid, fit_uniform, uniform_quantize
from t3c.errors import DataError, SpecError

weights = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=7),
    elements=st.floats(-4, 4),
).map(torch.from_numpy)
grids = st.builds(
    lambda bits, symmetric, kind: Grid(bits, symmetric, **kind),
    st.integers(2, 8),
    st.booleans(),
    st.sampled_from([{"per": "tensor"}, {"per": "channel"}])
    | st.integers(1, 9).map(lambda size: {"per": "group", "group": size}),
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spread(table: Tensor, weight: Tensor, grid: Grid) -> Tensor:
    """The entry of `table` that belongs to each weight."""
    found = torch.empty_like(weight).flatten(1)
    for row, column in np.ndindex(*found.shape):
        found[row, column] = table[
            0 if grid.per == "tensor" else row, column // grid.group if grid.group else 0
        ]
    return found.reshape(weight.shape)


@given(weights, grids)
def test_weights_in_range_move_by_half_a_step_onto_the_grid(weight: Tensor, grid: Grid) -> None:
    log_scale, zero = fit_uniform(weight, grid)
    result = uniform_quantize(weight, log_scale, zero, grid)
    step = spread(log_scale.exp(), weight, grid)
    assert bool(((result - weight).abs() <= step * (0.5 + 1e-9)).all())
    integer = result / step + spread(zero, weight, grid)
    torch.testing.assert_close(integer, integer.round(), rtol=0, atol=1e-9)
    low = -(2 ** (grid.bits - 1)) + 1 if grid.symmetric else 0
    high = -low if grid.symmetric else 2**grid.bits - 1
    assert low <= int(integer.min().round()) <= int(integer.max().round()) <= high
    assert low <= int(zero.min()) <= int(zero.max()) <= high  # so zero itself is on the grid


@given(weights, st.integers(1, 9), st.booleans(), st.sampled_from([100.0, 99.0, 80.0]))
def test_a_group_is_a_tensor_of_its_own(
    weight: Tensor, size: int, symmetric: bool, percentile: float
) -> None:
    grid, alone = Grid(4, symmetric, size, "group"), Grid(4, symmetric, per="tensor")
    whole = uniform_quantize(weight, *fit_uniform(weight, grid, percentile), grid).flatten(1)
    for row, flat in enumerate(weight.flatten(1)):
        for start in range(0, len(flat), size):
            group = flat[None, start : start + size]
            apart = uniform_quantize(group, *fit_uniform(group, alone, percentile), alone)
            torch.testing.assert_close(
                whole[row : row + 1, start : start + size], apart, rtol=0, atol=0
            )


@pytest.mark.parametrize("percentile", [100.0, 99.99, 99.3, 50.0])
def test_the_scale_is_the_percentile_of_the_magnitudes(percentile: float) -> None:
    weight = normal(3, 5, 41)
    log_scale, _ = fit_uniform(weight, Grid(4), percentile)
    bound = torch.quantile(weight.flatten(1).abs(), percentile / 100, dim=1)
    torch.testing.assert_close(log_scale.exp()[:, 0], bound / 7)


def test_clipping_cuts_the_wild_side_of_an_affine_grid_alone() -> None:
    weight = torch.linspace(-0.5, 0.25, 999, dtype=torch.float64)[None].clone()
    weight[0, 0] = -50.0
    log_scale, zero = fit_uniform(weight, Grid(8, symmetric=False), 99.0)
    low, high = -zero * log_scale.exp(), (255 - zero) * log_scale.exp()
    assert float(low) == pytest.approx(-0.5, abs=0.01)
    assert float(high) == pytest.approx(0.25, abs=0.01)


def test_a_row_of_mostly_zeros_keeps_its_weights() -> None:
    weight = torch.zeros(2, 500)
    weight[0, 3] = 2.0
    torch.testing.assert_close(
        uniform_quantize(weight, *fit_uniform(weight, Grid(4), 99.0), Grid(4)), weight
    )


def test_affine_beats_symmetric_on_one_sided_weights() -> None:
    weight = normal(6, 300).abs()
    symmetric, affine = (
        uniform_quantize(weight, *fit_uniform(weight, grid), grid) - weight
        for grid in (Grid(4), Grid(4, symmetric=False))
    )
    assert float(affine.norm()) < 0.6 * float(symmetric.norm())


@pytest.mark.parametrize("grid", [Grid(b, s) for b, s in itertools.product((2, 8), (True, False))])
def test_rows_of_one_value_are_exact(grid: Grid) -> None:
    weight = torch.tensor([0.0, 3.0, -0.7, 1e-5], dtype=torch.float64)[:, None].expand(4, 5)
    log_scale, zero = fit_uniform(weight, grid)
    assert bool(torch.isfinite(log_scale).all())
    torch.testing.assert_close(
        uniform_quantize(weight, log_scale, zero, grid), weight, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("grid", [Grid(3), Grid(3, False), Grid(4, False, 4, "group")])
def test_gradients_inside_and_outside(grid: Grid, seed: int | None) -> None:
    weight = normal(5, 2, 7).requires_grad_()
    fitted, zero = fit_uniform(weight, grid, 80.0)
    log_scale, zero = fitted.requires_grad_(), (zero + 0.3 * (not grid.symmetric)).requires_grad_()
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    upstream = normal(5, 2, 7, seed=1)
    result = uniform_quantize(weight, log_scale, zero, grid, generator=generator)
    result.backward(upstream)

    w = weight.detach()
    s, z = (spread(table.detach(), w, grid) for table in (log_scale.exp(), zero.round()))
    n = (result.detach() / s + z).round()
    low, high = grid.ends
    # An integer at the end of the grid was clipped if rounding alone went further.
    chance = torch.rand(
        5, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(seed or 0)
    ).reshape(w.shape)
    raw = z + ((w / s).round() if seed is None else (w / s).floor() + (chance < (w / s) % 1))
    inside = (raw >= low) & (raw <= high)
    assert 5 < int((~inside).sum()) < 35
    torch.testing.assert_close(weight.grad, torch.where(inside, upstream, 0.0))

    def gathered(slopes: Tensor) -> Tensor:
        total = torch.zeros_like(log_scale.detach())
        for row, column in np.ndindex(5, 14):
            cell = (row, column // grid.group if grid.group else 0)
            total[cell] += (slopes * upstream).flatten(1)[row, column]
        return total

    by_scale = torch.where(inside, n - z - w / s, n - z)
    torch.testing.assert_close(log_scale.grad, gathered(by_scale * s))
    if grid.symmetric:
        assert zero.grad is None
    else:
        torch.testing.assert_close(zero.grad, gathered(torch.where(inside, 0.0, -s)))


def test_gradients_of_clipped_weights_are_the_true_ones() -> None:
    grid = Grid(3, symmetric=False)
    weight = torch.tensor([[5.0, -4.0, 9.0], [-7.0, -6.0, 8.0]], dtype=torch.float64)
    point = [weight, torch.tensor([[-1.2], [-0.9]]).double(), torch.tensor([[2.0], [4.0]]).double()]
    upstream = normal(2, 3)

    def loss(weight: Tensor, log_scale: Tensor, zero: Tensor) -> Tensor:
        return (uniform_quantize(weight, log_scale, zero, grid) * upstream).sum()

    grads = torch.autograd.grad(loss(*[p.requires_grad_() for p in point]), point)
    # The zero point is rounded, so its difference is taken over a whole step.
    for index, step in enumerate((1e-6, 1e-6, 1.0)):
        for cell in np.ndindex(*point[index].shape):
            moved: list[Any] = [[p.detach().clone() for p in point] for _ in range(2)]
            moved[0][index][cell] += step
            moved[1][index][cell] -= step
            expected = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
            assert float(grads[index][cell]) == pytest.approx(float(expected), abs=1e-8)


@pytest.mark.parametrize("symmetric", [True, False])
def test_stochastic_rounding_is_unbiased(symmetric: bool) -> None:
    grid, weight, draws = Grid(3, symmetric), normal(4, 9), 4000
    log_scale, zero = fit_uniform(weight, grid)
    if not symmetric:  # rounding the zero point puts an end out of range by up to half a step
        log_scale = log_scale + 0.4
    generator = torch.Generator().manual_seed(0)
    errors = torch.stack(
        [
            uniform_quantize(weight, log_scale, zero, grid, generator=generator) - weight
            for _ in range(draws)
        ]
    )
    step = log_scale.exp()
    assert bool((errors.mean(0).abs() <= 5 * step / 2 / draws**0.5).all())
    assert bool((errors.var(0) <= step.square() / 4 * 1.01).all())
    assert bool((errors.abs() <= step * (1 + 1e-9)).all())
    assert float(errors.var(0).max()) > 0


def test_stochastic_rounding_leaves_grid_points_alone() -> None:
    weight = torch.arange(-127.0, 128).repeat(1, 400)
    log_scale, zero = torch.zeros(1, 1), torch.zeros(1, 1)
    result = uniform_quantize(
        weight, log_scale, zero, Grid(8), generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(result, weight)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 1},
        {"bits": 9},
        {"bits": 4, "group": 32},
        {"bits": 4, "per": "group"},
        {"bits": 4, "per": "group", "group": 0},
        {"bits": 4, "per": "row"},
    ],
)
def test_grids_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        Grid(**wrong)


def test_scales_and_weights_that_do_not_fit() -> None:
    weight, grid = torch.ones(4, 10), Grid(4, group=4, per="group")
    log_scale, zero = fit_uniform(weight, grid)
    for wrong in (log_scale[:, :2], log_scale[:1], log_scale.T):
        with pytest.raises(DataError, match=r"\(4, 3\)"):
            uniform_quantize(weight, wrong, zero, grid)
    for broken in (torch.full((2, 3), torch.nan), torch.zeros(0, 3)):
        with pytest.raises(DataError):
            fit_uniform(broken, Grid(4, per="tensor"))
    with pytest.raises(SpecError, match="percentile"):
        fit_uniform(weight, grid, 0.0)
