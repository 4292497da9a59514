"""Strided convolutions of single points read every other code: no engine leaves 8 bits there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import t3c
from conftest import LIGHT, quick, supply_times
from t3c.artifact.reader import Artifact
from t3c.convert import elasticize_
from t3c.engines.openvino import OpenVINO
from t3c.engines.torch import TorchSession
from t3c.exporter import ExportConfig, export
from t3c.spec import Goal

CONFIG = ExportConfig(goal=Goal(profiles=2, worst_drift=1.0), timing=quick(3), certificate=LIGHT)
IMAGES = torch.randn(240, 3, 15, 16, generator=torch.Generator().manual_seed(0))


class Strided(nn.Module):
    """A residual block whose shortcut and whose first convolution step over every other point."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.shortcut, self.down = nn.Conv2d(32, 48, 1, 2), nn.Conv2d(32, 24, 1, 2)
        self.up, self.head = nn.Conv2d(24, 48, 1), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(self.up(F.relu(self.down(x))) + self.shortcut(x))
        answer: Tensor = self.head(x.mean((2, 3)))
        return answer


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = Strided().eval()
    elasticize_(model, IMAGES[:2], calibration=[IMAGES[:64]])
    with pytest.MonkeyPatch.context() as patch:
        supply_times(patch)
        return export(model, tmp_path_factory.mktemp("s") / "s.t3c", [IMAGES], CONFIG).path


def test_both_read_the_same_codes(artifact: Path) -> None:
    runtime = t3c.load(artifact)
    for profile in runtime.chain:
        graph: onnx.GraphProto = runtime.graph(profile).graph
        makers = {name: node for node in graph.node for name in node.output}
        steps = [node for node in graph.node if node.op_type == "MaxPool"]
        assert len(steps) == 1
        before = makers[steps[0].input[0]]
        after = next(node for node in graph.node if steps[0].output[0] in node.input)
        assert (before.op_type, after.op_type) == ("DequantizeLinear", "QuantizeLinear")
        assert before.input[1:] == after.input[1:], "one grid on both sides"
        readers = [n for n in graph.node if n.op_type == "Conv" and "stride2x2" in n.input[0]]
        assert len(readers) == 2
        for node in graph.node:
            strides = [list(a.ints) for a in node.attribute if a.name == "strides"]
            assert node.op_type != "Conv" or strides in ([], [[1, 1]])


def test_openvino_runs_no_convolution_in_float(artifact: Path) -> None:
    runtime, engine = t3c.load(artifact), OpenVINO(1)
    graph = engine.core.read_model(runtime.graph(runtime.chain["max"]).SerializeToString())
    compiled = engine.core.compile_model(graph, "CPU", engine.config)
    told = [op.get_rt_info() for op in compiled.get_runtime_model().get_ops()]
    convolutions = [about for about in told if about["layerType"].astype(str) == "Convolution"]
    kinds = [about["primitiveType"].astype(str) for about in convolutions]
    assert len(kinds) == 4
    assert all("I8" in kind or "i8" in kind for kind in kinds)


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_answers_are_those_of_the_strided_graph(artifact: Path, engine: str) -> None:
    images = IMAGES[:16].numpy()
    runtime = t3c.load(artifact, engine=engine)
    for profile in runtime.chain:
        stepped = runtime.graph(profile)
        strided = TorchSession(restrided(stepped)).run([images])[0]
        np.testing.assert_allclose(TorchSession(stepped).run([images])[0], strided, atol=1e-5)
        answers = runtime(images, profile=profile.name)
        assert np.linalg.norm(answers - strided) < 0.02 * np.linalg.norm(strided)


def restrided(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with strides in the convolutions again, and nothing before them."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for node in model.graph.node:
        if node.op_type == "MaxPool":
            node.op_type = "Identity"
            del node.attribute[:]
        if node.op_type == "Conv" and "stride2x2" in node.input[0]:
            next(a for a in node.attribute if a.name == "strides").ints[:] = [2, 2]
    return model


def test_what_is_not_rounded_keeps_its_strides(artifact: Path) -> None:
    found = Artifact(artifact)
    profile = found.manifest.chain["max"]
    graph = t3c.graph.assemble.assemble(
        found, profile, dict.fromkeys(profile.points, t3c.spec.Form.DENSE), None
    ).graph
    assert not any(node.op_type == "MaxPool" for node in graph.node)
