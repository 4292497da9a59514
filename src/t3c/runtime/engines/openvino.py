"""OpenVINO on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import onnx
import openvino as ov

from t3c.errors import EngineError
from t3c.runtime.engines.protocol import Array, contiguous


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
            raise EngineError(f"OpenVINO cannot read the graph: {_first_line(error)}") from error

    def compile_read(self, model: ov.Model) -> OpenVINOSession:
        return OpenVINOSession(self, model)


class OpenVINOSession:
    """Compiled for each batch size when it is first asked for; one request per thread."""

    def __init__(self, engine: OpenVINO, model: ov.Model) -> None:
        self.engine = engine
        self.model = model
        self.compiled: dict[tuple[tuple[int, ...], ...], ov.CompiledModel] = {}
        self.lock = threading.Lock()
        self.local = threading.local()

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        arrays = contiguous(inputs)
        shapes = tuple(array.shape for array in arrays)
        requests = self.local.__dict__.setdefault("requests", {})
        request = requests.get(shapes)
        if request is None:
            request = requests[shapes] = self._compile(shapes).create_infer_request()
        try:
            request.infer(dict(enumerate(arrays)), share_inputs=True)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO cannot run: {_first_line(error)}") from error
        return [np.array(output.data) for output in request.output_tensors]

    def _compile(self, shapes: tuple[tuple[int, ...], ...]) -> ov.CompiledModel:
        with self.lock:
            if shapes not in self.compiled:
                try:
                    model = self.model.clone()
                    named = zip(model.inputs, shapes, strict=True)
                    model.reshape({port: list(shape) for port, shape in named})
                    self.compiled[shapes] = self.engine.core.compile_model(
                        model, "CPU", self.engine.config
                    )
                except RuntimeError as error:
                    raise EngineError(f"OpenVINO cannot compile: {_first_line(error)}") from error
            return self.compiled[shapes]


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no reason given")
