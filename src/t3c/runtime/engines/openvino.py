"""OpenVINO on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import openvino as ov

from t3c.errors import EngineError
from t3c.runtime.engines.protocol import Array, contiguous

Shapes = tuple[tuple[int, ...], ...]
KEPT = 8  # compiled batch sizes of one graph


class OpenVINO:
    """The default engine: int8 kernels by QDQ, one compiled model per batch size."""

    name = "openvino"

    def __init__(self, threads: int) -> None:
        self.version = ov.__version__.split("-")[0]
        self.threads = threads
        self.core = ov.Core()
        self.config = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
        }

    def compile(self, model: onnx.ModelProto) -> OpenVINOSession:
        return self.compile_read(self.read(model.SerializeToString()))

    def read(self, raw: bytes) -> ov.Model:
        """An OpenVINO model from ONNX bytes."""
        try:
            return self.core.read_model(raw)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO cannot read the graph: {_reason(error)}") from error

    def compile_read(self, model: ov.Model) -> OpenVINOSession:
        return OpenVINOSession(self, model)


class OpenVINOSession:
    """Compiled for each batch size when it is first asked for, a few of them kept."""

    def __init__(self, engine: OpenVINO, model: ov.Model) -> None:
        self.engine = engine
        self.model = model
        self.lock = threading.Lock()
        self.compiled: dict[Shapes, ov.CompiledModel] = {}
        self.local = threading.local()

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        arrays = contiguous(inputs)
        request = self._request(tuple(array.shape for array in arrays))
        try:
            request.infer(dict(enumerate(arrays)), share_inputs=True)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO cannot run: {_reason(error)}") from error
        return [np.array(output.data) for output in request.output_tensors]

    def _request(self, shapes: Shapes) -> ov.InferRequest:
        """This thread's request for inputs of these shapes."""
        requests: dict[Shapes, ov.InferRequest]
        requests = self.local.__dict__.setdefault("requests", {})
        if shapes not in requests:
            _make_room(requests)
            requests[shapes] = self._compile(shapes).create_infer_request()
        return requests[shapes]

    def _compile(self, shapes: Shapes) -> ov.CompiledModel:
        with self.lock:
            if shapes not in self.compiled:
                _make_room(self.compiled)
                try:
                    model = self.model.clone()
                    named = zip(model.inputs, shapes, strict=True)
                    model.reshape({port: list(shape) for port, shape in named})
                    self.compiled[shapes] = self.engine.core.compile_model(
                        model, "CPU", self.engine.config
                    )
                except RuntimeError as error:
                    raise EngineError(f"OpenVINO cannot compile: {_reason(error)}") from error
            return self.compiled[shapes]


def _make_room(kept: dict[Shapes, Any]) -> None:
    """Forget the shapes seen first when there are too many."""
    while len(kept) >= KEPT:
        del kept[next(iter(kept))]


def _reason(error: Exception) -> str:
    """What went wrong, without the place in OpenVINO's source that it starts with."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith("Exception from")]
    return (telling or lines or ["no reason given"])[0]
