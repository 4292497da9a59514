"""Second-order compensation against brute force, and the moments it is made with."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lab.baselines.compensate import clipped_scale, rounding, zeroing
from lab.baselines.layers import as_matrix, input_moments, weight_layers
from t3c.errors import DataError, SpecError
from t3c.quant.compensate import Settle, compensate, inverse_factor

RIDGE = 1e-3


def correlated(size: int, seed: int, groups: int = 1) -> Tensor:
    """Second moments (g, n, n) of inputs that go together and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(groups, 4 * size, size, generator=generator, dtype=torch.float64)
    common = torch.randn(groups, 4 * size, 1, generator=generator, dtype=torch.float64)
    rows = (mixed + 2 * common) * torch.linspace(0.5, 2, size, dtype=torch.float64)
    return rows.transpose(1, 2) @ rows / rows.shape[1]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def output_error(change: Tensor, moment: Tensor) -> float:
    """E||D a||^2."""
    return float((change @ moment * change).sum())


@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 20))
def test_the_factor_is_that_of_the_inverse(size: int, groups: int, seed: int) -> None:
    moment = correlated(size, seed, groups)
    factor = inverse_factor(moment, RIDGE)
    mean = moment.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    product = factor.transpose(1, 2) @ factor @ (moment + RIDGE * mean * torch.eye(size))
    torch.testing.assert_close(product, torch.eye(size).double().expand_as(product))
    assert torch.equal(factor, factor.triu())


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 20))
def test_columns_that_are_free_are_changed_as_least_squares_would(
    gone: int, block: int, seed: int
) -> None:
    """The first columns made zero, the others kept free to the end."""
    size = 10
    weight, moment = draw(1, 3, size, seed=seed), correlated(size, seed)
    starts = iter(range(0, size, block))

    def rule(weights: Tensor, stiffness: Tensor) -> Settle:
        first = next(starts)
        return lambda index, column: 0 * column if first + index < gone else column

    found = compensate(weight, moment, rule, ridge=RIDGE, block=block)[0]
    mean = moment[0].diagonal().mean()
    full = moment[0] + RIDGE * mean * torch.eye(size)
    makeup = weight[0, :, :gone] @ full[:gone, gone:] @ torch.linalg.inv(full[gone:, gone:])
    assert not found[:, :gone].any()
    torch.testing.assert_close(found[:, gone:], weight[0, :, gone:] + makeup)


@given(st.integers(0, 50), st.booleans())
def test_inputs_that_do_not_go_together_leave_plain_rounding(seed: int, sort: bool) -> None:
    weight = draw(1, 4, 20, seed=seed)
    scale = clipped_scale(weight, 7)
    plain = (weight / scale[..., None]).round().clamp(-7, 7) * scale[..., None]
    moment = torch.eye(20)[None]
    found = compensate(weight, moment, rounding(scale, 7), block=6, sort=sort)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-14)


@pytest.mark.parametrize("sort", [False, True])
def test_blocks_and_groups_change_nothing(sort: bool) -> None:
    weight, moment = draw(3, 4, 20), correlated(20, 0, groups=3)
    scale = clipped_scale(weight, 7)
    whole = compensate(weight, moment, rounding(scale, 7), sort=sort)
    blocks = compensate(weight, moment, rounding(scale, 7), block=3, sort=sort)
    torch.testing.assert_close(whole, blocks, rtol=0, atol=1e-14)
    for g in range(3):
        part = slice(g, g + 1)
        alone = compensate(weight[part], moment[part], rounding(scale[part], 7), sort=sort)
        torch.testing.assert_close(alone, whole[part], rtol=0, atol=1e-14)


def test_rounding_is_between_plain_and_the_best_there_is() -> None:
    """All 5^4 ways to round one row, many times."""
    top, size = 2, 4
    grid = torch.tensor(list(itertools.product(range(-top, top + 1), repeat=size))).double()
    best = compensated = plain = 0.0
    for seed in range(100):
        weight, moment = draw(1, 1, size, seed=seed), correlated(size, seed)
        scale = clipped_scale(weight, top)
        found = compensate(weight, moment, rounding(scale, top), ridge=RIDGE, sort=True)
        codes = found / scale[..., None]
        torch.testing.assert_close(codes, codes.round().clamp(-top, top))
        nearest = (weight / scale[..., None]).round().clamp(-top, top) * scale[..., None]
        changes = grid * scale - weight[0]
        least = float((changes @ moment[0] * changes).sum(1).min())
        error = output_error(found - weight, moment)
        assert error >= least - 1e-12
        best, compensated = best + least, compensated + error
        plain += output_error(nearest - weight, moment)
    assert compensated - best < 0.25 * (plain - best)


