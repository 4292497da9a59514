"""Inputs evened out: the same function, finer grids, one factor for what reads one tensor."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from t3c.artifact.graph import Traced, trace
from t3c.convert import ElasticConfig, elasticize_, smooth_, state_of
from t3c.convert.smooth import Evened, unsmooth_
from t3c.engines.torch import TorchSession
from t3c.errors import DataError, SpecError
from t3c.evidence.original import as_handed_over
from t3c.exporter.content import topology
from t3c.factor.svd import balanced, svd_stages
from t3c.nn.view import elastic_weights


class Net(nn.Module):
    """Two layers that read one tensor, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.first, self.second = nn.Linear(32, 48), nn.Linear(32, 48, bias=False)
        self.last = nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        out: Tensor = self.last(torch.relu(self.first(x) * self.second(x)))
        return out


def net() -> Net:
    torch.manual_seed(0)
    model = Net().eval()
    with torch.no_grad():
        model.norm.weight[3] = 40.0  # a channel that is far larger than the others
    return model


def rounded(x: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return (x / scale).round() * scale


def inputs() -> Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def test_it_is_the_same_function_and_rounds_better() -> None:
    model, x = net(), inputs()
    wanted, before = model(x), copy.deepcopy(model)
    found = smooth_(model, [x[:32], (x[32:], x[32:])])
    assert {"first", "second"} <= set(found)
    assert found["first"] == found["second"]
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-4)
    assert isinstance(model.first, Evened)
    read = model.norm(x)
    plain = before.first(rounded(read)) - before.first(read)
    evened = model.first.linear(rounded(read * model.first.inverse)) - before.first(read)
    assert evened.norm() < 0.5 * plain.norm()


def test_smoothing_is_undone() -> None:
    model, x = net(), inputs()
    before = copy.deepcopy(model)
    assert smooth_(model, [x])
    unsmooth_(model)
    assert not any(isinstance(module, Evened) for module in model.modules())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before.state_dict()[name], rtol=1e-5, atol=1e-7)


def test_the_original_is_quantized_as_it_was_handed_over() -> None:
    model, x = net(), inputs()
    wanted = model(x).detach().numpy()
    smooth_(model, [x])
    elasticize_(model, x[:2], calibration=[x])
    found = as_handed_over(model)
    assert not any("inverse" in tensor.name for tensor in found.graph.initializer)
    answer = TorchSession(found).run([x.numpy()])[0]
    np.testing.assert_allclose(answer, wanted, rtol=1e-3, atol=1e-3)


def test_layers_that_read_one_tensor_read_one_still() -> None:
    model, x = net(), inputs()
    smooth_(model, [x], alpha=0.5)
    elasticize_(model, x[:2], calibration=[x])
    names = {layer.spec.name for layer in state_of(model).plan.layers}
    assert names == {"first.linear", "second.linear", "last.linear"}
    found: Traced = topology(model)
    elastic = {n.name: n.input[0] for n in found.model.graph.node if n.op_type == "Elastic"}
    assert elastic["first.linear"] == elastic["second.linear"] != elastic["last.linear"]
    assert sum(node.op_type == "Mul" for node in found.model.graph.node) == 3  # one is the model's


def test_tables_and_other_factors_stay_apart() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.table(ids))
            return out

    model = Tied()
    assert smooth_(model, [torch.arange(8)[None]]) == {}
    twice = trace(_Scaled(), torch.randn(2, 4), {})
    assert sum(node.op_type == "Mul" for node in twice.model.graph.node) == 2


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.full((4,), 2.0))
        self.register_buffer("b", torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x * self.a, x * self.b], dim=1)


def test_what_is_even_stays() -> None:
    torch.manual_seed(0)
    model, signs = nn.Linear(16, 16), torch.randn(64, 16).sign()
    with torch.no_grad():
        model.weight.copy_(model.weight.sign() * 0.25)
    held = nn.Sequential(model)
    assert smooth_(held, [signs]) == {}  # every code is exact as it is
    assert held[0] is model


def test_what_cannot_be() -> None:
    with pytest.raises(SpecError, match=r"alpha must be in \[0, 1\], got 2"):
        smooth_(net(), [inputs()], alpha=2)
    with pytest.raises(DataError, match="no linear layer ran"):
        smooth_(net(), [])
    with pytest.raises(DataError, match="not finite"):
        smooth_(net(), [inputs() / 0])


def test_the_best_balance_rounds_no_worse_than_none() -> None:
    torch.manual_seed(0)
    x = torch.randn(800, 24) * torch.logspace(0, -2, 24)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    config = ElasticConfig(rank_fractions=(0.5,), tile=4, store_ratio=1.0)

    @torch.no_grad()
    def error(balance: float | None) -> float:
        made = copy.deepcopy(model)
        elasticize_(made, x[:2], replace(config, balance=balance), calibration=[x])
        reduce, expand = elastic_weights(made)["0"].stored_stages()
        inner = x @ reduce.T
        return float(((rounded(inner) - inner) @ expand.T).norm())

    assert error(None) < 0.7 * error(0.0)
    spectral = copy.deepcopy(model)
    elasticize_(spectral, x[:2], replace(config, spectral=True))
    with pytest.raises(SpecError, match=r"0 with spectral factors, got 0\.5"):
        replace(config, balance=0.5, spectral=True)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_balanced_factors_are_the_same_product(share: float) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(20, 12), torch.randn(400, 12) * torch.logspace(0, -2, 12)
    moment = x.T @ x / len(x)
    reduce, expand = svd_stages(weight)
    small, large = balanced(reduce, expand, share, moment)
    for rank in (3, 12):
        torch.testing.assert_close(
            large[:, :rank] @ small[:rank], expand[:, :rank] @ reduce[:rank], rtol=1e-4, atol=1e-4
        )
    inner = (x @ small.T).square().mean(dim=0).sqrt()
    before = (x @ reduce.T).square().mean(dim=0).sqrt()
    wanted = (before / before.mean()).pow(1 - share)
    torch.testing.assert_close(inner / inner.mean(), wanted / wanted.mean(), rtol=1e-3, atol=1e-3)
