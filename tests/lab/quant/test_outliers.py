from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab.quant.outliers import outlier_channels, split_bits
from lab.quant.uniform import Grid, fit_uniform, uniform_quantize
from t3c.errors import DataError, SpecError


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def per_tensor(weight: Tensor, bits: int) -> Tensor:
    grid = Grid(bits, per="tensor")
    return uniform_quantize(weight, *fit_uniform(weight, grid), grid)


@given(st.integers(1, 60), st.data())
def test_as_many_rows_as_asked_and_the_largest(rows: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, rows))
    weight = normal(rows, 2, 3)
    mask = outlier_channels(weight, count / rows)
    assert int(mask.sum()) == count
    largest = weight.abs().amax((1, 2))
    if 0 < count < rows:
        assert largest[mask].min() >= largest[~mask].max()
        assert int(outlier_channels(weight, (count - 0.5) / rows).sum()) == count


def test_a_share_is_not_rounded_up_by_its_float() -> None:
    assert int(outlier_channels(normal(100, 2), 0.07).sum()) == 7


def test_equal_rows_are_taken_in_order() -> None:
    assert outlier_channels(torch.ones(5, 2), 0.4).tolist() == [True, True, False, False, False]


def test_outliers_get_more_bits_and_leave_the_scale_to_the_others() -> None:
    weight = normal(20, 50)
    weight[[4, 11]] *= 30
    mask = outlier_channels(weight, 0.1)
    assert mask.nonzero().flatten().tolist() == [4, 11]
    split = split_bits(weight, mask, per_tensor, 4, 2)
    torch.testing.assert_close(split[mask], per_tensor(weight[mask], 6))
    torch.testing.assert_close(split[~mask], per_tensor(weight[~mask], 4))
    error, whole = (split - weight).norm(dim=1), (per_tensor(weight, 4) - weight).norm(dim=1)
    assert float(error[mask].max()) < 0.4 * float(whole[mask].min())
    assert float(error[~mask].max()) < 0.4 * float(whole[~mask].min())


def test_no_outliers_and_nothing_else() -> None:
    weight = normal(6, 5)
    for mask, bits in ((torch.zeros(6).bool(), 3), (torch.ones(6).bool(), 5)):
        torch.testing.assert_close(
            split_bits(weight, mask, per_tensor, 3, 2), per_tensor(weight, bits)
        )


def test_gradients_reach_both_parts() -> None:
    weight = normal(6, 5).requires_grad_()
    upstream = normal(6, 5) + 1
    split_bits(weight, outlier_channels(weight, 0.5), per_tensor, 3, 2).backward(upstream)
    torch.testing.assert_close(weight.grad, upstream)


@given(st.lists(st.booleans(), min_size=1), st.integers(2, 8), st.integers(0, 7))
def test_the_split_asks_for_more_bits_where_the_mask_is(
    chosen: list[bool], bits: int, extra: int
) -> None:
    asked = []

    def count(part: Tensor, width: int) -> Tensor:
        asked.extend([width] * part.numel())
        return part

    mask, weight = torch.tensor(chosen), normal(len(chosen), 3)
    assert torch.equal(split_bits(weight, mask, count, bits, extra), weight)
    widths = [min(8, bits + extra) if more else bits for more in chosen for _ in range(3)]
    assert sorted(asked) == sorted(widths)


def test_splits_that_cannot_be() -> None:
    weight, mask = normal(4, 3), torch.zeros(4).bool()
    with pytest.raises(SpecError, match="fraction"):
        outlier_channels(weight, 1.1)
    for bits, extra in ((1, 2), (9, 0), (4, -1)):
        with pytest.raises(SpecError, match="bits"):
            split_bits(weight, mask, per_tensor, bits, extra)
    with pytest.raises(DataError, match="4 rows"):
        split_bits(weight, mask[:3], per_tensor, 4, 2)
