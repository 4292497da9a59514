from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from t3c.convert import ElasticConfig, elasticize_, plan_conversion, state_of
from t3c.convert.config import KERNELS
from t3c.nn import elastic_weights
from t3c.nn.observe import observe, observe_adjoints, observe_moments
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


@pytest.mark.parametrize("convolution", KERNELS)
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


def test_adjoints_are_what_the_output_does_with_a_layers() -> None:
    """Of a single output, signs do not matter: the moment is that of its gradient over its size."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.ReLU(inplace=True), nn.Conv2d(5, 4, 2), nn.Flatten(),
        nn.Linear(36, 1),
    ).requires_grad_(False)  # fmt: skip
    x = torch.randn(7, 3, 6, 6)
    config = ElasticConfig(store_ratio=1.0, min_weights=1)
    specs = {p.spec.name: p.spec for p in plan_conversion(model, x, config).layers}
    found = observe_adjoints(model, {name: specs[name] for name in ("0", "2")}, [x[:4], x[4:]])
    assert not any(module._forward_hooks for module in model.modules())
    for name, behind in (("0", model[1:]), ("2", model[3:])):
        hidden = model[: int(name) + 1](x).clone().requires_grad_(True)
        answer = behind(hidden + 0)
        (adjoint,) = torch.autograd.grad((answer / answer.detach().abs()).sum(), hidden)
        rows = adjoint.movedim(1, -1).reshape(-1, adjoint.shape[1]).double()
        wanted = rows.T @ rows
        torch.testing.assert_close(found[name], wanted / wanted.diagonal().mean())


def test_a_model_without_a_gradient_has_no_adjoints() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            answer: Tensor = self.layer(x)
            return answer

    model, x = Frozen(), torch.randn(40, 16)
    config = ElasticConfig(store_ratio=1.0, min_weights=1)
    specs = {p.spec.name: p.spec for p in plan_conversion(model, x, config).layers}
    assert observe_adjoints(model, specs, [x]) == {}
    assert elasticize_(model, x[:2], config, calibration=[x]).converted


def test_factors_for_the_use_of_a_layer_drift_less() -> None:
    """Half of the hidden channels is hardly read: ranks are not spent on them."""
    torch.manual_seed(1)
    original = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).eval()
    with torch.no_grad():
        original[1].weight[:, :32] *= 0.01
    x = torch.randn(400, 64)
    drift = {}
    for metric in ("inputs", "both"):
        model = copy.deepcopy(original)
        elasticize_(model, x[:2], ElasticConfig(store_ratio=1.0, metric=metric), calibration=[x])
        weight = elastic_weights(model)["0"]
        point = LayerPoint(16, 8)
        assert point.rank in state_of(model).plan.layers[0].ranks
        with torch.no_grad():
            weight.point = point
            drift[metric] = float((model(x) - original(x)).norm() / original(x).norm())
    assert drift["both"] < 0.7 * drift["inputs"]
