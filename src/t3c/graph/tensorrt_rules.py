"""Check ONNX against TensorRT's documents: its operator list for version 10.15 and its guide to
explicit quantization."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper, shape_inference

OPSETS, NEWEST_IR = range(9, 25), 12  # IR 12 is that of opset 24
LIMIT_BYTES = 2**31  # of a protobuf file
STANDARD = ("", "ai.onnx")
QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"

# Those that hold graphs of their own (If, Loop, Scan) are left out: nothing here looks into them.
LISTED = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool
    BatchNormalization BlackmanWindow Cast CastLike Ceil Celu Clip Concat Constant ConstantOfShape
    Conv ConvTranspose Cos Cosh CumSum DeformConv DepthToSpace DequantizeLinear Div Dropout Einsum
    Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm
    GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample
    GroupNormalization HammingWindow HannWindow HardSigmoid HardSwish Hardmax Identity
    InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log
    LogSoftmax LpNormalization LpPool MatMul Max MaxPool Mean MeanVarianceNormalization Min Mish
    Mod Mul Neg NonMaxSuppression NonZero Not OneHot Or PRelu Pad Pow QuantizeLinear
    RMSNormalization RNN RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range
    Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin
    ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign
    RotaryEmbedding Round STFT ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh
    Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh
    TensorScatter ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor
"""
OPERATORS = frozenset(LISTED.split())
TYPES = frozenset({
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE,
    TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL,
})  # fmt: skip


@dataclass(frozen=True)
class Index:
    """Who makes and who reads each tensor of a graph."""

    constants: Mapping[str, TensorProto]
    makers: Mapping[str, NodeProto]
    users: Mapping[str, list[NodeProto]]
    outputs: frozenset[str]

    @classmethod
    def of(cls, graph: onnx.GraphProto) -> Index:
        users: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in dict.fromkeys(node.input):
                users.setdefault(name, []).append(node)
        return cls(
            {tensor.name: tensor for tensor in graph.initializer},
            {name: node for node in graph.node for name in node.output},
            users,
            frozenset(value.name for value in graph.output),
        )

    def value(self, name: str) -> npt.NDArray[Any]:
        return np.asarray(numpy_helper.to_array(self.constants[name]))

    def made_by(self, name: str) -> str:
        """The kind of node that makes a tensor; nothing for inputs and constants."""
        return self.makers[name].op_type if name in self.makers else ""


def problems(model: onnx.ModelProto, dynamic: Collection[str] = ("batch",)) -> list[str]:
    """Return what TensorRT would refuse, or not run in int8, one line each; only axes named
    `dynamic` may vary."""
    graph = model.graph
    index = Index.of(graph)
    found = [*_versions(model), *_storage(graph, index), *_axes(graph, dynamic)]
    for node in graph.node:
        found += [f"{node.op_type} {_name(node)!r}: {why}" for why in _node(node, index)]
    return found or list(_ranks(model))


def _versions(model: onnx.ModelProto) -> Iterator[str]:
    for opset in model.opset_import:
        if opset.domain not in STANDARD:
            yield f"model: imports the custom domain {opset.domain!r}"
        elif opset.version not in OPSETS:
            yield f"model: opset {opset.version} is not from {OPSETS[0]} to {OPSETS[-1]}"
    if model.ir_version > NEWEST_IR:
        yield f"model: IR version {model.ir_version} is newer than {NEWEST_IR}"
    for function in model.functions:
        yield f"model: defines the function {function.name!r}"
    if model.ByteSize() >= LIMIT_BYTES:
        yield f"model: {model.ByteSize()} bytes are more than one file may hold"


def _storage(graph: onnx.GraphProto, index: Index) -> Iterator[str]:
    for tensor in graph.initializer:
        readers = {node.op_type for node in index.users.get(tensor.name, [])}
        if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
            yield f"initializer {tensor.name!r}: lies outside of the file"
        elif tensor.data_type not in TYPES and not readers <= {QUANTIZE, DEQUANTIZE}:
            kind = TensorProto.DataType.Name(tensor.data_type)
            yield f"initializer {tensor.name!r}: {kind} outside of {QUANTIZE} and {DEQUANTIZE}"
    for sparse in graph.sparse_initializer:
        yield f"initializer {sparse.values.name!r}: is sparse"


def _axes(graph: onnx.GraphProto, dynamic: Collection[str]) -> Iterator[str]:
    for value in [*graph.input, *graph.output]:
        kind = value.type.tensor_type
        if not kind.HasField("shape"):
            yield f"tensor {value.name!r}: its rank is not known"
        if kind.elem_type not in TYPES:
            yield f"tensor {value.name!r}: {TensorProto.DataType.Name(kind.elem_type)} is no type"
        for axis, size in enumerate(kind.shape.dim):
            if size.dim_value <= 0 and size.dim_param not in dynamic:
                name = f" ({size.dim_param!r})" if size.dim_param else ""
                yield f"tensor {value.name!r}: axis {axis}{name} has no fixed size"


def _ranks(model: onnx.ModelProto) -> Iterator[str]:
    inferred = shape_inference.infer_shapes(model, data_prop=True).graph
    values = [*inferred.value_info, *inferred.output]
    known = {value.name for value in values if value.type.tensor_type.HasField("shape")}
    for node in model.graph.node:
        if any(name and name not in known for name in node.output):
            yield f"{node.op_type} {_name(node)!r}: the rank of its output is not known"


def _node(node: NodeProto, index: Index) -> Iterator[str]:
    if node.domain not in STANDARD:
        yield f"belongs to the custom domain {node.domain!r}"
        return
    if node.op_type not in OPERATORS:
        yield "TensorRT has no such operator"
    elif node.op_type in (QUANTIZE, DEQUANTIZE):
        yield from _scale(node, index)
        yield from _zero_point(node, index)
        yield from (_pair if node.op_type == QUANTIZE else _codes)(node, index)
    else:
        yield from _product(node, index)
        yield from _limits(node, index)


