"""Quantization-aware training: what is trained is what the engine runs, in int8."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from nncf.torch.quantization import extensions
from nncf.torch.quantization.reference import ReferenceQuantizedFunctions, torch_executor
from torch import Tensor, nn

from t3c.baselines import TRAINED
from t3c.baselines.baseline import bytes_on_disk
from t3c.baselines.qat8 import (
    QatConfig,
    Trained,
    build_kernels,
    prepare_qat,
    qat8,
    qat_optimizer,
    qat_step,
    saturates,
)
from t3c.errors import DataError, SpecError, T3CError, TrainError
from t3c.runtime.engines.openvino import OpenVINO
from t3c.train.losses import classification
from t3c.zoo.digits import Digits

LAYERS = 10  # convolutions and the head of the digits network
FEW = QatConfig(steps=12, learning_rate=1e-3)
MODULE = sys.modules["t3c.baselines.qat8"]


@pytest.fixture(scope="module", autouse=True)
def _plain_kernels() -> Iterator[None]:
    """NNCF's kernels in plain torch, which compute the same: compiling them takes a minute."""
    plain = SimpleNamespace(
        Quantize_forward=torch_executor.forward, Quantize_backward=torch_executor.backward
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extensions.QuantizedFunctionsCPU, "_loaded_namespace", plain)
        yield


@pytest.fixture(scope="module")
def samples(digits: Digits) -> Any:
    return digits.calibration[0][:16].numpy()


@pytest.fixture(scope="module")
def prepared(trained: nn.Module, samples: Any) -> nn.Module:
    """Quantized and not trained. Do not change it: copy it."""
    return prepare_qat(trained, samples)


@pytest.fixture(scope="module")
def result(trained: nn.Module, digits: Digits, samples: Any) -> Trained:
    return qat8(trained, digits.loader(32), samples, OpenVINO(1), FEW)


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training without quantizers, for what does not depend on them."""
    monkeypatch.setattr(MODULE, "prepare_qat", lambda model, samples: copy.deepcopy(model).eval())


@torch.no_grad()
def difference(a: Any, b: Any) -> float:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return float((a - b).norm() / b.norm())


@torch.no_grad()
def loss_of(model: nn.Module, digits: Digits) -> float:
    images, labels = digits.train
    return float(classification(model(images[:256]), labels[:256]))


def test_quantizing_alone_stays_close(
    prepared: nn.Module, trained: nn.Module, digits: Digits
) -> None:
    images = digits.test[0][:100]
    with torch.no_grad():
        drift = difference(prepared(images), trained(images))
    assert 0.005 < drift < 0.15


def test_training_lowers_the_loss(result: Trained, prepared: nn.Module, digits: Digits) -> None:
    assert len(result.losses) == FEW.steps
    assert loss_of(result.model, digits) < 0.9 * loss_of(prepared, digits)


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
    run = result.baseline.session.run
    answers = np.concatenate([run([part.numpy()])[0] for part in images.split(size)])
    with torch.no_grad():
        wanted, original = result.model(images), trained(images)
    assert difference(answers, wanted) < 0.02
    assert difference(answers, original) > 5 * difference(answers, wanted)


def weight_of(layer: ov.Node) -> ov.Node:
    """The constant a layer's weights come from, behind their scales."""
    node = layer.input_value(1).get_node()
    while node.get_type_name() != "Constant":
        assert node.get_type_name() in ("Multiply", "Convert", "Reshape", "Subtract"), node
        node = node.input_value(0).get_node()
    return node


def test_layers_have_int8_weights_and_int8_kernels(result: Trained) -> None:
    graph = result.baseline.session.model  # type: ignore[attr-defined]
    layers = [n for n in graph.get_ops() if n.get_type_name() in ("Convolution", "MatMul")]
    assert [weight_of(n).get_element_type() for n in layers] == [ov.Type.i8] * LAYERS
    result.baseline.session.run([np.zeros((1, 1, 32, 32), np.float32)])
    compiled = result.baseline.session.compiled[((1, 1, 32, 32),)]  # type: ignore[attr-defined]
    kernels = [
        node.get_rt_info()["primitiveType"].astype(str)
        for node in compiled.model.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].astype(str) in ("Convolution", "FullyConnected")
    ]
    assert len(kernels) == LAYERS
    assert sum(kernel.endswith("I8") for kernel in kernels) >= LAYERS - 1  # the stem has 1 channel


def test_weights_that_would_saturate_are_in_half_the_range(result: Trained) -> None:
    graph = result.baseline.session.model  # type: ignore[attr-defined]
    layers = [n for n in graph.get_ops() if n.get_type_name() in ("Convolution", "MatMul")]
    largest = [int(np.abs(weight_of(n).data.astype(int)).max()) for n in layers]
    # Pairs of products of 255 x 64 fit 16 bits; training moves a few weights a little beyond.
    assert max(largest) <= 72 if saturates() else max(largest) > 100
    assert ("weights 7" in result.baseline.method) == saturates()


def constants(graph: ov.Model) -> int:
    return sum(n.data.nbytes for n in graph.get_ops() if n.get_type_name() == "Constant")


