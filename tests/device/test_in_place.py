"""Layer points timed in the whole network, on an engine whose times follow from its weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from conftest import counted
from t3c.artifact.devices import choose_forms, few_pay
from t3c.artifact.reader import Artifact
from t3c.convert import ElasticConfig, elasticize_, state_of
from t3c.device import in_place
from t3c.device.in_place import time_in_place
from t3c.engines import open_engine
from t3c.exporter import content, time_points
from t3c.exporter.allocate import measured_shares
from t3c.exporter.timing import _every_rank
from t3c.nn.inputs import evaluating
from t3c.spec import Factorization, Form, LayerPoint


class Weighed:
    """A compiled graph that takes a microsecond for each number of its weights."""

    def __init__(self, graph: onnx.ModelProto, engine: Engine) -> None:
        codes = [t for t in graph.graph.initializer if t.name.endswith("/weight")]
        self.ms = {(t.name.removesuffix("/weight"),): len(t.raw_data) / 1e3 for t in codes}
        self.engine = engine

    def run(self, inputs: object) -> dict[tuple[str, ...], float]:
        rest = {("what is between layers",): 5.0}
        return {names: ms * self.engine.slower for names, ms in (self.ms | rest).items()}


class Engine:
    name, threads, version = "torch", 1, "0"
    pay = 1.0

    def __init__(self) -> None:
        self.slower, self.compiled = 1.0, 0

    def compile(self, graph: onnx.ModelProto) -> Any:
        raise AssertionError("no whole network is timed")

    def operations(self, graph: onnx.ModelProto) -> Weighed:
        self.compiled += 1
        return Weighed(graph, self)


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


def weights(model: nn.Module, name: str, rank: int) -> int:
    plan = next(p for p in state_of(model).plan.layers if p.spec.name == name)
    shapes = plan.spec.stage_shapes(rank) if rank < plan.spec.full_rank else [plan.spec.dense_shape]
    return sum(int(torch.Size(shape).numel()) for shape in shapes)


def test_points_take_what_their_operations_take(every_rank: tuple[nn.Module, Artifact]) -> None:
    model, artifact = every_rank
    plans = {p.spec.name: p for p in state_of(model).plan.layers}
    engine = Engine()
    found = time_in_place(artifact, engine)
    assert found is not None
    assert [(t.layer, t.rank) for t in found] == [(n, k) for n, p in plans.items() for k in p.ranks]
    for t in found:
        full = plans[t.layer].ranks[-1]
        assert t.ms[Form.DENSE] == pytest.approx(weights(model, t.layer, full) / 1e3)
        if t.rank < full:
            wanted = weights(model, t.layer, t.rank) / 1e3
            assert t.ms[Form.FACTORED] == pytest.approx(wanted)
    # One compilation serves all layers: as many as the layer with most ranks has of them.
    assert engine.compiled <= 1 + 2 * (max(len(p.ranks) for p in plans.values()) - 1)


def test_a_machine_that_becomes_slower_is_levelled(every_rank: tuple[nn.Module, Artifact]) -> None:
    class Slowing(Engine):
        def operations(self, graph: onnx.ModelProto) -> Weighed:
            self.slower = 1.0 if self.compiled < 1 else 1.5
            return super().operations(graph)

    slow, steady = (time_in_place(every_rank[1], engine) for engine in (Slowing(), Engine()))
    assert slow is not None
    assert steady is not None
    for one, other in zip(slow, steady, strict=True):
        assert one.ms == pytest.approx(other.ms)


def test_layers_that_are_not_told_are_not_guessed(every_rank: tuple[nn.Module, Artifact]) -> None:
    class Silent(Engine):
        def operations(self, graph: onnx.ModelProto) -> Weighed:
            found = super().operations(graph)
            del found.ms[next(iter(found.ms))]
            return found

    assert time_in_place(every_rank[1], Silent()) is None
    assert time_in_place(every_rank[1], open_engine("torch", 1)) is None


def test_times_do_not_fall_with_rank() -> None:
    taken = {8: 1.0, 16: 3.0, 24: 2.0}
    found = {("a", rank, Form.FACTORED): [ms] for rank, ms in taken.items()}
    found |= {("b", 8, Form.FACTORED): [1.5, 0.5], ("b", 8, Form.ALIGNED): [0.4]}
    rising = in_place._rising(["a", "b"], [8, 16, 24], found)
    assert [rising[rank, Form.FACTORED] for rank in (8, 16, 24)] == [1.0, 2.5, 2.5]
    assert rising[8, Form.ALIGNED] == 0.4


def test_exports_time_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine tells what operations take; layers are timed alone where it does not."""
    timing = sys.modules["t3c.exporter.timing"]
    monkeypatch.setattr(timing, "open_engine", lambda *_: Engine())
    monkeypatch.setattr(timing, "time_layers", lambda *_, **__: pytest.fail("timed alone"))
    model = network()
    placed = time_points(model)
    assert {t.layer for t in placed.layers} == {p.spec.name for p in state_of(model).plan.layers}
    monkeypatch.setattr(timing, "time_in_place", lambda *_, **__: None)
    monkeypatch.setattr(timing, "time_layers", counted)
    plans = state_of(model).plan.layers
    assert time_points(model).layers == counted(None, [(p.spec, p.ranks) for p in plans])


