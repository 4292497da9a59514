from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.quant.calibrate import bias_correction, choose_percentile
from lab.quant.uniform import Grid, fit_uniform, uniform_quantize
from t3c.errors import DataError, SpecError


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def four_bits(weight: Tensor, percentile: float) -> Tensor:
    grid = Grid(4, per="tensor")
    return uniform_quantize(weight, *fit_uniform(weight, grid, percentile), grid)


def test_a_wild_outlier_is_clipped_and_a_uniform_weight_is_not() -> None:
    weight = torch.randint(-7, 8, (10, 200), generator=generator()) / 7
    inputs = torch.randn(64, 200, generator=generator()) / 8
    assert choose_percentile(weight, inputs, four_bits) == 100.0
    weight[3, 5] = 30.0
    inputs[:, 5] /= 100
    assert choose_percentile(weight, inputs, four_bits) < 100.0


def test_of_equals_the_largest() -> None:
    weight, inputs = torch.eye(3), torch.randn(4, 3, generator=generator())
    assert choose_percentile(weight, inputs, lambda w, _: w / 2, (99.0, 99.9, 99.5)) == 99.9


def test_the_divergence_is_taken_from_the_float_outputs() -> None:
    """KL(p, q) prefers the wide q, KL(q, p) the narrow one."""

    def logits(chance: float) -> Tensor:
        return torch.tensor([[chance], [1 - chance]]).log()

    chances = {100.0: 0.99, 99.0: 0.7}
    chosen = choose_percentile(
        logits(0.9), torch.ones(1, 1), lambda _, p: logits(chances[p]), (100.0, 99.0)
    )
    assert chosen == 99.0


def test_percentiles_need_data() -> None:
    weight, inputs = torch.eye(3), torch.ones(2, 3)
    with pytest.raises(SpecError):
        choose_percentile(weight, inputs, four_bits, ())
    with pytest.raises(DataError, match="samples"):
        choose_percentile(weight, inputs[:0], four_bits)
    with pytest.raises(DataError, match="99"):
        choose_percentile(weight, inputs, lambda w, _: w / 0, (99.0,))


def test_a_corrected_linear_layer_has_no_mean_error() -> None:
    weight = torch.randn(7, 30, dtype=torch.float64, generator=generator())
    inputs = torch.rand(50, 30, dtype=torch.float64, generator=generator())
    quantized = four_bits(weight, 99.0)
    error = inputs @ (weight - quantized).T
    offset = bias_correction(weight - quantized, inputs.mean(0))
    assert float(error.mean(0).abs().min()) > 1e-3
    torch.testing.assert_close((error - offset).mean(0), torch.zeros(7, dtype=torch.float64))


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_a_corrected_convolution_has_no_mean_error(groups: int) -> None:
    weight = torch.randn(12, 6 // groups, 3, 3, dtype=torch.float64, generator=generator())
    images = torch.rand(5, 6, 8, 8, dtype=torch.float64, generator=generator())
    images *= torch.arange(1, 7)[:, None, None]
    change = weight - four_bits(weight, 99.0)
    mean = images.mean((0, 2, 3))
    offset = bias_correction(change, mean, groups)
    # On a torus every tap sees every pixel, so there is no border to be approximate at.
    error = F.conv2d(F.pad(images, (1, 1, 1, 1), mode="circular"), change, groups=groups)
    assert float(error.mean((0, 2, 3)).abs().max()) > 1e-2
    torch.testing.assert_close(error.mean((0, 2, 3)), offset)
    torch.testing.assert_close(bias_correction(change, mean.reshape(groups, -1), groups), offset)


def test_a_flat_image_is_corrected_but_for_its_padding() -> None:
    change = torch.randn(4, 3, 3, 3, dtype=torch.float64, generator=generator())
    mean = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    flat = mean[None, :, None, None].expand(1, 3, 6, 6)
    left = F.conv2d(flat, change, padding=1) - bias_correction(change, mean)[:, None, None]
    assert float(left[..., 1:-1, 1:-1].abs().max()) < 1e-12
    assert float(left[..., 0, :].abs().max()) > 0.1


def test_means_of_other_channels() -> None:
    for groups, channels in ((1, 4), (2, 3), (5, 15), (0, 0)):
        with pytest.raises(DataError, match=f"{groups} groups"):
            bias_correction(torch.zeros(4, 3), torch.zeros(channels), groups)
