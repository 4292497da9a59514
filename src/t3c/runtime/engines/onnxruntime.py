"""ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnxruntime as ort

from t3c.errors import EngineError
from t3c.runtime.engines.protocol import Array, contiguous


class ONNXRuntime:
    """Runs the same QDQ graph; batch sizes may vary from call to call."""

    name = "onnxruntime"

    def __init__(self, threads: int) -> None:
        self.version = str(ort.__version__)
        self.threads = threads

    def compile(self, model: onnx.ModelProto) -> ONNXRuntimeSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 3
        try:
            return ONNXRuntimeSession(
                ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
            )
        except Exception as error:  # its errors share no base class of their own
            raise EngineError(f"ONNX Runtime cannot compile: {error}") from error


class ONNXRuntimeSession:
    """A compiled graph."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.session = session
        self.names = [value.name for value in session.get_inputs()]

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        feeds = dict(zip(self.names, contiguous(inputs), strict=True))
        return list(self.session.run(None, feeds))
