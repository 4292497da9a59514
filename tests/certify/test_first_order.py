from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp

from oracles import first_order_drift
from t3c.certify.drift import relative_drift
from t3c.certify.sensitivity import layer_sensitivities
from t3c.convert import ElasticConfig, elasticize_, state_of
from t3c.nn import at, elastic_weights
from t3c.spec import LayerPoint, Profile


def elastic(outputs: int = 6) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(8, 24, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(24 * 16, 48), nn.Tanh(),
        nn.Linear(48, outputs),
    )  # fmt: skip
    x = torch.randn(12, 8, 4, 4)
    elasticize_(model, x)
    return model, x


def moved(model: nn.Module, only: str | None = None, bits: int = 6) -> Profile:
    """Everything at full rank in 8 bits, but one layer (or all) at low rank and bits."""
    points = {}
    for plan in state_of(model).plan.layers:
        name = plan.spec.name
        low = only is None or name == only
        points[name] = LayerPoint(plan.cap if low else plan.ranks[-1], bits if low else 8)
    return Profile("moved", points)


def test_first_order_meets_the_drift_of_small_changes() -> None:
    model, x = elastic()
    profile = Profile("p", {n: LayerPoint(p.rank, 8) for n, p in moved(model).points.items()})
    top = {p.spec.name: LayerPoint(p.ranks[-1], 8) for p in state_of(model).plan.layers}
    with torch.no_grad(), at(model, Profile("top", top)):
        observed = relative_drift(model(x), state_of(model).original(x))
    estimate = first_order_drift(model, state_of(model).original, Profile("top", top), x)
    np.testing.assert_allclose(estimate, observed, rtol=0.05)
    larger = first_order_drift(model, state_of(model).original, profile, x)
    assert larger.mean() > 3 * estimate.mean()


@pytest.mark.parametrize("outputs", [6, 400])
def test_layer_sensitivity_is_the_first_order_drift_of_that_layer_alone(outputs: int) -> None:
    """Exactly for few outputs, by random probes for many."""
    model, x = elastic(outputs)
    sensitivities = layer_sensitivities(model, x)
    state = state_of(model)
    for plan in state.plan.layers:
        name = plan.spec.name
        point = moved(model, name).points[name]
        got = sensitivities[name].squared_drift(point)
        base = dict(state.original.named_parameters())
        tangent = {n: torch.zeros_like(p) for n, p in base.items()}
        layer = elastic_weights(model)[name]
        tangent[f"{name}.weight"] = (layer.weight_at(point) - layer.weight_at(None)).detach()
        z, change = jvp(lambda p: functional_call(state.original, p, x), (base,), (tangent,))
        wanted = float((change.norm(dim=1) / z.norm(dim=1)).square().mean())
        assert got == pytest.approx(wanted, rel=1e-3 if outputs == 6 else 0.35)


def test_factors_are_not_judged_by_the_probes_they_suit() -> None:
    """Of many outputs some directions are probed: others for the drift than for the factors."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(96, 400, bias=False)), torch.randn(128, 96)
    elasticize_(model, x[:2], ElasticConfig(store_ratio=1.0), calibration=[x])
    weight = elastic_weights(model)["0"]
    point = LayerPoint(48, 8)
    with torch.no_grad():
        z = x[:16] @ weight.dense.T
        change = x[:16] @ (weight.weight_at(point) - weight.dense).T
    wanted = float((change.norm(dim=1) / z.norm(dim=1)).square().mean())
    got = layer_sensitivities(model, x[:16])["0"].squared_drift(point)
    assert got == pytest.approx(wanted, rel=0.2)


@pytest.mark.parametrize("samples", [3, 5])
def test_rows_that_are_not_samples(samples: int) -> None:
    """Time before batch, and a table of positions without a batch, count for their samples."""

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(64, 64), nn.Linear(64, 6)
            self.table = nn.Embedding(16, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.fc(x.transpose(0, 1))).transpose(0, 1)
            z: torch.Tensor = self.head((y + self.table(torch.arange(x.shape[1]))).mean(1))
            return z

    torch.manual_seed(0)
    model, x = TimeFirst(), torch.randn(samples, 5, 64)
    elasticize_(model, x)
    state, found = state_of(model), layer_sensitivities(model, x)
    for name in ("fc", "table"):
        weight = elastic_weights(model)[name]
        point = LayerPoint(weight.spec.full_rank, 3)
        base = dict(state.original.named_parameters())
        tangent = {n: torch.zeros_like(p) for n, p in base.items()}
        tangent[f"{name}.weight"] = (weight.weight_at(point) - weight.dense).detach()
        z, change = jvp(lambda p: functional_call(state.original, p, x), (base,), (tangent,))
        wanted = float((change.norm(dim=1) / z.norm(dim=1)).square().mean())
        assert found[name].squared_drift(point) == pytest.approx(wanted, rel=1e-3)
