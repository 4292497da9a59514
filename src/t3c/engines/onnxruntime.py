"""ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as state

from t3c.engines.decode import Declared, completed
from t3c.engines.protocol import Array, contiguous
from t3c.errors import EngineError
from t3c.graph.int4 import Product, pack, products

BLOCKS = (128, 64, 32)  # columns that share a scale in its own products, best first
CONTRIB = "com.microsoft"
TINY = 1e-30  # a step for blocks of zeros

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
        raw = packed_products(unsigned_activations(model)).SerializeToString()
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


def packed_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with products by compressed weights as its own, which read them packed."""
    blocks = [(product, _block(product)) for product in products(model.graph)]
    replaced = {product.output: (product, block) for product, block in blocks if block}
    if not replaced:
        return model
    gone = {name for product, _ in replaced.values() for name in product.replaced}
    packed = _Packed()
    for node in model.graph.node:
        if node.output[0] in replaced:
            packed.product(*replaced[node.output[0]])
        elif node.output[0] not in gone:
            packed.nodes.append(node)
    used = {name for node in packed.nodes for name in node.input}
    rewritten = onnx.ModelProto()
    rewritten.CopyFrom(model)
    graph = rewritten.graph
    del graph.node[:], graph.initializer[:]
    graph.node.extend(packed.nodes)
    graph.initializer.extend(t for t in model.graph.initializer if t.name in used)
    graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in packed.constants.items())
    rewritten.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    return rewritten


