"""Products of float activations by weights of 4 or 8 bits: how a graph says them.

Decoding one token at a time takes as long as reading the weights, so these stay as small as they
are stored and activations are not rounded at all. The pattern:

    codes -> Cast -> Sub 7.5 (of 4 bits) -> Mul scale -> Reshape (of groups) -> Transpose -> MatMul

Codes are (rows, columns); with a scale for each group of columns they are (rows, groups, columns
of a group), reshaped to rows afterwards. A view of at most 4 bits holds odd numbers from -15 to 15:
2 (u - 7.5) for u from 0 to 15. DequantizeLinear cannot say that, its zero points are integers.

OpenVINO recognizes the pattern and multiplies by the codes; an engine that does not is given its
own nodes for what `products` finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from t3c.artifact.store import Floats
from t3c.errors import SpecError

Activations = Literal["int8", "float"]
Codes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int8]
Weight = Integers | Floats

LARGEST = 15  # integer of a 4-bit view
MIDDLE = np.float32(7.5)  # of the codes 0..15
WIDTHS: dict[int, int] = {TensorProto.UINT4: 4, TensorProto.INT8: 8}


def fits_four_bits(integers: Integers) -> bool:
    """Whether all are odd and from -15 to 15, as in views of at most 4 bits."""
    odd = bool(np.all(integers & 1))
    return odd and int(np.abs(integers).max(initial=0)) <= LARGEST


def four_bit_codes(integers: Integers) -> Codes:
    """The codes 0..15 of odd integers from -15 to 15."""
    return ((integers + LARGEST) // 2).astype(np.uint8)


def pack(codes: Codes) -> Codes:
    """Codes of 4 bits, two in a byte, the first of them in its low half: (ceil(size / 2),)."""
    flat = np.pad(codes.reshape(-1), (0, codes.size % 2))
    return (flat[0::2] | (flat[1::2] << 4)).astype(np.uint8)


def four_bit_tensor(name: str, codes: Codes) -> TensorProto:
    """An ONNX constant of unsigned 4-bit codes."""
    raw = pack(codes).tobytes()
    return helper.make_tensor(name, TensorProto.UINT4, codes.shape, raw, raw=True)


class Nodes(Protocol):
    """A graph that nodes and constants are added to; both calls return the name added."""

    def node(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str: ...

    def constant(self, name: str, value: npt.NDArray[np.generic]) -> str: ...


def group_size(weight: Weight, scale: Floats) -> int:
    """The columns that share a scale of a weight (rows, columns) with scales (rows, groups)."""
    shape, (rows, groups) = weight.shape, scale.shape
    if len(shape) != 2 or shape[0] != rows or groups == 0 or shape[1] % groups:
        raise SpecError(f"scales of shape {(rows, groups)} for a weight of shape {shape}")
    return int(shape[1] // groups)


def decompressed(graph: Nodes, name: str, weight: Weight, scale: Floats, *, four_bits: bool) -> str:
    """The pattern up to the product: a float weight (columns, rows), stored (rows, columns).

    Scales are (rows,) or (rows, groups). Where all integers fit 4 bits, they may take no more.
    """
    integers = weight.astype(np.int8, copy=False)
    if scale.ndim == 2:
        integers = integers.reshape(len(integers), -1, group_size(weight, scale))
    if four_bits and fits_four_bits(integers):
        tensor = four_bit_tensor(f"{name}/weight", four_bit_codes(integers))
        # A node: torch, which reads the other constants as they are, has no type of 4 bits.
        codes = graph.node("Constant", [], f"{name}/weight", value=tensor)
        floats = graph.node("Cast", [codes], f"{name}/weight_codes", to=TensorProto.FLOAT)
        middle = graph.constant(f"{name}/weight_middle", np.array(MIDDLE))
        floats = graph.node("Sub", [floats, middle], f"{name}/weight_centred")
        scale = scale * np.float32(2)
    else:
        codes = graph.constant(f"{name}/weight", np.ascontiguousarray(integers))
        floats = graph.node("Cast", [codes], f"{name}/weight_codes", to=TensorProto.FLOAT)
    factor = graph.constant(f"{name}/weight_scale", scale[..., None])
    rows = graph.node("Mul", [floats, factor], f"{name}/weight_rows")
    if scale.ndim == 2:
        shape = graph.constant(f"{name}/weight_shape", np.array(weight.shape, dtype=np.int64))
        rows = graph.node("Reshape", [rows, shape], f"{name}/weight_joined")
    return graph.node("Transpose", [rows], f"{name}/weight_float", perm=[1, 0])


def fits_table(table: Weight) -> bool:
    """Whether `table_rows` can hold a table: integers of 4 bits, an even number in a row."""
    even = table.dtype == np.int8 and table.shape[1] % 2 == 0
    return even and fits_four_bits(table.astype(np.int8, copy=False))


def table_rows(graph: Nodes, name: str, table: Weight, ids: str) -> str:
    """The rows `ids` of a table as floats: a byte holds a column and the one half a row on.

    What a byte stands for is looked up, for no engine gathers 4 bits as all others do.
    """
    codes = four_bit_codes(table.astype(np.int8, copy=False))
    half = codes.shape[1] // 2
    pairs = graph.constant(f"{name}/table", codes[:, :half] | (codes[:, half:] << 4))
    rows = graph.node("Gather", [pairs, ids], f"{name}/rows", axis=0)
    found = graph.node("Cast", [rows], f"{name}/pairs", to=TensorProto.INT32)
    byte = np.arange(256)
    columns = []
    for part, code in (("low", byte & 15), ("high", byte >> 4)):
        values = graph.constant(f"{name}/{part}", (2 * code - LARGEST).astype(np.float32))
        columns.append(graph.node("Gather", [values, found], f"{name}/{part}_half", axis=0))
    return graph.node("Concat", columns, f"{name}/floats", axis=-1)


@dataclass(frozen=True)
class Product:
    """x (..., columns) by a compressed weight, as found in a graph.

    The weight is (codes - 7.5) * scale for codes of 4 bits, else codes * scale.
    """

    x: str
    output: str
    bits: int
    codes: npt.NDArray[np.integer[Any]]  # (rows, columns)
    scale: Floats  # (rows, groups)
    replaced: tuple[str, ...]  # outputs of the pattern's nodes, that no other node reads


def products(graph: onnx.GraphProto) -> list[Product]:
    """The products by compressed weights in a graph."""
    made = {name: node for node in graph.node for name in node.output}
    stored = {tensor.name: tensor for tensor in graph.initializer}
    readers = Counter(name for node in graph.node for name in node.input)
    found = (
        _product(node, made, stored, readers) for node in graph.node if node.op_type == "MatMul"
    )
    return [product for product in found if product is not None]


def _product(
    matmul: NodeProto,
    made: Mapping[str, NodeProto],
    stored: Mapping[str, TensorProto],
    readers: Mapping[str, int],
) -> Product | None:
    """The product whose last node this is, if the pattern leads to it."""
    kinds = ("Transpose", "Reshape", "Mul", "Sub", "Cast")
    chain: dict[str, NodeProto] = {}
    name = matmul.input[1]
    for kind in kinds:
        node = made.get(name)
        if node is not None and node.op_type == kind and readers[name] == 1:
            chain[kind], name = node, node.input[0]
    tensor = _constant(name, made, stored)
    if tensor is None or not {"Transpose", "Mul", "Cast"} <= chain.keys():
        return None
    bits = WIDTHS.get(tensor.data_type)
    scale = _constant(chain["Mul"].input[1], made, stored)
    if bits is None or scale is None or (bits == 4) != _centred(chain.get("Sub"), made, stored):
        return None
    rows = tensor.dims[0]
    codes = numpy_helper.to_array(tensor).astype(np.uint8 if bits == 4 else np.int8)
    outputs = [node.output[0] for node in chain.values()]
    replaced = (*outputs, name) if name in made else tuple(outputs)
    scales = numpy_helper.to_array(scale).reshape(rows, -1)
    return Product(
        matmul.input[0], matmul.output[0], bits, codes.reshape(rows, -1), scales, replaced
    )


def _centred(
    sub: NodeProto | None, made: Mapping[str, NodeProto], stored: Mapping[str, TensorProto]
) -> bool:
    """Whether a node takes the middle of the codes from them."""
    tensor = None if sub is None else _constant(sub.input[1], made, stored)
    return tensor is not None and bool(np.all(numpy_helper.to_array(tensor) == MIDDLE))


def _constant(
    name: str, made: Mapping[str, NodeProto], stored: Mapping[str, TensorProto]
) -> TensorProto | None:
    node = made.get(name)
    if node is not None and node.op_type == "Constant":
        value: TensorProto = helper.get_node_attr_value(node, "value")
        return value
    return stored.get(name)
