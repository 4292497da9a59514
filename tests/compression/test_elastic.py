"""What is chosen where a model is made elastic is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from t3c.compression.elastic import make_elastic, smooth_inputs


@pytest.fixture
def net() -> nn.Module:
    """A network whose first layer reads one channel that is much larger than the others."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(64)
    with torch.no_grad():
        norm.weight[3] = 60.0
    layers = nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)
    return nn.Sequential(norm, *layers).eval()


def test_smoothing_and_balance_are_choices_with_figures(net: nn.Module) -> None:
    x = torch.randn(128, 64)
    wanted = net(x)
    smoothing = smooth_inputs(net, [x])
    (balance,) = make_elastic(net, x[:2], [x], {})
    torch.testing.assert_close(net(x), wanted, rtol=1e-4, atol=1e-4)
    assert smoothing.taken.startswith(("1 ", "2 "))
    assert smoothing.tried["smoothed"] < 0.9 * smoothing.tried["as they are"]
    assert balance.tried.get("balanced", 1.0) <= balance.tried["as they are"]


def test_what_is_not_tried_is_not_told(net: nn.Module) -> None:
    x = torch.randn(128, 64)
    choices = make_elastic(net, x[:2], [x], {})
    assert [choice.what for choice in choices] == ["balance of both factors of a matrix"]
