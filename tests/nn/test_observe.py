from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from t3c.convert import ElasticConfig, elasticize_, plan_conversion, state_of
from t3c.nn import elastic_weights
from t3c.nn.observe import observe, observe_moments
from t3c.spec import Factorization, LayerPoint


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 5, stride=2, padding=1, dilation=2)
        self.deep = nn.Conv2d(24, 24, 3, padding=1, groups=12)
        self.wide = nn.Conv2d(24, 32, 3, padding=1)
        self.time = nn.Conv1d(4, 32, 5, padding=2, stride=2)
        self.twice = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.deep(self.stem(x)))
        y = self.time(x.mean(dim=(2, 3))[:, None].expand(-1, 4, -1))
        z: Tensor = self.twice(torch.relu(self.twice(y.mean(-1))))
        return z


@pytest.mark.parametrize("kind", ["stem", "deep", "time", "twice"])
def test_moments_are_what_a_change_of_the_weight_does(kind: str) -> None:
    """sum ||dW a||^2 over positions is tr dW C dW^T times their number, groups and all."""
    torch.manual_seed(0)
    model, x = Mixed().eval().requires_grad_(False), torch.randn(3, 3, 20, 20)
    config = ElasticConfig(store_ratio=1.0, min_weights=1)
    plans = {p.spec.name: p for p in plan_conversion(model, x, config).layers}
    spec = plans[kind].spec
    assert spec.factorization is Factorization.SVD
    (moment,) = observe_moments(model, {kind: spec}, [x[:2], x[2:]]).values()
    layer = model.get_submodule(kind)
    inputs: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(x)
    handle.remove()
    assert isinstance(layer.weight, Tensor)
    if spec.groups > 1:
        change = torch.randn(layer.weight[:1].shape).expand_as(layer.weight)  # one for all groups
    else:
        change = torch.randn_like(layer.weight)
    total = count = 0.0
    for one in inputs:
        if kind == "twice":
            out = F.linear(one, change)
            count += one.numel() / spec.in_channels
        else:
            run = F.conv1d if kind == "time" else F.conv2d
            out = run(one, change, None, spec.stride, spec.padding, spec.dilation, spec.groups)
            count += spec.groups * len(one) * out[0, 0].numel()
        total += float(out.double().square().sum())
    flat = change.double().flatten(1)
    if spec.groups > 1:
        flat = flat[: spec.out_channels // spec.groups]
    wanted = float((flat @ moment @ flat.T).trace()) * count
    assert total == pytest.approx(wanted, rel=1e-4)


def test_runs_are_counted_with_their_sizes() -> None:
    seen = observe(Mixed().eval(), torch.randn(2, 3, 20, 20))
    assert len(seen.runs("twice")) == 2
    (stem,) = seen.runs("stem")
    assert (stem.in_size, stem.out_size) == ((20, 20), (7, 7))
    (time,) = seen.runs("time")
    assert (time.in_size, time.out_size) == ((32,), (16,))


@pytest.mark.parametrize("convolution", [Factorization.TUCKER2, Factorization.CP])
def test_data_aware_prefixes_serve_the_data(convolution: Factorization) -> None:
    """On the inputs it was made for, the data-aware layer is closer than the plain one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.Flatten(), nn.Linear(512, 64))
    mix = torch.randn(16, 4) @ torch.randn(4, 16)
    x = torch.einsum("oc,nchw->nohw", mix, torch.randn(64, 16, 4, 4))
    x = x + 0.1 * torch.randn(64, 16, 4, 4)
    config = ElasticConfig(convolution=convolution, store_ratio=1.0)
    errors = {}
    for name, data in (("plain", None), ("aware", [x])):
        model = copy.deepcopy(net)
        elasticize_(model, x[:2], config, calibration=data)
        plan = next(p for p in state_of(model).plan.layers if p.spec.name == "0")
        weight = elastic_weights(model)["0"]
        change = weight.weight_at(LayerPoint(plan.ranks[0], 8)) - weight.dense
        errors[name] = float(F.conv2d(x, change.detach(), padding=1).norm())
    assert errors["aware"] < 0.9 * errors["plain"]
