"""Quantization-aware training: what is trained is what the engine runs, in int8."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import pytest
import tiny
import torch
from nncf.torch.quantization import extensions
from nncf.torch.quantization.reference import ReferenceQuantizedFunctions
from torch import Tensor, nn

from lab.baselines import qat8 as module
from lab.baselines.baseline import Baseline, Task
from lab.baselines.finetune import Training
from lab.baselines.qat8 import build_kernels, prepare_qat, qat8, qat_graph
from t3c.engines.openvino import OpenVINO, OpenVINOSession
from t3c.errors import DataError, T3CError
from t3c.evidence import int8
from t3c.evidence.int8 import bytes_on_disk, saturates
from t3c.zoo.digits import Digits

LAYERS = 10  # convolutions and the head of the digits network
STEPS, RATE = 20, 1e-4


@dataclass(frozen=True)
class Trained:
    """A baseline, what it runs in, and what it was made of in torch."""

    baseline: Baseline
    session: OpenVINOSession
    model: nn.Module


@pytest.fixture(scope="module", autouse=True)
def _plain_kernels() -> Iterator[None]:
    with tiny.plain_kernels():
        yield


@pytest.fixture(scope="module")
def samples(digits: Digits) -> Any:
    return digits.calibration[0][:16]


@pytest.fixture(scope="module")
def prepared(trained: nn.Module, samples: Any) -> nn.Module:
    """Quantized and not trained. Do not change it: copy it."""
    return prepare_qat(trained, samples)


def made(model: nn.Module, digits: Digits, samples: Any, **options: Any) -> Trained:
    images, _ = digits.train
    training = Training(model, images[:512], minutes=1, steps=STEPS, batch=32)
    task = Task(b"", samples, OpenVINO(1), training=training, **options)
    with pytest.MonkeyPatch.context() as patch:
        seen = tiny.recorded(patch, module)
        found = qat8(task, learning_rate=RATE)
    return Trained(found, OpenVINO(1).compile_read(found.model), seen[0])


@pytest.fixture(scope="module")
def result(trained: nn.Module, digits: Digits, samples: Any) -> Trained:
    return made(trained, digits, samples)


@torch.no_grad()
def difference(a: Any, b: Any) -> float:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return float((a - b).norm() / b.norm())


def test_quantizing_alone_stays_close(
    prepared: nn.Module, trained: nn.Module, digits: Digits
) -> None:
    images = digits.test[0][:100]
    with torch.no_grad():
        drift = difference(prepared(images), trained(images))
    assert 0.005 < drift < 0.15


def test_training_draws_it_to_the_original(
    result: Trained, prepared: nn.Module, trained: nn.Module, digits: Digits
) -> None:
    assert (result.baseline.name, result.baseline.steps) == ("qat8", STEPS)
    assert result.baseline.seconds > 0
    images = digits.train[0][:256]
    with torch.no_grad():
        wanted = copy.deepcopy(trained).eval()(images)
        before, after = (difference(model(images), wanted) for model in (prepared, result.model))
    assert after < 0.95 * before


def test_training_moves_weights_and_scales_but_no_statistics(
    result: Trained, prepared: nn.Module, trained: nn.Module
) -> None:
    before, after = dict(prepared.named_parameters()), dict(result.model.named_parameters())
    free = [name for name, value in after.items() if value.requires_grad]
    assert sum("scale" in name for name in free) >= 2 * LAYERS
    assert len(free) > len(list(trained.parameters()))
    assert [name for name in free if torch.equal(before[name], after[name])] == []
    statistics = dict(result.model.named_buffers())
    for name, value in trained.named_buffers():
        assert torch.equal(statistics[name], value), name


@pytest.mark.parametrize("size", [1, 16])
def test_the_session_computes_what_torch_does(
    result: Trained, trained: nn.Module, digits: Digits, size: int
) -> None:
    images = digits.test[0][:64]
    run = result.session.run
    answers = np.concatenate([run([part.numpy()])[0] for part in images.split(size)])
    with torch.no_grad():
        wanted, original = result.model(images), trained(images)
    assert difference(answers, wanted) < 0.02
    assert difference(answers, original) > 5 * difference(answers, wanted)


class Largest(nn.Module):
    """A classifier of the largest values over an image, for images (n, 3, 8, 8)."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.body, self.head, self.keep = nn.Conv2d(3, 48, 3), nn.Linear(48, 10), keep

    def forward(self, images: Tensor) -> Tensor:
        largest = torch.relu(self.body(images)).amax(dim=(2, 3), keepdim=self.keep)
        logits: Tensor = self.head(largest.flatten(1))
        return logits


@torch.no_grad()
@pytest.mark.parametrize("keep", [False, True])
def test_a_maximum_over_an_image_is_computed_rightly(keep: bool) -> None:
    torch.manual_seed(0)
    images = tiny.images(16, 1)
    prepared = prepare_qat(Largest(keep).eval(), images)
    graph = qat_graph(prepared, images[:1])
    found = OpenVINO(1).compile_read(graph).run([images.numpy()])[0]
    assert difference(found, prepared(images)) < 0.01


