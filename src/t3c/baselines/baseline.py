"""What every baseline is given, and what it leaves: a model of OpenVINO and its packed size."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import openvino as ov

from t3c.errors import DataError, MissingExtraError
from t3c.runtime.engines.openvino import OpenVINO
from t3c.runtime.engines.protocol import Array
from t3c.runtime.measured import DOT_PRODUCTS, cpu_name

if TYPE_CHECKING:
    from t3c.baselines.finetune import Training

Watch = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Task:
    """The original in ONNX, samples (n, ...) to calibrate on, and what it will run on.

    Methods that train need `training`; the others do without torch. With `activations` left float
    only weights are compressed, which is what T3C then does too. A `transformer` is told to NNCF.
    """

    original: bytes
    samples: Array
    engine: OpenVINO
    activations: Literal["int8", "float"] = "int8"
    transformer: bool = False
    training: Training | None = None
    watch: Watch = lambda what, done, total: None

    def trained(self, name: str) -> Training:
        """What a method that trains is given; an error that names it where there is nothing."""
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


def bytes_on_disk(model: ov.Model) -> int:
    """What the model takes in OpenVINO's own format: weights and topology."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        ov.save_model(model, path, compress_to_fp16=False)
        return sum(file.stat().st_size for file in Path(folder).iterdir())


def original_graph(task: Task) -> ov.Model:
    """The original as OpenVINO reads it: from torch, as all that is trained, where that is at hand.

    Quantized by NNCF, what comes from there is faster than from ONNX (ResNet-50 by 5 to 8%).
    """
    if task.training is None:
        return task.engine.read(task.original)
    from t3c.baselines.finetune import copied, to_openvino  # nothing else here needs torch

    return to_openvino(copied(task.training.model), task.samples[:1])


def quantized(model: ov.Model, task: Task) -> ov.Model:
    """The model in 8 bits by NNCF: weights and activations, or weights alone, as the task says."""
    nncf = nncf_library()
    ids, *states = model.inputs
    if not states:
        model.reshape({ids: [-1, *task.samples.shape[1:]]})
    empty = [_remembering_nothing(state) for state in states]
    samples = [(sample[None], *empty) if empty else sample[None] for sample in task.samples]
    with quiet():
        if task.activations == "float":
            return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
        return nncf.quantize(model, **calibration(samples, task.transformer))


def _remembering_nothing(state: ov.Output) -> Array:
    """A state (1, ...) of a model, of no length where that is free."""
    rest = [size.get_length() if size.is_static else 0 for size in list(state.partial_shape)[1:]]
    return np.zeros((1, *rest), state.element_type.to_dtype())


def calibration(samples: Sequence[Any], transformer: bool) -> dict[str, Any]:
    """What NNCF is told of samples (1, ...), of the model, and of the kernels here."""
    nncf = nncf_library()
    fix = nncf.OverflowFix.ENABLE if saturates() else nncf.OverflowFix.FIRST_LAYER
    return {
        "calibration_dataset": nncf.Dataset(samples),
        "subset_size": len(samples),
        "model_type": nncf.ModelType.TRANSFORMER if transformer else None,
        "advanced_parameters": nncf.AdvancedQuantizationParameters(overflow_fix=fix),
    }


def precision(task: Task) -> str:
    """What `quantized` leaves, in words."""
    return "8 bits" if task.activations == "int8" else "weights in 8 bits, activations in float"


def saturates() -> bool:
    """Whether int8 kernels here add pairs of products in 16 bits, which 8-bit weights overflow.

    There NNCF is told to keep weights in half the range, as T3C executes its own with 7 bits.
    """
    known = cpu_name().split()
    return "avx2" in known and not any(flag in known for flag in DOT_PRODUCTS)


def nncf_library() -> Any:
    """NNCF, told to be quiet."""
    try:
        import nncf
    except ImportError as missing:
        raise MissingExtraError("nncf", "bench") from missing
    logging.getLogger("nncf").setLevel(logging.ERROR)  # importing it sets its own
    return nncf


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no warnings of the libraries' own code."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
