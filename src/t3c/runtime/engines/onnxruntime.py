"""ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, numpy_helper
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
        # What is signed stays signed: its own rewriting to unsigned breaks fused linear layers.
        options.add_session_config_entry("session.qdqisint8allowed", "1")
        # Threads that go on spinning after a call take the cores from other sessions' threads.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        raw = unsigned_activations(model).SerializeToString()
        try:
            return ONNXRuntimeSession(ort.InferenceSession(raw, options, ["CPUExecutionProvider"]))
        except ERRORS as error:
            raise EngineError(f"ONNX Runtime cannot compile: {error}") from error


def unsigned_activations(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with signed activations on the same grid, counted from 128.

    Its int8 kernels want inputs and outputs of one type, and those for unsigned inputs are the
    fast ones; layers that pass from one type to the other run in float.
    """
    rewritten = onnx.ModelProto()
    rewritten.CopyFrom(model)
    rounded = [node for node in rewritten.graph.node if node.op_type == "QuantizeLinear"]
    zeros = {node.input[2] for node in rounded if len(node.input) > 2}
    for tensor in rewritten.graph.initializer:
        if tensor.name in zeros and tensor.data_type == TensorProto.INT8:
            shifted = numpy_helper.to_array(tensor).astype(np.int16) + 128
            tensor.CopyFrom(numpy_helper.from_array(shifted.astype(np.uint8), tensor.name))
    return rewritten


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