def weight_of(layer: ov.Node) -> ov.Node:
    """The constant a layer's weights come from, behind their scales."""
    node = layer.input_value(1).get_node()
    while node.get_type_name() != "Constant":
        assert node.get_type_name() in ("Multiply", "Convert", "Reshape", "Subtract"), node
        node = node.input_value(0).get_node()
    return node


def test_layers_have_int8_weights_and_int8_kernels(result: Trained) -> None:
    graph = result.baseline.model
    layers = [n for n in graph.get_ops() if n.get_type_name() in ("Convolution", "MatMul")]
    assert [weight_of(n).get_element_type() for n in layers] == [ov.Type.i8] * LAYERS
    result.session.run([np.zeros((1, 1, 32, 32), np.float32)])
    compiled = result.session.compiled[((1, 1, 32, 32),)]
    kernels = [
        node.get_rt_info()["primitiveType"].astype(str)
        for node in compiled.model.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].astype(str) in ("Convolution", "FullyConnected")
    ]
    assert len(kernels) == LAYERS
    assert sum(kernel.endswith("I8") for kernel in kernels) >= LAYERS - 1  # the stem has 1 channel


def test_weights_that_would_saturate_are_in_half_the_range(result: Trained) -> None:
    graph = result.baseline.model
    layers = [n for n in graph.get_ops() if n.get_type_name() in ("Convolution", "MatMul")]
    largest = [int(np.abs(weight_of(n).data.astype(int)).max()) for n in layers]
    # Pairs of products of 255 x 64 fit 16 bits; training moves a few weights a little beyond.
    assert max(largest) <= 72 if saturates() else max(largest) > 100
    assert ("weights 7" in result.baseline.method) == saturates()


def constants(graph: ov.Model) -> int:
    return sum(n.data.nbytes for n in graph.get_ops() if n.get_type_name() == "Constant")


def test_it_is_small(result: Trained, trained: nn.Module) -> None:
    graph = result.baseline.model
    plain = sum(4 * p.numel() for p in trained.parameters() if p.dim() > 1)
    assert 0.25 * plain < constants(graph) < 0.35 * plain
    assert constants(graph) < result.baseline.size_bytes == bytes_on_disk(graph)


def test_two_runs_agree_and_leave_the_original_alone(
    result: Trained, trained: nn.Module, digits: Digits, samples: Any, capfd: Any
) -> None:
    model = copy.deepcopy(trained).train().requires_grad_(False)
    with tiny.unchanged(model):
        again = made(model, digits, samples)
    image = digits.test[0][:1].numpy()
    one, other = (r.session.run([image])[0] for r in (result, again))
    assert np.array_equal(one, other)
    assert capfd.readouterr() == ("", "")


def test_a_transformer_is_told_to_nncf(
    trained: nn.Module, digits: Digits, samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SeenError(Exception):
        pass

    def quantize(model: nn.Module, calibration_dataset: object, **options: Any) -> None:
        raise SeenError(options["model_type"])

    nncf = int8.nncf_library()
    monkeypatch.setattr(nncf, "quantize", quantize)
    for transformer, wanted in ((True, nncf.ModelType.TRANSFORMER), (False, None)):
        with pytest.raises(SeenError) as caught:
            made(trained, digits, samples, transformer=transformer)
        assert caught.value.args == (wanted,)


def refused(message: str, call: Any) -> None:
    with pytest.raises(T3CError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_samples_that_cannot_be_are_refused(trained: nn.Module, samples: Any) -> None:
    refused("the calibration data has no samples", lambda: prepare_qat(trained, samples[:0]))
    refused("the calibration data holds NaN", lambda: prepare_qat(trained, samples * np.nan))
    with pytest.raises(DataError):
        prepare_qat(trained, samples[:0])


@pytest.mark.parametrize(
    ("cpu", "saturating"),
    [("Some CPU avx2", True), ("Some CPU avx2 avx512f", True), ("Some CPU avx2 avx_vnni", False),
     ("Some CPU avx2 avx512f avx512_vnni", False), ("aarch64", False)],
)  # fmt: skip
def test_only_old_int8_kernels_saturate(
    monkeypatch: pytest.MonkeyPatch, cpu: str, saturating: bool
) -> None:
    monkeypatch.setattr(int8, "cpu_name", lambda: cpu)
    assert saturates() == saturating


def test_kernels_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = extensions.QuantizedFunctionsCPU
    assert build_kernels()
    monkeypatch.setattr(kernels, "_loaded_namespace", ReferenceQuantizedFunctions)
    assert not build_kernels()

    def never(name: str) -> None:
        raise extensions.ExtensionLoaderTimeoutException("many\nlines")

    monkeypatch.setattr(kernels, "get", never)
    monkeypatch.setattr(extensions.QuantizedFunctionsCPULoader, "get_build_dir", lambda: "folder")
    refused("a long wait: if an earlier build was cut short, remove folder$", build_kernels)
