"""Tensors that are pooled by maxima are rounded before it: the same answers from fewer bytes."""

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
from t3c.exporter import ExportConfig, export
from t3c.graph import assemble
from t3c.graph.context import float_outputs
from t3c.runtime.runtime import Runtime
from t3c.spec import Goal

CONFIG = ExportConfig(goal=Goal(profiles=2, worst_drift=1.0), timing=quick(3), certificate=LIGHT)
IMAGES = torch.randn(240, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Pools(nn.Module):
    """Two maxima over windows that feed layers: what the second pools is read beside it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 48, 3, padding=1)
        self.third, self.head = nn.Conv2d(48, 48, 3), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 3, 2, padding=1)
        x = F.relu(self.second(x))
        pooled = self.third(F.max_pool2d(x, 2)).mean((2, 3))
        answer: Tensor = self.head(pooled + x.mean((2, 3)))
        return answer


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = Pools().eval()
    elasticize_(model, IMAGES[:2], calibration=[IMAGES[:64]])
    with pytest.MonkeyPatch.context() as patch:
        supply_times(patch)
        return export(model, tmp_path_factory.mktemp("p") / "p.t3c", [IMAGES], CONFIG).path


def pooled(runtime: Runtime) -> list[tuple[str, str]]:
    """What makes the input of each maximum, and what reads its output."""
    graph: onnx.GraphProto = runtime.graph(runtime.chain["max"]).graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    readers = {name: node.op_type for node in graph.node for name in node.input}
    maxima = [node for node in graph.node if node.op_type == "MaxPool"]
    return [(makers[node.input[0]], readers[node.output[0]]) for node in maxima]


def test_what_is_only_pooled_is_rounded_before(artifact: Path) -> None:
    runtime = t3c.load(artifact)
    assert pooled(runtime) == [("DequantizeLinear", "QuantizeLinear"), ("Relu", "QuantizeLinear")]
    graph = runtime.graph(runtime.chain["max"]).graph
    maximum = next(node for node in graph.node if node.op_type == "MaxPool")
    before = next(node for node in graph.node if node.output[0] == maximum.input[0])
    after = next(node for node in graph.node if maximum.output[0] in node.input)
    assert before.input[1:] == after.input[1:], "one grid on both sides"


def test_a_layer_before_it_is_timed_as_it_runs(artifact: Path) -> None:
    found = Artifact(artifact)
    assert float_outputs(found.graph().graph, found.manifest.specs) == {"second", "third"}


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_answers_are_the_same(artifact: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = IMAGES[:16].numpy()
    early = t3c.load(artifact, engine=engine)
    answers = {profile.name: early(images, profile=profile.name) for profile in early.chain}
    monkeypatch.setattr(assemble, "pooled_inputs", lambda graph, feeds: {})
    late = t3c.load(artifact, engine=engine)
    assert pooled(late)[0][0] == "Relu"
    for name, answer in answers.items():
        np.testing.assert_allclose(answer, late(images, profile=name), rtol=0, atol=1e-5)
