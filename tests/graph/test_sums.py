"""What layers end in before a sum is rounded where the sum is: shortcuts stay in 8 bits."""

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
from t3c.evidence.original import beside, to_original
from t3c.evidence.program import Program, executed
from t3c.exporter import ExportConfig, content, export
from t3c.graph.assemble import quantized_inputs, rounded_tensors, summed_inputs
from t3c.graph.context import float_outputs
from t3c.runtime.runtime import Runtime
from t3c.spec import Goal

CONFIG = ExportConfig(goal=Goal(profiles=2, worst_drift=1.0), timing=quick(3), certificate=LIGHT)
IMAGES = torch.randn(240, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """Five sums, of which two are rounded whole: the third has a summand that is read elsewhere
    too, and no layer reads the last two as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.one, self.two = (nn.Conv2d(32, 32, 3, padding=1) for _ in range(2))
        self.shortcut, self.three = nn.Conv2d(32, 48, 1), nn.Conv2d(32, 48, 3, padding=1)
        self.four, self.five = (nn.Conv2d(48, 48, 1) for _ in range(2))
        self.six, self.head = nn.Conv2d(48, 48, 1), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(self.two(F.relu(self.one(x))) + x)
        x = F.relu(self.three(x) + self.shortcut(x))
        twice = self.four(x)
        x = F.relu(twice + self.five(x))
        x = F.relu(self.six(x) + x)
        answer: Tensor = self.head((x + twice.sigmoid()).mean((2, 3)))
        return answer


def network() -> nn.Module:
    torch.manual_seed(0)
    model = Residual().eval()
    elasticize_(model, IMAGES[:2], calibration=[IMAGES[:64]])
    return model


def exported(path: Path) -> Path:
    model = network()
    with pytest.MonkeyPatch.context() as patch:
        supply_times(patch)
        return export(model, path, [IMAGES], CONFIG).path


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("sums") / "s.t3c")


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of before: it has no ranges of summands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content, "summed_inputs", lambda graph, feeds: set())
        return exported(tmp_path_factory.mktemp("older") / "s.t3c")


def rounded_sums(runtime: Runtime) -> list[list[bool]]:
    """Of each sum of two made tensors, which of them are read rounded."""
    graph: onnx.GraphProto = runtime.graph(runtime.chain["max"]).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    sums = [n for n in graph.node if n.op_type == "Add" and all(name in made for name in n.input)]
    return [[made[name] == "DequantizeLinear" for name in node.input] for node in sums]


def test_sums_that_are_rounded_add_what_is(artifact: Path) -> None:
    assert rounded_sums(t3c.load(artifact)) == [
        [True, True], [True, True], [False, False], [False, True], [False, False],
    ]  # fmt: skip
    found = Artifact(artifact)
    graph = found.graph().graph
    feeds = set(quantized_inputs(graph, found.manifest.specs))
    summands = summed_inputs(graph, feeds)
    assert len(summands) == 3  # of two, of three and of its shortcut
    assert rounded_tensors(found, graph) == feeds | summands
    assert Program(found).rounded == feeds | summands
    to_float = float_outputs(graph, found.manifest.specs)
    assert to_float & {"one", "two", "three", "shortcut"} == set()
    assert to_float >= {"four", "five", "six"}


def test_openvino_adds_in_the_kernel_of_the_layer(artifact: Path, older: Path) -> None:
    def in_float(path: Path) -> int:
        """How many convolutions put out float."""
        engine, runtime = OpenVINO(1), t3c.load(path)
        graph = engine.core.read_model(runtime.graph(runtime.chain["max"]).SerializeToString())
        compiled = engine.core.compile_model(graph, "CPU", engine.config)
        told = [op.get_rt_info() for op in compiled.get_runtime_model().get_ops()]
        run = [t for t in told if t["layerType"].astype(str) == "Convolution"]
        return sum(t["outputPrecisions"].astype(str) == "f32" for t in run)

    assert in_float(artifact) == 3  # of the two sums that are not rounded
    assert in_float(older) > 3


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_answers_move_by_a_rounding(artifact: Path, older: Path, engine: str) -> None:
    images = IMAGES[:32].numpy()
    after, before = (t3c.load(path, engine=engine) for path in (artifact, older))
    for profile in after.chain:
        new, old = (runtime(images, profile=profile.name) for runtime in (after, before))
        assert 0 < np.linalg.norm(new - old) < 0.03 * np.linalg.norm(old)


def test_older_artifacts_run_as_they_did(older: Path) -> None:
    assert rounded_sums(t3c.load(older))[:2] == [[False, True], [False, False]]
    found = Artifact(older)
    assert rounded_tensors(found, found.graph().graph) == set(
        quantized_inputs(found.graph().graph, found.manifest.specs)
    )


def test_certificates_count_the_rounding(artifact: Path) -> None:
    """The program that they follow goes to what is deployed, sums rounded, and not beside it."""
    runtime, x = t3c.load(artifact), IMAGES[:16]
    found, bits = runtime.artifact, runtime.device.weight_bits
    original, program = beside(found, to_original(network())), Program(found, torch.float64)
    for profile in runtime.chain:
        one = executed(found, original, runtime.executions[profile.name], bits, torch.float64)
        deployed = TorchSession(runtime.graph(profile)).run([x.numpy()])[0]
        reached = program(one, [x], 1.0).numpy()
        program.rounded -= summed_inputs(found.graph().graph, program.rounded)
        without = program(one, [x], 1.0).numpy()
        program = Program(found, torch.float64)
        # A value at the border of two codes may fall to either side in float32.
        gap = np.linalg.norm(without - deployed)
        assert np.linalg.norm(reached - deployed) < 0.5 * gap
