"""What a topology may hold, checked before an engine is given it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from t3c.artifact.manifest import ELASTIC_DOMAIN, OPSET, elastic_kind, elastic_layer
from t3c.errors import SpecError
from t3c.spec import Factorization, LayerSpec

ONNX = ("", "ai.onnx")  # names of the domain of its own operations
NUMBERS = (
    TensorProto.BOOL, TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT8,
    TensorProto.INT16, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8, TensorProto.UINT16,
    TensorProto.UINT32, TensorProto.UINT64,
)  # fmt: skip


def check_graph(model: onnx.ModelProto, specs: Mapping[str, LayerSpec]) -> None:
    """Refuse what is more than operations of ONNX, constants and uses of known layers.

    Engines are not made to be given anything else: a body of a loop, a file to read.
    """
    graph = model.graph
    texts = [value.name for value in (*graph.input, *graph.output, *graph.initializer)]
    for node in graph.node:
        texts += [node.name, node.op_type, node.domain, *node.input, *node.output]
    if not all(isinstance(text, str) for text in texts):  # protobuf gives bytes for what is none
        raise SpecError("it has a name that is no text")
    if any(entry.version != OPSET for entry in model.opset_import if entry.domain in ONNX):
        raise SpecError(f"its operations are not of opset {OPSET}")
    if model.functions or model.training_info or graph.sparse_initializer:
        raise SpecError("functions, training and sparse constants are not for artifacts")
    for node in graph.node:
        if not node.output or not node.output[0]:
            raise SpecError(f"{node.name!r} has no output")
        if node.domain == ELASTIC_DOMAIN:
            _check_elastic(node, specs)
        elif node.domain not in ONNX:
            raise SpecError(f"{node.name!r} is an operation of {node.domain!r}, not of ONNX")
        if any(a.HasField("g") or a.graphs or a.HasField("sparse_tensor") for a in node.attribute):
            raise SpecError(f"{node.name!r} has a graph of its own, or a sparse constant")
    for tensor in _constants(graph):
        _check_constant(tensor)
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise SpecError(str(error).strip().splitlines()[0]) from error


def _check_elastic(node: NodeProto, specs: Mapping[str, LayerSpec]) -> None:
    layer = elastic_layer(node)
    if layer not in specs:
        raise SpecError(f"the graph names an unknown layer {layer!r}")
    spec = specs[layer]
    kind = elastic_kind(node, spec)
    kinds = ("conv",) if spec.convolution else ("linear", "embedding")
    if kind not in kinds or (kind == "embedding" and spec.factorization is not Factorization.NONE):
        raise SpecError(f"{layer!r} cannot be used as {kind!r}")
    if node.op_type != "Elastic" or not 1 <= len(node.input) <= 2 or len(node.output) != 1:
        raise SpecError(f"{node.name!r}: an elastic layer has an input, maybe a bias, an output")
    if not all(node.input):
        raise SpecError(f"{node.name!r} has an input without a name")


def _constants(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for attribute in (a for node in graph.node for a in node.attribute):
        yield from attribute.tensors
        if attribute.HasField("t"):
            yield attribute.t


def _check_constant(tensor: TensorProto) -> None:
    if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
        raise SpecError(f"{tensor.name!r} lies outside of the graph")
    if tensor.data_type not in NUMBERS or min(tensor.dims, default=0) < 0:
        raise SpecError(f"{tensor.name!r} is no constant of numbers")
    # No number takes less than a byte, so what is allocated is never more than was read.
    if prod(tensor.dims) > tensor.ByteSize():
        raise SpecError(f"{tensor.name!r} does not hold what its sizes {list(tensor.dims)} say")
    try:
        numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise SpecError(f"{tensor.name!r}: {error}") from error
