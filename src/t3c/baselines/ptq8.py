"""Post-training quantization to 8 bits by NNCF, on OpenVINO."""

from __future__ import annotations

import contextlib
import io
import logging

from t3c.baselines.baseline import Baseline, bytes_on_disk
from t3c.errors import MissingExtraError
from t3c.runtime.engines.openvino import OpenVINO
from t3c.runtime.engines.protocol import Array


def ptq8(original: bytes, samples: Array, engine: OpenVINO) -> Baseline:
    """Quantize an ONNX model with NNCF's defaults, calibrated on all `samples` (n, ...)."""
    logging.getLogger("nncf").setLevel(logging.ERROR)
    try:
        import nncf
    except ImportError as missing:
        raise MissingExtraError("nncf", "bench") from missing
    model = engine.read(original)
    port = model.inputs[0]
    model.reshape({port: [1, *samples.shape[1:]]})
    rows = nncf.Dataset([sample[None] for sample in samples])
    with contextlib.redirect_stdout(io.StringIO()):  # its progress bars
        quantized = nncf.quantize(model, rows, subset_size=len(samples))
    return Baseline(
        "ptq8", "NNCF post-training quantization, 8 bits", engine.compile_read(quantized),
        bytes_on_disk(quantized),
    )  # fmt: skip
