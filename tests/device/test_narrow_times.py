"""Times of narrowed layers: alone, in groups, in the network, and of profiles mixed from others."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import pytest

from t3c.device import in_place
from t3c.device import measured as layer_times
from t3c.device.grid import mixtures
from t3c.device.in_place import time_in_place
from t3c.device.measured import time_group, time_layer
from t3c.engines import open_engine
from t3c.engines.torch import TorchSession
from t3c.exporter import content
from t3c.exporter.timing import _every_rank
from t3c.graph.synthetic import example_input, synthetic_group, synthetic_layer
from t3c.spec import Factorization, Form, Kind, LayerPoint, LayerSpec
from widths import BUILD, Narrow, artifact_of, narrow_of


class Weighed:
    """A compiled graph that takes a microsecond for each number of its weights."""

    def __init__(self, graph: onnx.ModelProto) -> None:
        codes = [t for t in graph.graph.initializer if t.name.endswith("/weight")]
        self.ms = {(t.name.removesuffix("/weight"),): int(np.prod(t.dims)) / 1e3 for t in codes}

    def run(self, inputs: object) -> dict[tuple[str, ...], float]:
        return {("what is between layers",): 5.0, **self.ms}


class Engine:
    name, threads, version = "torch", 1, "0"

    def compile(self, graph: onnx.ModelProto) -> Any:
        raise AssertionError("no whole network is timed")

    def operations(self, graph: onnx.ModelProto) -> Weighed:
        return Weighed(graph)


def every_rank(narrow: Narrow) -> Any:
    return _every_rank(narrow.model, content.topology(narrow.model), weight_only=False)


@pytest.mark.parametrize("name", ["own", "resnet"])
def test_widths_are_timed_in_place(name: str) -> None:
    """Each takes what its leading corner takes: the correction is no product of its own."""
    narrow = narrow_of(name)
    found = time_in_place(every_rank(narrow), Engine())
    assert found is not None
    assert [(t.layer, t.rank) for t in found] == [
        (plan.spec.name, rank) for plan in narrow.plans for rank in plan.ranks
    ]
    plans = {plan.spec.name: plan for plan in narrow.plans}
    narrowed = 0
    for timing in found:
        spec = plans[timing.layer].spec
        full = int(np.prod(spec.dense_shape)) / 1e3
        assert timing.ms[Form.DENSE] == pytest.approx(full)
        if spec.narrows and timing.rank < spec.full_rank:
            narrowed += 1
            assert timing.ms.keys() == {Form.DENSE, Form.NARROW}
            corner = int(np.prod(spec.corner(timing.rank))) / 1e3
            assert timing.ms[Form.NARROW] == pytest.approx(corner)
        else:
            assert Form.NARROW not in timing.ms
    assert narrowed > 20


def test_a_real_engine_times_widths_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "MOST_ROUNDS", 24)
    found = time_in_place(every_rank(narrow_of("own")), open_engine("openvino", 1))
    assert found is not None
    narrowed = [t for t in found if Form.NARROW in t.ms]
    assert len(narrowed) > 20
    assert all(ms > 0 for t in narrowed for ms in t.ms.values())


def linear(name: str, how: Factorization, out: int, into: int, correction: int = 0) -> LayerSpec:
    return LayerSpec(
        name, Kind.LINEAR, how, out, into, in_size=(16, 1), out_size=(16, 1), unit="u",
        correction=correction,
    )  # fmt: skip


ROWS = linear("rows", Factorization.ROWS, 256, 64)
COLUMNS = linear("columns", Factorization.COLUMNS, 64, 256, 8)
CORNER = LayerSpec(
    "corner", Kind.CONV2D, Factorization.CORNER, 64, 64, (3, 3), padding=(1, 1), in_size=(6, 6),
    out_size=(6, 6), unit="u", correction=8,
)  # fmt: skip
DEPTHWISE = LayerSpec(
    "depthwise", Kind.CONV2D, Factorization.CORNER, 64, 64, (3, 3), padding=(1, 1), groups=64,
    in_size=(6, 6), out_size=(6, 6), unit="u",
)  # fmt: skip


@pytest.mark.parametrize("spec", [ROWS, COLUMNS, CORNER, DEPTHWISE])
def test_a_layer_is_timed_at_its_widths(spec: LayerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "ROUNDS", 3)
    full = spec.full_rank
    timings = time_layer(open_engine("openvino", 1), spec, (full // 4, full // 2, full))
    assert [t.rank for t in timings] == [full // 4, full // 2, full]
    for timing in timings:
        below = {Form.NARROW} if timing.rank < full else set()
        assert timing.ms.keys() == {Form.DENSE} | below
        assert all(ms > 0 for ms in timing.ms.values())


@pytest.mark.parametrize("spec", [ROWS, COLUMNS, CORNER, DEPTHWISE])
def test_a_synthetic_layer_is_as_narrow_as_its_width(spec: LayerSpec) -> None:
    point = LayerPoint(spec.full_rank // 4, 8)
    graph = synthetic_layer(spec, point, Form.NARROW)
    shapes = [tuple(i.dims) for i in graph.graph.initializer if i.name.endswith("/weight")]
    assert [sorted(shape) for shape in shapes] == [sorted(spec.corner(point.rank))]
    x = example_input(spec.narrowed(point.rank))
    (out,) = TorchSession(graph).run([x])
    wanted = point.rank if spec.cuts_outputs else spec.out_channels
    assert out.shape[1 if spec.convolution else -1] == wanted
    assert np.isfinite(out).all()


def test_narrow_layers_of_one_input_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "ROUNDS", 3)
    specs = [linear(name, Factorization.ROWS, 256, 64) for name in ("gate", "up")]
    points = [LayerPoint(64, 8)] * 2
    outs = []
    for grouped in (True, False):
        graph = synthetic_group(specs, points, Form.NARROW, grouped)
        outs.append(TorchSession(graph).run([example_input(specs[0])]))
        products = [n for n in graph.graph.node if n.op_type in ("MatMul", "Gemm", "Conv")]
        assert len(products) == (1 if grouped else 2)
    for one, other in zip(*outs, strict=True):
        assert one.shape[-1] == 64
        np.testing.assert_allclose(one, other, atol=1e-4)
    timing = time_group(open_engine("openvino", 1), specs, [64, 64], Form.NARROW)
    assert (timing.form, timing.ranks) == (Form.NARROW, (64, 64))
    assert timing.together_ms > 0
    assert timing.apart_ms > 0


@pytest.mark.parametrize("name", [name for name in BUILD if name != "mobilenet"])
def test_mixtures_keep_units_together(name: str) -> None:
    artifact = artifact_of(name)
    found, specs = mixtures(artifact, 16, seed=0), artifact.manifest.specs
    assert len(found) > 8
    apart = 0
    for profile in found:
        shares: dict[str, set[Fraction]] = {}
        for layer, spec in specs.items():
            if spec.narrows:
                share = Fraction(profile.points[layer].rank, spec.full_rank)
                shares.setdefault(spec.unit, set()).add(share)
        assert all(len(mine) == 1 for mine in shares.values())
        apart += len({next(iter(mine)) for mine in shares.values()}) > 1
    assert apart > 4  # units go their own ways
    content.float_session(artifact, found[0])  # and what is drawn can be put together
