"""Quantize the original to plain int8 with NNCF: what an artifact has to beat."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openvino as ov

from t3c.device.machine import DOT_PRODUCTS, cpu_name
from t3c.engines.protocol import Array
from t3c.errors import DataError, MissingExtraError
from t3c.silence import silenced

Activations = Literal["int8", "float"]


@dataclass(frozen=True)
class Int8:
    """A quantized model, how it was made, and its size in OpenVINO's own format."""

    model: ov.Model
    method: str
    size_bytes: int


def ptq8(model: ov.Model, samples: Array | Sequence[Array], *, transformer: bool = False) -> Int8:
    """Quantize weights and activations, calibrated on samples (n, ...) of every input."""
    made = quantize(model, samples, transformer=transformer)
    method = "NNCF post-training quantization, 8 bits" + (", weights 7" if saturates() else "")
    return Int8(made, method, bytes_on_disk(made))


def ptq8w(model: ov.Model, samples: Array | Sequence[Array], *, transformer: bool = False) -> Int8:
    """Quantize weights alone: what one would use where int8 kernels are slow."""
    made = quantize(model, samples, activations="float", transformer=transformer)
    return Int8(made, "NNCF weight compression, 8 bits", bytes_on_disk(made))


def keep_int8(made: Int8, path: Path) -> dict[str, str | int]:
    """Write a quantized model as OpenVINO's `path` (.xml); what else is to be known of it."""
    try:
        ov.save_model(made.model, path, compress_to_fp16=False)
    except RuntimeError as error:
        raise DataError(f"{path}: cannot be written: is the disk full?") from error
    return {"method": made.method, "size_bytes": made.size_bytes}


def kept_int8(path: Path, method: str, size_bytes: int) -> Int8:
    """Read a quantized model that was kept."""
    try:
        return Int8(ov.Core().read_model(path), method, size_bytes)
    except RuntimeError as error:
        raise DataError(f"{path} cannot be read: remove its folder to make it again") from error


INT8: dict[str, Callable[..., Int8]] = {"ptq8": ptq8, "ptq8w": ptq8w}


def quantize(
    model: ov.Model,
    samples: Array | Sequence[Array],
    *,
    activations: Activations = "int8",
    transformer: bool = False,
) -> ov.Model:
    """Return the model in 8 bits; NNCF has a scheme of its own for a `transformer`."""
    nncf = nncf_library()
    given = [samples] if isinstance(samples, np.ndarray) else list(samples)
    ports, states = model.inputs[: len(given)], model.inputs[len(given) :]
    if not states:
        shapes = zip(ports, given, strict=True)
        model.reshape({port: [-1, *value.shape[1:]] for port, value in shapes})
    empty = [_empty(state) for state in states]
    rows = [[value[row : row + 1] for value in given] for row in range(len(given[0]))]
    batches = [(*row, *empty) if len(row) + len(empty) > 1 else row[0] for row in rows]
    with quiet():
        if activations == "float":
            return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
        return nncf.quantize(model, **calibration(batches, transformer))


def _empty(state: ov.Output) -> Array:
    """Return a state (1, ...) of a model, of length 0 where its length is free."""
    rest = [size.get_length() if size.is_static else 0 for size in list(state.partial_shape)[1:]]
    return np.zeros((1, *rest), state.element_type.to_dtype())


def calibration(batches: Sequence[Any], transformer: bool) -> dict[str, Any]:
    """Return NNCF's arguments for calibration batches (1, ...) on this machine's kernels."""
    nncf = nncf_library()
    fix = nncf.OverflowFix.ENABLE if saturates() else nncf.OverflowFix.FIRST_LAYER
    return {
        "calibration_dataset": nncf.Dataset(batches),
        "subset_size": len(batches),
        "model_type": nncf.ModelType.TRANSFORMER if transformer else None,
        "advanced_parameters": nncf.AdvancedQuantizationParameters(overflow_fix=fix),
    }


def bytes_on_disk(model: ov.Model) -> int:
    """Return the model's size in OpenVINO's own format: weights and topology."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        ov.save_model(model, path, compress_to_fp16=False)
        return sum(file.stat().st_size for file in Path(folder).iterdir())


def saturates() -> bool:
    """Return whether int8 kernels here add pairs of products in 16 bits, which can overflow.

    NNCF then keeps weights in half the range, as T3C executes its own with 7 bits.
    """
    known = cpu_name().split()
    return "avx2" in known and not any(flag in known for flag in DOT_PRODUCTS)


def nncf_library() -> Any:
    """Import NNCF with its log at errors only."""
    try:
        with silenced():
            import nncf
    except ImportError as missing:
        raise MissingExtraError("nncf", "bench") from missing
    logging.getLogger("nncf").setLevel(logging.ERROR)  # importing it sets its own level
    return nncf


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and warnings of the libraries called within."""
    with silenced(), contextlib.redirect_stdout(io.StringIO()):
        yield