def test_a_real_engine_is_timed_in_place(
    every_rank: tuple[nn.Module, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, artifact = every_rank
    monkeypatch.setattr(in_place, "MOST_ROUNDS", 24)
    found = time_in_place(artifact, open_engine("openvino", 1))
    assert found is not None
    assert all(ms > 0 for t in found for ms in t.ms.values())
    factored = [t for t in found if Form.FACTORED in t.ms]
    assert len(factored) > 5
    assert [(t.layer, t.rank) for t in found] == [
        (p.spec.name, k) for p in state_of(model).plan.layers for k in p.ranks
    ]


def test_weights_of_one_geometry_need_not_all_be_aligned() -> None:
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
    found = time_in_place(artifact, Engine())
    assert found is not None
    forms = {t.layer: set() for t in found}
    for t in found:
        forms[t.layer] |= t.ms.keys()
    assert [Form.ALIGNED in forms[p.spec.name] for p in plans] == [True, False]


class Narrow(Weighed):
    """A compiled graph that takes less for weights of 4 bits, which are nodes."""

    def __init__(self, graph: onnx.ModelProto, engine: Engine) -> None:
        super().__init__(graph, engine)
        for node in graph.graph.node:
            if node.op_type == "Constant":
                raw = node.attribute[0].t.raw_data
                self.ms[(node.output[0].removesuffix("/weight"),)] = len(raw) / engine.pay / 1e3


@pytest.mark.parametrize(("pay", "wanted"), [(1.0, True), (0.25, False)])
def test_bits_of_weights_alone_take_their_own_time(pay: float, wanted: bool) -> None:
    """Half the bytes take half the time, and kernels that unpack them too slowly are not used."""

    class Few(Engine):
        def operations(self, graph: onnx.ModelProto) -> Weighed:
            return Narrow(graph, self)

    engine = Few()
    engine.pay = pay
    torch.manual_seed(0)
    layers = nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 128)
    model = nn.Sequential(*layers)
    elasticize_(model, torch.randn(2, 128), ElasticConfig(bits=(4, 8), store_ratio=1.0))
    with evaluating(model):
        traced = content.topology(model)
        drafts = [_every_rank(model, traced, weight_only=True, most_bits=q) for q in (8, 4)]
        timed = time_in_place(drafts[0], engine, few=drafts[1])
    assert timed is not None
    assert few_pay(timed) is wanted
    plans = state_of(model).plan.layers
    shares = measured_shares(plans, timed)
    for one in timed:
        spec = next(p.spec for p in plans if p.spec.name == one.layer)
        form = Form.DENSE if one.rank == spec.full_rank else Form.FACTORED
        assert one.few_ms[form] == pytest.approx(one.ms[form] / 2 / pay, rel=0.01)
        four, eight = (shares(one.layer, LayerPoint(one.rank, q))[0] for q in (4, 8))
        assert (four < eight) is wanted
        forms = [choose_forms(timed, {one.layer: spec}, {one.layer: LayerPoint(one.rank, 4)})]
        assert forms == [{one.layer: form}]
