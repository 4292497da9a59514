"""A network of a few layers, a task to compress it, and what tests look at in the answer."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from nncf.torch.quantization import extensions
from nncf.torch.quantization.reference import torch_executor
from torch import Tensor, nn

from lab.baselines.baseline import Baseline, Task
from lab.baselines.finetune import Training
from t3c.engines.openvino import OpenVINO


class TinyNet(nn.Module):
    """Images (n, 3, 8, 8) -> logits (n, 5), by two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.body = nn.Conv2d(32, 32, 3, 2, 1, bias=False)
        self.hidden = nn.Linear(32 * 16, 48)
        self.head = nn.Linear(48, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(images)))
        x = torch.relu(self.body(x)).flatten(1)
        logits: Tensor = self.head(torch.relu(self.hidden(x)))
        return logits


LAYERS = ("stem", "body", "hidden", "head")


def images(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def network() -> TinyNet:
    """Weights at random, and a norm that has seen data; a part is frozen, all is in training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TinyNet()
        model(images(64, 1))
    model.stem.requires_grad_(False)
    return model


def task(steps: int = 4, model: nn.Module | None = None, **options: Any) -> Task:
    """16 samples to calibrate on, 32 images to train on."""
    training: dict[str, Any] = {
        "model": model or network(), "inputs": images(32, 2), "minutes": 1.0, "steps": steps,
        "batch": 16,
    }  # fmt: skip
    return Task(b"", images(16, 3), OpenVINO(1), training=Training(**training | options))


def answers(made: Baseline) -> Any:
    """What the model of OpenVINO says of the 16 images that drifts are measured on: (16, 5)."""
    return OpenVINO(1).compile_read(made.model).run([images(16, 4).numpy()])[0]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever is done inside leaves weights, statistics, modes and what is frozen as they were."""

    def seen() -> list[Any]:
        return [
            [module.training for module in model.modules()],
            [parameter.requires_grad for parameter in model.parameters()],
            list(model.state_dict()),
        ]

    before, state = seen(), copy.deepcopy(model.state_dict())
    yield
    assert seen() == before
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


def codes(graph: ov.Model) -> list[Any]:
    """The int8 weights of a graph's layers, in the order that they run."""
    found = []
    for node in graph.get_ordered_ops():
        if node.get_type_name() in ("Convolution", "MatMul"):
            source = node.input_value(1).get_node()
            while source.get_type_name() != "Constant":
                source = source.input_value(0).get_node()
            assert source.get_element_type() == ov.Type.i8
            found.append(np.array(source.data))
    return found


def recorded(patch: pytest.MonkeyPatch, module: Any, *, convert: bool = True) -> list[nn.Module]:
    """The models in torch that a method makes graphs of; without `convert` it makes none, which
    takes seconds."""
    seen: list[nn.Module] = []
    name = "qat_graph" if hasattr(module, "qat_graph") else "to_openvino"
    converted = getattr(module, name)
    nothing = ov.opset13.parameter([1, 3, 8, 8])

    def noted(model: nn.Module, sample: Any) -> ov.Model:
        seen.append(model)
        return converted(model, sample) if convert else ov.Model([nothing], [nothing])

    patch.setattr(module, name, noted)
    if not convert:
        patch.setattr(module, "quantized", lambda graph, task: graph, raising=False)
    return seen


@torch.no_grad()
def drift(model: nn.Module, original: nn.Module) -> float:
    """Of the outputs on images that neither was trained on, relative to the original's."""
    few = images(16, 4)
    one, other = model.eval()(few), copy.deepcopy(original).eval()(few)
    return float((one - other).norm() / other.norm())


def stored(made: Baseline) -> int:
    """Bytes of the packed weights and all else that is no topology."""
    with tempfile.TemporaryDirectory() as folder:
        ov.save_model(made.model, Path(folder) / "model.xml", compress_to_fp16=False)
        return made.size_bytes - (Path(folder) / "model.xml").stat().st_size


@contextmanager
def plain_kernels() -> Iterator[None]:
    """NNCF's kernels in plain torch, which compute the same: compiling them takes a minute."""
    plain = SimpleNamespace(
        Quantize_forward=torch_executor.forward, Quantize_backward=torch_executor.backward
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extensions.QuantizedFunctionsCPU, "_loaded_namespace", plain)
        yield
