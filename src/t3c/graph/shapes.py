"""The shapes of a topology's tensors, as far as they can be known before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from t3c.artifact.manifest import ELASTIC_DOMAIN, OPSET, elastic_kind, elastic_layer
from t3c.spec import LayerSpec

LONGEST = 64  # numbers in a tensor that can be a shape, axes or pads

Constants = Mapping[str, npt.NDArray[Any]]
Size = int | str | None  # a number, the name of a free size, or unknown
Shapes = Mapping[str, tuple[Size, ...]]


@dataclass(frozen=True)
class SizeOf:
    """An entry of a computed shape: the size of a tensor along an axis."""

    tensor: str
    axis: int


Entry = int | SizeOf | None  # a number, a size, or unknown


def infer_shapes(
    graph: onnx.GraphProto, constants: Constants, specs: Mapping[str, LayerSpec]
) -> dict[str, tuple[Size, ...]]:
    """Return the shapes of all tensors whose rank is known, every layer at its full size."""
    nodes, weights = [], {}
    for index, node in enumerate(graph.node):
        if node.domain == ELASTIC_DOMAIN:
            spec, weight = specs[elastic_layer(node)], f"stand_in/{index}"
            node, weights[weight] = _stand_in(node, spec, weight)
        nodes.append(node)
    short = {n: v for n, v in constants.items() if v.dtype.kind == "i" and v.size <= LONGEST}
    inputs = [value for value in graph.input if value.name not in constants]
    inputs += [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in constants.items()
        if n not in short
    ]
    inputs += [
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in weights.items()
    ]
    whole = helper.make_graph(
        nodes, "shapes", inputs, list(graph.output),
        [numpy_helper.from_array(np.asarray(v), n) for n, v in short.items()],
    )  # fmt: skip
    model = helper.make_model(whole, opset_imports=[helper.make_opsetid("", OPSET)])
    known = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes: dict[str, tuple[Size, ...]] = {n: v.shape for n, v in constants.items()}
    for value in [*known.input, *known.value_info, *known.output]:
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            shapes[value.name] = tuple(
                d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims
            )
    for node in graph.node:
        if node.domain == ELASTIC_DOMAIN and node.input[0] in shapes:
            _note_channels(shapes, node, specs[elastic_layer(node)])
    return shapes


def _note_channels(
    shapes: dict[str, tuple[Size, ...]], node: onnx.NodeProto, spec: LayerSpec
) -> None:
    """Add what follows from a layer's reading a tensor: how many channels that has."""
    kind, shape = elastic_kind(node, spec), list(shapes[node.input[0]])
    if kind != "embedding":
        shape[1 if kind == "conv" else -1] = spec.in_channels
        shapes[node.input[0]] = tuple(shape)


def _stand_in(
    node: onnx.NodeProto, spec: LayerSpec, weight: str
) -> tuple[onnx.NodeProto, Sequence[int]]:
    """Return a node of ONNX that computes what an elastic one does, and its weight's shape."""
    kind, x, out = elastic_kind(node, spec), node.input[0], list(node.output)
    if kind == "embedding":
        shape = [spec.out_channels, spec.in_channels]
        return helper.make_node("Gather", [weight, x], out, axis=0), shape
    if kind == "linear":
        return helper.make_node("MatMul", [x, weight], out), [spec.in_channels, spec.out_channels]
    conv = helper.make_node(
        "Conv", [x, weight], out, strides=spec.stride, pads=spec.padding * 2,
        dilations=spec.dilation, group=spec.groups,
    )  # fmt: skip
    return conv, [spec.out_channels, spec.in_channels // spec.groups, *spec.kernel]


def numbers(constants: Constants, name: str) -> list[int] | None:
    """Return the numbers of a constant that can be a shape, axes or pads; None of others."""
    value = constants.get(name)
    if value is None or value.dtype.kind != "i" or value.ndim > 1 or value.size > LONGEST:
        return None
    return [int(number) for number in value.reshape(-1)]


def computed_sizes(
    node: onnx.NodeProto, sizes: Mapping[str, list[Entry]], constants: Constants, shapes: Shapes
) -> list[Entry] | None:
    """Return the entries a node computes of the shapes it reads; None if it is not understood."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    first = node.input[0] if node.input else ""
    if node.op_type == "Shape":
        if first not in shapes:
            return None
        all_of: list[Entry] = [SizeOf(first, axis) for axis in range(len(shapes[first]))]
        return all_of[attributes.get("start", 0) : attributes.get("end")]
    if node.op_type == "Concat" and attributes["axis"] == 0:
        pieces = [entries_of(name, sizes, constants, shapes) for name in node.input]
        known = [piece for piece in pieces if piece is not None]
        return [e for piece in known for e in piece] if len(known) == len(pieces) else None
    read = [entries_of(name, sizes, constants) for name in node.input]
    if not any(name in sizes for name in node.input) or read[0] is None:
        return None
    rest = [numbers(constants, name) for name in node.input[1:]]
    if node.op_type == "Slice" and None not in rest[:2] and rest[3:] in ([], [[1]]):
        (start, *_), (end, *_) = rest[0] or [0], rest[1] or [0]
        return read[0][start:end]
    if node.op_type == "Gather" and rest[0] is not None:
        return [read[0][index] for index in rest[0]]
    if node.op_type in ("Squeeze", "Unsqueeze", "Identity", "Cast"):
        return read[0]
    if node.op_type == "Reshape" and rest == [[-1]]:
        return read[0]
    return None


def entries_of(
    name: str, sizes: Mapping[str, list[Entry]], constants: Constants, shapes: Shapes | None = None
) -> list[Entry] | None:
    """Return the entries of a shape, constant or computed; None if it is neither.

    Of a tensor that can be a shape by its own one in `shapes`, they are as many unknown ones.
    """
    if name in sizes:
        return sizes[name]
    known = numbers(constants, name)
    if known is not None:
        return list(known)
    length = (shapes or {}).get(name, ())
    if len(length) == 1 and isinstance(length[0], int) and length[0] <= LONGEST:
        return [None] * length[0]
    return None