def _block(product: Product) -> int | None:
    """The columns of a block: what fills up the least; none where groups are not of blocks."""
    columns, groups = product.codes.shape[1], product.scale.shape[1]
    if groups > 1:
        fitting = (block for block in (*BLOCKS, 16) if columns // groups % block == 0)
        return next(fitting, None)
    return min(BLOCKS, key=lambda block: _filled(columns, block))


def _filled(columns: int, block: int) -> int:
    return -(-columns // block) * block


class _Packed:
    """Collects the nodes of a graph in which compressed weights are packed.

    Its fast kernels round activations to 8 bits in blocks, which costs half a percent of the
    result. So x is given in two terms, as two rows of one product that reads the weights once:
    x rounded to the very grid they round to, and what that left, whose rounding costs nothing.
    Its kernels for 4 bits count from 8, not 7.5: half a scale times the sum of x is added.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, npt.NDArray[np.generic]] = {}
        self.made: set[str] = set()

    def node(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.made.add(output)
        self.nodes.append(helper.make_node(kind, list(inputs), [output], output, **attributes))
        return output

    def constant(self, name: str, value: Any, dtype: npt.DTypeLike = np.int64) -> str:
        self.constants[name] = np.ascontiguousarray(value, dtype=dtype)
        return name

    def product(self, product: Product, block: int) -> None:
        """The nodes of x (..., columns) by a weight: (..., rows), under its own name."""
        name, (rows, columns) = f"{product.output}/packed", product.codes.shape
        both = self._both(name, product, block)
        pair = self.constant(f"{name}/pair", [2, -1, rows])
        terms = self.node("Reshape", [both, pair], f"{name}/terms")
        first = self.constant(f"{name}/first", [0])
        total = self.node("ReduceSum", [terms, first], f"{name}/sum", keepdims=0)
        if product.bits == 4:
            half = self.constant(f"{name}/half", product.scale.T / 2, np.float32)
            sums = self._sums(product.x, columns, product.scale.shape[1])
            offset = self.node("MatMul", [sums, half], f"{name}/offset")
            total = self.node("Add", [total, offset], f"{name}/centred")
        sizes = [self._leading(product.x), self.constant(f"{name}/rows", [rows])]
        shape = self.node("Concat", sizes, f"{name}/shape", axis=0)
        self.node("Reshape", [total, shape], product.output)

    def _both(self, name: str, product: Product, block: int) -> str:
        """Both terms of x times the weight: (2 positions, rows)."""
        rows, columns = product.codes.shape
        filled = _filled(columns, block)
        codes = product.codes if product.bits == 4 else product.codes.astype(np.int16) + 128
        zero = 1 << (product.bits - 1)
        wide = np.pad(codes, ((0, 0), (0, filled - columns)), constant_values=zero)
        blob = pack(wide.astype(np.uint8)) if product.bits == 4 else wide
        blob = blob.reshape(rows, filled // block, block * product.bits // 8)
        scales = np.repeat(product.scale, filled // block // product.scale.shape[1], axis=1)
        inputs = [
            self._terms(product.x, columns, block),
            self.constant(f"{name}/codes", blob, np.uint8),
            self.constant(f"{name}/scale", scales, np.float32),
        ]
        return self.node(
            "MatMulNBits", inputs, f"{name}/both", domain=CONTRIB, K=filled, N=rows,
            bits=product.bits, block_size=block, accuracy_level=4,
        )  # fmt: skip

    def _terms(self, x: str, columns: int, block: int) -> str:
        """x rounded in blocks, and below it the rest: (2 positions, columns filled up)."""
        name, filled = f"{x}/blocks{block}", _filled(columns, block)
        if name in self.made:
            return f"{name}/terms"
        last = self.constant(f"{name}/last", [-1])
        if filled > columns:
            more = self.constant(f"{name}/more", [0, filled - columns])
            x = self.node("Pad", [x, more, "", last], f"{name}/filled")
        shape = self.constant(f"{name}/shape", [-1, filled // block, block])
        x = self.node("Reshape", [x, shape], name)
        size = self.node("Abs", [x], f"{name}/size")
        largest = self.node("ReduceMax", [size, last], f"{name}/largest", keepdims=1)
        part = self.constant(f"{name}/part", 1 / 127, np.float32)
        step = self.node("Mul", [largest, part], f"{name}/step")
        tiny = self.constant(f"{name}/tiny", TINY, np.float32)
        step = self.node("Max", [step, tiny], f"{name}/grid")
        count = self.node("Round", [self.node("Div", [x, step], f"{name}/steps")], f"{name}/count")
        rounded = self.node("Mul", [count, step], f"{name}/rounded")
        rest = self.node("Sub", [x, rounded], f"{name}/rest")
        stacked = self.node("Concat", [rounded, rest], f"{name}/stacked", axis=0)
        flat = self.constant(f"{name}/flat", [-1, filled])
        return self.node("Reshape", [stacked, flat], f"{name}/terms")

    def _sums(self, x: str, columns: int, groups: int) -> str:
        """The sum of each group of columns of x: (positions, groups)."""
        name = f"{x}/groups{groups}"
        if name not in self.made:
            shape = self.constant(f"{name}/shape", [-1, groups, columns // groups])
            apart = self.node("Reshape", [x, shape], name)
            last = self.constant(f"{name}/last", [-1])
            self.node("ReduceSum", [apart, last], f"{name}/sums", keepdims=0)
        return f"{name}/sums"

    def _leading(self, x: str) -> str:
        """The sizes of x but the last."""
        name = f"{x}/leading"
        return name if name in self.made else self.node("Shape", [x], name, end=-1)


class ONNXRuntimeSession:
    """A compiled graph."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.session = session
        self.declared = {value.name: _declared(value) for value in session.get_inputs()}
        self.only = next(iter(self.declared)) if len(self.declared) == 1 else None

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        if self.only and len(inputs) == 1 and inputs[0].flags.c_contiguous:
            feeds = {self.only: inputs[0]}
        else:
            arrays = contiguous(completed(inputs, self.declared))
            feeds = dict(zip(self.declared, arrays, strict=True))
        try:
            return list(self.session.run(None, feeds))
        except ERRORS as error:
            raise EngineError(f"ONNX Runtime cannot run: {error}") from error


def _declared(value: ort.NodeArg) -> Declared:
    kinds = {"tensor(float16)": np.float16, "tensor(double)": np.float64}
    sizes = [size if isinstance(size, int) else None for size in value.shape]
    return sizes, kinds.get(value.type, np.float32)
