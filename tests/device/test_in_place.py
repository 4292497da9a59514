"""Layer points timed in the whole network, on an engine whose times follow from its weights."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from conftest import counted
from t3c.artifact.devices import LayerTiming
from t3c.artifact.reader import Artifact
from t3c.convert import ElasticConfig, elasticize_, state_of
from t3c.device import in_place
from t3c.device.in_place import time_in_place
from t3c.engines import open_engine
from t3c.exporter import ExportConfig, content, time_points
from t3c.exporter.timing import _every_rank
from t3c.nn.inputs import evaluating
from t3c.spec import Factorization, Form, Latency

BASE = 5.0  # what a network takes besides its weights


class Weighed:
    """A compiled graph that takes a microsecond for each number of its weights."""

    def __init__(self, graph: onnx.ModelProto) -> None:
        codes = [t for t in graph.graph.initializer if t.name.endswith("/weight")]
        self.ms = BASE + sum(len(t.raw_data) for t in codes) / 1e3


class Engine:
    name, threads, version = "torch", 1, "0"

    def compile(self, graph: onnx.ModelProto) -> Weighed:
        return Weighed(graph)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many networks were timed at once, each time."""
    lots: list[int] = []

    def time_sessions(
        sessions: dict[str, Weighed], inputs: object, rounds: int, quiet: object
    ) -> dict[str, Latency]:
        lots.append(len(sessions))
        return {
            name: Latency(s.ms, s.ms, s.ms, (s.ms, s.ms), rounds) for name, s in sessions.items()
        }

    monkeypatch.setattr(in_place, "time_sessions", time_sessions)
    monkeypatch.setattr(in_place, "paced", lambda calls, rounds: rounds)
    return lots


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 1), nn.Flatten(), nn.Linear(64 * 16, 40),
    )  # fmt: skip
    config = ElasticConfig(store_ratio=1.0, convolution=Factorization.TUCKER1)
    elasticize_(model, torch.randn(2, 32, 4, 4), config)
    return model


@pytest.fixture
def every_rank(tmp_path: Path) -> tuple[nn.Module, Artifact]:
    model = network()
    with evaluating(model):
        traced = content.topology(model)
        return model, _every_rank(model, traced, weight_only=False)


def alone(model: nn.Module) -> tuple[LayerTiming, ...]:
    return counted(None, [(p.spec, p.ranks) for p in state_of(model).plan.layers])


def weights(model: nn.Module, name: str, rank: int) -> int:
    plan = next(p for p in state_of(model).plan.layers if p.spec.name == name)
    shapes = plan.spec.stage_shapes(rank) if rank < plan.spec.full_rank else [plan.spec.dense_shape]
    return sum(int(torch.Size(shape).numel()) for shape in shapes)


def test_points_take_what_the_network_takes_more_or_less(
    every_rank: tuple[nn.Module, Artifact], told: list[int]
) -> None:
    model, artifact = every_rank
    plans = {p.spec.name: p for p in state_of(model).plan.layers}
    tops = {name: plan.ranks[-1] for name, plan in plans.items()}
    found = time_in_place(artifact, Engine(), alone(model))
    assert {(t.layer, t.rank) for t in found} == {(n, k) for n, p in plans.items() for k in p.ranks}
    whole = BASE + sum(weights(model, name, rank) for name, rank in tops.items()) / 1e3
    dense = {t.layer: t.ms[Form.DENSE] for t in found if t.rank == tops[t.layer]}
    assert sum(dense.values()) == pytest.approx(whole)
    seen = 0
    for t in found:
        assert t.ms[Form.DENSE] == pytest.approx(dense[t.layer])  # at every rank
        if t.rank < tops[t.layer]:
            saved = (weights(model, t.layer, tops[t.layer]) - weights(model, t.layer, t.rank)) / 1e3
            least = in_place.LEAST * dense[t.layer]
            # Gains of kernels of one geometry are those of both, and half of them each.
            both = saved * (2 if t.layer in ("0", "2") else 1)
            chance = abs(both) < in_place.CHANCE * whole
            wanted = dense[t.layer] if chance else max(dense[t.layer] - saved, least)
            assert t.ms[Form.FACTORED] == pytest.approx(wanted)
            seen += wanted < dense[t.layer]
    assert seen > 5
    # The two kernels are exchanged together; so few networks are compiled at a time.
    assert max(told) <= 1 + in_place.LOT
    offered = {name: len(plans[name].ranks) - 1 for name in ("0", "4", "6")}
    assert sum(n - 1 for n in told) >= sum(offered.values())
    assert sum(n - 1 for n in told) < sum(2 * len(p.ranks) for p in plans.values())


def test_chance_is_smoothed_out() -> None:
    """No rank gains more than a lower one; what is gained in all stays."""
    gains = {(8, Form.FACTORED): 3.0, (16, Form.FACTORED): 1.0, (24, Form.FACTORED): 2.0}
    found = in_place._falling(gains | {(8, Form.ALIGNED): 0.5, (16, Form.ALIGNED): 0.4})
    assert [found[rank, Form.FACTORED] for rank in (8, 16, 24)] == [3.0, 1.5, 1.5]
    assert [found[rank, Form.ALIGNED] for rank in (8, 16)] == [0.5, 0.4]
    assert in_place._falling({}) == {}


def test_exports_time_in_place_if_asked_to(
    monkeypatch: pytest.MonkeyPatch, told: list[int]
) -> None:
    monkeypatch.setattr(sys.modules["t3c.exporter.timing"], "time_layers", counted)
    monkeypatch.setattr(sys.modules["t3c.exporter.timing"], "open_engine", lambda *_: Engine())
    model = network()
    plain, placed = (time_points(model, ExportConfig(in_place=p)) for p in (False, True))
    assert plain.layers == alone(model)
    assert told
    assert [(t.layer, t.rank) for t in placed.layers] == [(t.layer, t.rank) for t in plain.layers]
    assert placed.layers != plain.layers


def test_a_real_engine_is_timed_in_place(
    every_rank: tuple[nn.Module, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, artifact = every_rank
    monkeypatch.setattr(in_place, "ROUNDS", 3)
    found = time_in_place(artifact, open_engine("openvino", 1), alone(model))
    assert [t.ms.keys() for t in found] == [t.ms.keys() for t in alone(model)]


def test_weights_of_one_geometry_need_not_all_be_aligned(tmp_path: Path, told: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with torch.no_grad():
        model[2].weight[:, 1:] = model[2].weight[:, :1]  # of rank one: no block is fit for it
    elasticize_(model, torch.randn(4, 64), ElasticConfig(store_ratio=1.0))
    plans = state_of(model).plan.layers
    with evaluating(model):
        artifact = _every_rank(model, content.topology(model), weight_only=False)
    aligned = [spec.aligned for spec in artifact.manifest.specs.values()]
    assert aligned[0] != aligned[1]
    times = [
        LayerTiming(layer=p.spec.name, rank=rank, ms=dict.fromkeys(Form, 1.0))
        for p in plans
        for rank in p.ranks
    ]
    found = time_in_place(artifact, Engine(), times)
    assert len(found) == len(times)