def _scale(node: NodeProto, index: Index) -> Iterator[str]:
    name = _input(node, 1)
    if not name:
        yield "its scale is missing"
    elif name not in index.constants:
        yield f"its scale {name!r} is no constant"
    elif index.constants[name].data_type != TensorProto.FLOAT:
        yield f"its scale {name!r} is not float32"
    elif not index.constants[name].external_data:
        scale = index.value(name)
        if scale.size == 0 or not (np.isfinite(scale) & (scale > 0)).all():
            yield f"its scale {name!r} is not positive"
        if scale.size > 1 and _input(node, 0) not in index.constants:
            yield "has several scales, and a tensor that is computed may have one"
    if _attribute(node, "block_size", 0):
        yield "has scales per block"


def _zero_point(node: NodeProto, index: Index) -> Iterator[str]:
    name = _input(node, 2)
    if not name:
        signed = _attribute(node, "output_dtype", 0) == TensorProto.INT8
        if node.op_type == QUANTIZE and not signed:
            yield "is unsigned: it has no zero point to say otherwise"
    elif name not in index.constants:
        yield f"its zero point {name!r} is no constant"
    elif not index.constants[name].external_data:
        if index.constants[name].data_type != TensorProto.INT8:
            kind = TensorProto.DataType.Name(index.constants[name].data_type)
            yield f"quantizes to {kind}, and only INT8 is taken"
        if index.value(name).any():
            yield f"its zero point {name!r} is not 0"


def _pair(node: NodeProto, index: Index) -> Iterator[str]:
    """That nothing but DequantizeLinear, on the same grid, reads the codes of a QuantizeLinear."""
    codes = node.output[0]
    users = index.users.get(codes, [])
    if not users or codes in index.outputs or any(u.op_type != DEQUANTIZE for u in users):
        yield f"without its {DEQUANTIZE}"
    for user in users:
        mine, other = (index.constants.get(_input(n, 1)) for n in (node, user))
        if user.op_type == DEQUANTIZE and mine and other and not _equal(mine, other):
            yield f"its scale is not that of {_name(user)!r}"


def _codes(node: NodeProto, index: Index) -> Iterator[str]:
    """That a DequantizeLinear reads codes, and those of a weight by output channel."""
    name = _input(node, 0)
    weight, scale = index.constants.get(name), index.constants.get(_input(node, 1))
    if weight is None:
        if index.made_by(name) != QUANTIZE:
            yield f"reads {name!r}, which is no {QUANTIZE} and no constant"
    elif weight.data_type != TensorProto.INT8:
        kind = TensorProto.DataType.Name(weight.data_type)
        yield f"its weight is {kind}, and only INT8 is taken"
    elif scale is not None and np.prod(scale.dims) > 1:
        axis = _attribute(node, "axis", 1) % len(weight.dims)
        if list(scale.dims) != [weight.dims[axis]]:
            yield f"{list(scale.dims)} scales do not fit axis {axis} of {list(weight.dims)}"
        for user in index.users.get(node.output[0], []):
            wanted = _output_axis(user, len(weight.dims))
            if wanted not in (None, axis):
                yield f"its scales lie on axis {axis}, the outputs of {_name(user)!r} on {wanted}"


def _output_axis(node: NodeProto, rank: int) -> int | None:
    """The axis of a product's weight that holds its output channels; None if it is no product."""
    if node.op_type == "Gemm":
        return 0 if _attribute(node, "transB", 0) else 1
    return {"Conv": 0, "ConvTranspose": 1, "MatMul": rank - 1}.get(node.op_type)


def _product(node: NodeProto, index: Index) -> Iterator[str]:
    """That a product whose weight is int8 has an int8 input, and its bias in float."""
    if _output_axis(node, 2) is None:
        return
    if index.made_by(_input(node, 1)) == DEQUANTIZE != index.made_by(_input(node, 0)):
        yield f"its weight is int8 and its input {_input(node, 0)!r} is not"
    if index.made_by(_input(node, 2)) == DEQUANTIZE:
        yield f"its bias {_input(node, 2)!r} is not in float"


def _limits(node: NodeProto, index: Index) -> Iterator[str]:
    """The limits of TensorRT's list on operators that graphs here are made of."""
    if node.op_type in ("AveragePool", "MaxPool", "LpPool"):
        if len(_attribute(node, "kernel_shape", [])) not in (2, 3):
            yield "pools over 2 or 3 axes alone are taken"
        if any(step != 1 for step in _attribute(node, "dilations", [])):
            yield "its dilations are not 1"
    if node.op_type in ("MaxPool", "LayerNormalization") and any(node.output[1:]):
        yield "has more than one output"
    axes = _input(node, 1)
    fixed = node.op_type in ("CumSum", "Squeeze", "Unsqueeze") or node.op_type.startswith("Reduce")
    if fixed and axes and axes not in index.constants and index.made_by(axes) != "Constant":
        yield f"its axes {axes!r} are no constant"


def _name(node: NodeProto) -> str:
    return node.name or node.output[0]


def _input(node: NodeProto, position: int) -> str:
    return node.input[position] if position < len(node.input) else ""


def _attribute(node: NodeProto, name: str, default: Any) -> Any:
    for attribute in node.attribute:
        if attribute.name == name:
            return helper.get_attribute_value(attribute)
    return default


def _equal(one: TensorProto, other: TensorProto) -> bool:
    if one.external_data or other.external_data:
        return True  # which is told as such
    return np.array_equal(numpy_helper.to_array(one), numpy_helper.to_array(other))
