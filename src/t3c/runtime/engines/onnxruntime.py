"""ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as state

from t3c.errors import EngineError
from t3c.runtime.engines.protocol import Array, contiguous

# Its errors share no base of their own.
ERRORS = (
    state.EPFail, state.Fail, state.InvalidArgument, state.InvalidGraph, state.InvalidProtobuf,
    state.NotImplemented, state.RuntimeException,
)  # fmt: skip


class ONNXRuntime:
    """Runs the same QDQ graph; batch sizes may vary from call to call."""

    name = "onnxruntime"

    def __init__(self, threads: int) -> None:
        self.version = str(ort.__version__)
        self.threads = threads

    def compile(self, model: onnx.ModelProto) -> ONNXRuntimeSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 4
        # Signed activations stay signed: rewriting them to unsigned breaks fused linear layers.
        options.add_session_config_entry("session.qdqisint8allowed", "1")
        try:
            return ONNXRuntimeSession(
                ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
            )
        except ERRORS as error:
            raise EngineError(f"ONNX Runtime cannot compile: {error}") from error


class ONNXRuntimeSession:
    """A compiled graph."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.session = session
        self.names = [value.name for value in session.get_inputs()]

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        feeds = dict(zip(self.names, contiguous(inputs), strict=True))
        try:
            return list(self.session.run(None, feeds))
        except ERRORS as error:
            raise EngineError(f"ONNX Runtime cannot run: {error}") from error
