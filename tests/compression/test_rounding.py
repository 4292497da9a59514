"""Rounding by measuring: second-order codes where they drift less and `max` stays as good."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from t3c.compression.data import Data
from t3c.compression.rounding import NEAREST, SETTLED, compare_roundings, drift_on
from t3c.convert import elasticize_
from t3c.nn.view import elastic_weights


def made(*layers: nn.Module, inputs: Tensor) -> nn.Module:
    model = nn.Sequential(*layers).eval()
    elasticize_(model, inputs[:2], calibration=[inputs])
    return model


def uneven(count: int, width: int) -> Tensor:
    """Inputs whose channels go together: what one rounds off others can make up for."""
    torch.manual_seed(1)
    return torch.randn(count, 4) @ torch.randn(4, width) + 0.05 * torch.randn(count, width)


def test_second_order_codes_are_taken_where_they_drift_less() -> None:
    torch.manual_seed(0)
    x = uneven(256, 32)
    model = made(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16), inputs=x)
    before = {n: w.dense.detach().clone() for n, w in elastic_weights(model).items()}
    choice = compare_roundings(model, [x[:200]], Data(x[200:]), int8=1.0)
    assert choice is not None
    assert choice.taken == SETTLED
    assert choice.tried[SETTLED] < choice.tried[NEAREST]
    for name, weight in elastic_weights(model).items():
        assert torch.equal(weight.dense, before[name])  # the model itself is left as it was
    strict = compare_roundings(model, [x[:200]], Data(x[200:]), int8=None)
    assert strict is not None
    assert strict.taken == NEAREST  # plain int8 is not known: the nearest codes are the measure
    assert strict.why.startswith("in 8 bits second-order drifts")


def test_networks_of_kernels_are_left_to_the_nearest_codes() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 3, 8, 8)
    model = made(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 4), inputs=x)
    assert compare_roundings(model, [x], Data(x), int8=None) is None


def test_drift_is_the_mean_over_samples() -> None:
    data = Data(torch.ones(40, 3))
    runs = (lambda arrays: np.asarray(arrays[0]) * 1.1), (lambda arrays: np.asarray(arrays[0]))
    assert drift_on(*runs, data) == pytest.approx(0.1, rel=1e-5)
