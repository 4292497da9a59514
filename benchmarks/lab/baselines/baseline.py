"""A baseline's input and output: the original with samples, and an OpenVINO model with its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import openvino as ov

from t3c.engines.openvino import OpenVINO
from t3c.engines.protocol import Array
from t3c.errors import DataError
from t3c.evidence.int8 import INT8, quantize

if TYPE_CHECKING:  # nothing here needs torch before a task is made of its tensors
    from lab.baselines.finetune import Training
    from t3c.nn.inputs import Inputs

Watch = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Task:
    """The original in ONNX, samples (n, ...) of every input to calibrate on, its engine.

    Methods that train need `training`; the others do without. With `activations` left float
    only weights are compressed, which is what T3C then does too. A `transformer` is told to NNCF.
    """

    original: bytes
    samples: Inputs
    engine: OpenVINO
    activations: Literal["int8", "float"] = "int8"
    transformer: bool = False
    training: Training | None = None
    watch: Watch = lambda what, done, total: None

    @property
    def arrays(self) -> list[Array]:
        """Return the samples as an engine takes them."""
        from t3c.evidence.drifts import arrays

        return arrays(self.samples)

    @property
    def example(self) -> Inputs:
        """Return one sample (1, ...) of every input."""
        from t3c.nn.inputs import select

        return select(self.samples, slice(0, 1))

    def trained(self, name: str) -> Training:
        """Return what a method that trains is given; raise an error that names it otherwise."""
        if self.training is None:
            raise DataError(f"{name} trains: it needs the model in torch and data to train on")
        return self.training


@dataclass(frozen=True)
class Baseline:
    """A model made by a method; `size_bytes` are those of its own packed format on disk.

    `steps` and `seconds` are of training, 0 where there was none.
    """

    name: str
    method: str
    model: ov.Model
    size_bytes: int
    steps: int = 0
    seconds: float = 0.0


def original_graph(task: Task) -> ov.Model:
    """Read the original with OpenVINO: from torch, as everything trained is, where it is at hand.

    Quantized by NNCF, what comes from there is faster than from ONNX (ResNet-50 by 5 to 8%).
    """
    if task.training is None:
        return task.engine.read(task.original)
    from lab.baselines.finetune import copied, to_openvino

    return to_openvino(copied(task.training.model), task.example)


def quantized(model: ov.Model, task: Task) -> ov.Model:
    """Quantize with NNCF: weights and activations, or weights alone, as the task says."""
    return quantize(model, task.arrays, activations=task.activations, transformer=task.transformer)


def plain(name: str, task: Task) -> Baseline:
    """Make `ptq8` or `ptq8w` of the original."""
    made = INT8[name](original_graph(task), task.arrays, transformer=task.transformer)
    return Baseline(name, made.method, made.model, made.size_bytes)


def precision(task: Task) -> str:
    """Describe what `quantized` leaves, in words."""
    return "8 bits" if task.activations == "int8" else "weights in 8 bits, activations in float"