def test_rounding_costs_much_less_than_without() -> None:
    weight, moment = draw(1, 16, 64), correlated(64, 1)
    scale = clipped_scale(weight, 7)
    nearest = (weight / scale[..., None]).round().clamp(-7, 7) * scale[..., None]
    found = compensate(weight, moment, rounding(scale, 7), sort=True, block=16)
    assert output_error(found - weight, moment) < 0.5 * output_error(nearest - weight, moment)


@pytest.mark.parametrize("sparsity", [0.25, 0.5, 0.75])
def test_pruning_costs_much_less_than_by_magnitude(sparsity: float) -> None:
    weight, moment = draw(1, 16, 64), correlated(64, 1)
    found = compensate(weight, moment, zeroing(sparsity), block=16)
    assert int((found == 0).sum()) == round(sparsity * weight.numel())
    magnitude = weight.abs()
    smallest = magnitude.flatten().kthvalue(round(sparsity * weight.numel())).values
    pruned = weight * (magnitude > smallest)
    assert output_error(found - weight, moment) < 0.5 * output_error(pruned - weight, moment)


def test_pruning_inputs_that_do_not_go_together_is_by_magnitude() -> None:
    weight = draw(1, 6, 8)
    found = compensate(weight, torch.eye(8)[None], zeroing(0.5), block=4)
    for part in (slice(0, 4), slice(4, 8)):
        before, after = weight[:, :, part], found[:, :, part]
        kept = before.abs() > before.abs().flatten().kthvalue(12).values
        torch.testing.assert_close(after, before * kept, rtol=0, atol=1e-14)


def test_inputs_of_small_weight_go_first() -> None:
    """With equal weights, those are pruned whose inputs are small."""
    moment = torch.diag(torch.tensor([9.0, 1.0, 4.0, 0.1]))[None]
    found = compensate(torch.ones(1, 2, 4), moment, zeroing(0.5))
    assert found[0].tolist() == [[1, 0, 1, 0]] * 2


def test_the_scale_of_a_row_is_the_best_there_is() -> None:
    weight = draw(5, 200)
    weight[0, 0] = 9.0  # one weight that is better clipped

    def error(scale: Tensor) -> Tensor:
        rounded = (weight / scale[:, None]).round().clamp(-7, 7) * scale[:, None]
        return (rounded - weight).square().sum(1)

    widest = weight.abs().amax(1) / 7
    least = torch.stack([error(share * widest) for share in torch.linspace(0.3, 1.2, 1000)]).amin(0)
    found = clipped_scale(weight, 7)
    assert bool((error(found) <= 1.05 * least).all())
    assert float(error(found)[0]) < 0.9 * float(error(widest)[0])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match=r"\(1, 2, 3\) has moments of shape \(1, 4, 4\)"):
        compensate(torch.ones(1, 2, 3), torch.eye(4)[None], zeroing(0.5))
    with pytest.raises(SpecError, match="ridge and block must be positive, got 0 and 128"):
        compensate(torch.ones(1, 2, 3), torch.eye(3)[None], zeroing(0.5), ridge=0)
    with pytest.raises(SpecError, match=r"sparsity must be in \[0, 1\], got 1.5"):
        zeroing(1.5)


LAYERS = [
    nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
    nn.Conv2d(4, 6, (1, 2), dilation=2, bias=False),
    nn.Conv2d(4, 8, 3, groups=2, padding="same", bias=False),
    nn.Conv2d(4, 4, 2, groups=4, padding="same", padding_mode="reflect", bias=False),
    nn.Linear(9, 5, bias=False),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_moments_give_the_size_of_what_comes_out(layer: nn.Module) -> None:
    samples = torch.randn(11, 4, 9, 9, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(layer)
    moment = input_moments(model, samples, rows=10**6)["0"]
    weight = as_matrix(weight_layers(model)["0"])
    found = (weight @ moment * weight).sum(-1).flatten()
    with torch.no_grad():
        out = model(samples).square()
    axes = (0, 1, 2) if isinstance(layer, nn.Linear) else (0, 2, 3)
    torch.testing.assert_close(found, out.mean(axes), rtol=1e-4, atol=1e-6)


def test_moments_of_a_few_rows_are_near_those_of_all() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(2), nn.Linear(196, 3))
    samples = torch.randn(40, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    few, all_ = (input_moments(model, samples, rows=rows) for rows in (2000, 10**6))
    assert list(few) == ["0", "2"]  # as they run
    assert float((few["0"] - all_["0"]).norm() / all_["0"].norm()) < 0.15
    assert not torch.equal(few["0"], all_["0"])
    assert torch.equal(few["0"], input_moments(model, samples, rows=2000)["0"])


def test_inputs_that_are_not_finite_are_told() -> None:
    samples = torch.full((2, 3), torch.nan)
    with pytest.raises(DataError, match="0: its inputs on the samples are not finite"):
        input_moments(nn.Sequential(nn.Linear(3, 2)), samples)
