"""Post-training quantization to 8 bits: int8 weights, near the original, from ONNX alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino as ov
import pytest
import tiny
import torch
from onnx import TensorProto, helper, numpy_helper

import lab
from lab.baselines import BASELINES, TRAINED, Baseline, Task
from t3c.engines.openvino import OpenVINO
from t3c.errors import DataError
from t3c.evidence.bench import _refuse_unknown
from t3c.evidence.int8 import bytes_on_disk

ENGINE = OpenVINO(1)
DRAW = np.random.default_rng(0)
SAMPLES = DRAW.normal(size=(16, 3, 16, 16)).astype(np.float32)


def original() -> bytes:
    """Two convolutions with a ReLU between them, images (n, 3, 16, 16) -> (n, 8, 12, 12)."""
    arrays = {
        "one": DRAW.normal(size=(32, 3, 3, 3)) / 5,
        "two": DRAW.normal(size=(8, 32, 3, 3)) / 17,
    }
    nodes = [
        helper.make_node("Conv", ["x", "one"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "two"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8, 12, 12])],
        [numpy_helper.from_array(v.astype(np.float32), name) for name, v in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


RAW = original()


@pytest.fixture(scope="module")
def made() -> Baseline:
    # Weights and activations are quantized, whatever the task leaves float.
    return BASELINES["ptq8"](Task(RAW, torch.from_numpy(SAMPLES), ENGINE, activations="float"))


def operations(graph: ov.Model, kind: str) -> list[Any]:
    return [op for op in graph.get_ops() if op.get_type_name() == kind]


def test_weights_and_activations_have_eight_bits(made: Baseline) -> None:
    constants = operations(made.model, "Constant")
    shapes = [tuple(c.shape) for c in constants if c.get_element_type() == ov.Type.i8]
    assert sorted(shapes) == [(8, 32, 3, 3), (32, 3, 3, 3)]
    quantizers = operations(made.model, "FakeQuantize")
    assert len(quantizers) == 2  # of the image and of what the second convolution is given
    assert all(q.get_attributes()["levels"] == 256 for q in quantizers)


def test_it_is_near_the_original_and_not_it(made: Baseline) -> None:
    wanted = ENGINE.compile_read(ENGINE.read(RAW)).run([SAMPLES])[0]
    session = ENGINE.compile_read(made.model)
    found = np.concatenate([session.run([image[None]])[0] for image in SAMPLES])
    drift = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert 1e-4 < drift < 0.03


def test_its_size_is_that_of_openvinos_files(made: Baseline) -> None:
    assert made.size_bytes == bytes_on_disk(made.model)
    weights = 32 * 27 + 8 * 288
    assert made.size_bytes - _topology(made.model) < 1.2 * weights
    assert (made.steps, made.seconds) == (0, 0)


def test_weights_alone_leave_activations_as_they_are(made: Baseline) -> None:
    """Whatever the task says of activations; and closer to the original for it."""
    alone = BASELINES["ptq8w"](Task(RAW, torch.from_numpy(SAMPLES), ENGINE, activations="int8"))
    assert not operations(alone.model, "FakeQuantize")
    constants = operations(alone.model, "Constant")
    shapes = [tuple(c.shape) for c in constants if c.get_element_type() == ov.Type.i8]
    assert sorted(shapes) == [(8, 32, 3, 3), (32, 3, 3, 3)]
    wanted = ENGINE.compile_read(ENGINE.read(RAW)).run([SAMPLES])[0]
    drifts = [
        np.linalg.norm(ENGINE.compile_read(b.model).run([SAMPLES])[0] - wanted)
        for b in (alone, made)
    ]
    assert 0 < drifts[0] < drifts[1]
    assert alone.size_bytes == bytes_on_disk(alone.model)


def _topology(graph: ov.Model) -> int:
    """What is not weights: the bytes that are left if every constant is taken out."""
    constants = sum(int(c.data.nbytes) for c in operations(graph, "Constant"))
    return bytes_on_disk(graph) - constants


def test_the_registry_has_every_method_and_does_without_torch() -> None:
    names = "ptq8 ptq8w ptq4 qat8 mpqat magprune moveprune lrft loracomp sparsegpt kdptq"
    assert list(BASELINES) == names.split()
    assert BASELINES.keys() - TRAINED == {"ptq8", "ptq8w", "ptq4", "sparsegpt"}
    code = "import sys, lab.baselines, t3c.evidence.int8; assert 'torch' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(Path(lab.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_library_compares_with_int8_alone() -> None:
    _refuse_unknown(("full", "ptq8", "ptq8w"))
    with pytest.raises(DataError, match=r"^unknown baseline qat8, magic: there are full, ptq8"):
        _refuse_unknown(("full", "qat8", "magic"))


@pytest.mark.parametrize("name", ["ptq8", "ptq8w"])
def test_it_is_made_from_torch_where_that_is_given(name: str) -> None:
    given = tiny.task()
    assert given.training is not None
    assert given.original == b""
    with tiny.unchanged(given.training.model):
        found = BASELINES[name](given)
    wanted = tiny.network().eval()(tiny.images(16, 4)).detach().numpy()
    assert np.linalg.norm(tiny.answers(found) - wanted) < 0.05 * np.linalg.norm(wanted)