def test_it_is_small(result: Trained, trained: nn.Module) -> None:
    graph = result.baseline.session.model  # type: ignore[attr-defined]
    plain = sum(4 * p.numel() for p in trained.parameters() if p.dim() > 1)
    assert 0.25 * plain < constants(graph) < 0.35 * plain
    assert constants(graph) < result.baseline.size_bytes == bytes_on_disk(graph)


def test_seconds_are_told_apart(result: Trained) -> None:
    spent = result.seconds
    assert spent.building < 1  # they are there already
    assert min(spent.preparing, spent.stepping, spent.exporting) > 0.01


def test_two_runs_agree_and_leave_the_original_alone(
    result: Trained, trained: nn.Module, digits: Digits, samples: Any, capfd: Any
) -> None:
    model = copy.deepcopy(trained).train().requires_grad_(False)
    seen = []
    again = TRAINED["qat8"](
        model, digits.loader(32), samples, OpenVINO(1), FEW, on_step=lambda *a: seen.append(a)
    )
    assert seen == list(enumerate(result.losses))
    assert again.losses == result.losses
    image = digits.test[0][:1].numpy()
    one, other = (r.baseline.session.run([image])[0] for r in (result, again))
    assert np.array_equal(one, other)
    assert all(m.training for m in model.modules())
    assert not any(p.requires_grad for p in model.parameters())
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in trained.state_dict().items())
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("unprepared")
@pytest.mark.parametrize("teacher", [False, True])
def test_a_teacher_stands_in_for_the_labels(
    trained: nn.Module, digits: Digits, samples: Any, teacher: bool
) -> None:
    class SeenError(Exception):
        pass

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        raise SeenError(target)

    images, labels = digits.train[0][:8], digits.train[1][:8]
    with pytest.raises(SeenError) as caught:
        qat8(
            trained, [(images, labels)], samples, OpenVINO(1),
            QatConfig(steps=1, teacher=teacher), loss=loss,
        )  # fmt: skip
    with torch.no_grad():
        wanted = copy.deepcopy(trained).eval()(images) if teacher else labels
    assert torch.equal(caught.value.args[0], wanted)


def test_a_step_is_clipped_and_a_loss_that_is_not_finite_changes_nothing(
    prepared: nn.Module, digits: Digits
) -> None:
    model = copy.deepcopy(prepared)
    images, labels = digits.train[0][:8], digits.train[1][:8]
    optimizer = torch.optim.SGD(qat_optimizer(model, FEW).param_groups[0]["params"], lr=1.0)

    def moved() -> float:
        pairs = zip(model.parameters(), prepared.parameters(), strict=True)
        return float(
            sum((a - b).detach().square().sum() for a, b in pairs if a.requires_grad) ** 0.5
        )

    with pytest.raises(TrainError, match=r"^the loss is not finite: nan$"):
        qat_step(model, optimizer, images, labels, loss=lambda z, y: z.sum() * torch.nan)
    assert moved() == 0
    with torch.no_grad():
        before = float(classification(prepared(images), labels))
    assert qat_step(model, optimizer, images, labels, clip_norm=1e-3) == pytest.approx(before)
    assert moved() == pytest.approx(1e-3, rel=0.01)


def refused(message: str, call: Any) -> None:
    with pytest.raises(T3CError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("unprepared")
def test_training_that_cannot_be_is_refused_in_one_line(
    trained: nn.Module, digits: Digits, samples: Any
) -> None:
    pair = (digits.train[0][:4], digits.train[1][:4])

    def run(batches: Any, **options: Any) -> Any:
        return lambda: qat8(trained, batches, samples, OpenVINO(1), QatConfig(steps=3), **options)

    refused("the training data is empty", run([]))
    refused(r"batches of \(inputs, target\)", run([pair[0]]))
    refused("step 0: the loss is not finite: nan", run([pair], loss=lambda z, y: z.sum() / 0 * 0))
    refused("step 0: the loss is not finite: nan", run([(pair[0] * torch.nan, pair[1])]))


def test_samples_that_cannot_be_are_refused(trained: nn.Module, samples: Any) -> None:
    refused("the calibration data has no samples", lambda: prepare_qat(trained, samples[:0]))
    refused("the calibration data holds NaN", lambda: prepare_qat(trained, samples * np.nan))
    with pytest.raises(DataError):
        prepare_qat(trained, samples[:0])


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 0), ("learning_rate", 0.0), ("learning_rate", float("nan")), ("warmup", 1.0),
     ("weight_decay", -0.1), ("clip_norm", 0.0)],
)  # fmt: skip
def test_a_config_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(SpecError, match=f"^{name} must be "):
        QatConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cpu", "saturating"),
    [("Some CPU avx2", True), ("Some CPU avx2 avx512f", True), ("Some CPU avx2 avx_vnni", False),
     ("Some CPU avx2 avx512f avx512_vnni", False), ("aarch64", False)],
)  # fmt: skip
def test_only_old_int8_kernels_saturate(
    monkeypatch: pytest.MonkeyPatch, cpu: str, saturating: bool
) -> None:
    monkeypatch.setattr(MODULE, "cpu_name", lambda: cpu)
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


def test_the_registry_does_without_torch() -> None:
    code = "import sys, t3c.baselines; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
