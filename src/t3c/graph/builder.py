"""The nodes and constants of engine graphs: QDQ, int8, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from t3c.artifact.manifest import OPSET
from t3c.artifact.store import Floats
from t3c.errors import CorruptError, SpecError
from t3c.graph.int4 import Activations, decompressed, fits_table, group_size, table_rows
from t3c.quant.grid import activation_grid
from t3c.spec import MAX_BITS, Form, LayerSpec

IR_VERSION = 10
LARGEST = 1e30  # weight

Weight = npt.NDArray[np.int8] | Floats
Stage = tuple[Weight, Floats]
Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Member:
    """A linear layer of a group that reads one tensor; `bias` names a constant."""

    name: str
    stages: Sequence[Stage]
    bias: str | None
    output: str


class Builder:
    """Collects nodes and constants; quantizes tensors for which a range is known.

    With float activations nothing is quantized but weights; views of at most 4 bits run so if
    `four_bits` says so, else as 8-bit codes of the same numbers.
    """

    def __init__(
        self, ranges: Ranges | None, activations: Activations = "int8", *, four_bits: bool = True
    ) -> None:
        self.ranges = None if activations == "float" else ranges
        self.weight_only = activations == "float"
        self.four_bits = self.weight_only and four_bits
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, npt.NDArray[np.generic]] = {}
        self.codes: dict[str, tuple[str, list[str]]] = {}  # and the grid, by the rounded tensor

    def node(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, list(inputs), [output], output, **attributes))
        return output

    def constant(self, name: str, value: npt.NDArray[np.generic]) -> str:
        self.constants[name] = value
        return name

    def quantized(self, tensor: str, grid_of: str | None = None) -> str:
        """The tensor rounded to 8 bits; as it is where activations are float.

        Its grid is its own, or that of the tensor `grid_of`.
        """
        if self.ranges is None:
            return tensor
        grid = grid_of or tensor
        if grid not in self.ranges:
            raise CorruptError(f"no activation range for {grid!r}")
        scale, zero = activation_grid(*self.ranges[grid])
        args = [self.constant(f"{grid}/scale", scale), self.constant(f"{grid}/zero", zero)]
        codes = self.node("QuantizeLinear", [tensor, *args], f"{tensor}/codes")
        rounded = self.node("DequantizeLinear", [codes, *args], f"{tensor}/rounded")
        self.codes[rounded] = codes, args
        return rounded

    def layer(
        self, name: str, kind: str, spec: LayerSpec, stages: Sequence[Stage], x: str,
        bias: str | None, output: str, kept: npt.NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        """The nodes of one use of a layer; `x` is quantized already, or the ids of a table.

        Of an aligned one, `kept` are the columns of `x` that are not multiplied at first.
        """
        if kind == "embedding":
            self._gather(name, stages[0], x, output)
            return
        if kept is not None:
            self._aligned(name, stages, x, bias, output, kept)
            return
        factored = len(stages) > 1
        strided = spec.strided_stage() if factored else 0
        groups = spec.stage_groups(stages[0][0].shape[0]) if factored else (spec.groups,)
        for index, stage in enumerate(stages):
            last = index == len(stages) - 1
            inner = f"{name}/stage{index}"
            out = output if last else inner
            added = bias if last else None
            if kind == "linear":
                self._matmul(inner, stage, x, added, out)
            else:
                geometry = spec if index == strided else None
                self._conv(inner, stage, x, added, out, groups[index], geometry)
            x = out if last else self.quantized(out)

    def group(self, members: Sequence[Member], x: str) -> None:
        """The nodes of linear layers on one input: their first stages are one product, split."""
        name = f"{members[0].name}/grouped"
        first = [member.stages[0] for member in members]
        sizes = np.array([len(scale) for _, scale in first], dtype=np.int64)
        stage = np.concatenate([w for w, _ in first]), np.concatenate([s for _, s in first])
        factored = len(members[0].stages) > 1
        bias = None if factored else self._joined_bias(name, members, sizes)
        self._matmul(name, stage, x, bias, f"{name}/outputs")
        outputs = [f"{m.name}/stage0" if factored else m.output for m in members]
        pieces = [f"{name}/outputs", self.constant(f"{name}/sizes", sizes)]
        self.nodes.append(helper.make_node("Split", pieces, outputs, f"{name}/split", axis=-1))
        if factored:
            for m, inner in zip(members, outputs, strict=True):
                self._matmul(
                    f"{m.name}/stage1", m.stages[1], self.quantized(inner), m.bias, m.output
                )

    def _joined_bias(
        self, name: str, members: Sequence[Member], sizes: npt.NDArray[np.int64]
    ) -> str | None:
        if all(member.bias is None for member in members):
            return None
        parts = [
            np.zeros(size, dtype=np.float32) if member.bias is None else self.constants[member.bias]
            for member, size in zip(members, sizes, strict=True)
        ]
        return self.constant(f"{name}/bias", np.concatenate(parts))

    def _gather(self, name: str, stage: Stage, ids: str, output: str) -> None:
        """Rows of a table of int8, or of two codes in a byte, each times its scale."""
        table, scale = stage
        if self.four_bits and fits_table(table):
            floats = table_rows(self, name, table, ids)
        else:
            codes = self.constant(f"{name}/table", table)
            rows = self.node("Gather", [codes, ids], f"{name}/rows", axis=0)
            floats = self.node("Cast", [rows], f"{name}/floats", to=TensorProto.FLOAT)
        given = self.constant(f"{name}/table_scale", scale.reshape(len(scale), -1))
        scales = self.node("Gather", [given, ids], f"{name}/scales", axis=0)
        if scale.ndim == 2:
            group = np.arange(table.shape[1]) // group_size(table, scale)
            column = self.constant(f"{name}/group", group)
            scales = self.node("Gather", [scales, column], f"{name}/column_scales", axis=-1)
        self.node("Mul", [floats, scales], output)

    def _aligned(
        self, name: str, stages: Sequence[Stage], x: str, bias: str | None, output: str,
        kept: npt.NDArray[np.int64],
    ) -> None:  # fmt: skip
        """x_kept + rest x_others, rounded, by expand. Codes are put in order, a byte each."""
        rest, expand = stages
        sizes = np.array([len(kept), rest[0].shape[1]], dtype=np.int64)
        others = np.setdiff1d(np.arange(sizes.sum()), kept)
        order = self.constant(f"{name}/order", np.concatenate([kept, others]))
        codes, grid = self.codes.get(x, (x, []))
        ordered = self.node("Gather", [codes, order], f"{name}/ordered", axis=-1)
        pieces = [f"{name}/kept", f"{name}/others"]
        inputs = [ordered, self.constant(f"{name}/sizes", sizes)]
        self.nodes.append(helper.make_node("Split", inputs, pieces, f"{name}/split", axis=-1))
        if grid:
            pieces = [
                self.node("DequantizeLinear", [piece, *grid], f"{piece}_rounded")
                for piece in pieces
            ]
        self._matmul(f"{name}/rest", rest, pieces[1], None, f"{name}/made")
        inner = self.node("Add", [pieces[0], f"{name}/made"], f"{name}/aligned")
        self._matmul(f"{name}/stage1", expand, self.quantized(inner), bias, output)

    def _matmul(self, name: str, stage: Stage, x: str, bias: str | None, output: str) -> None:
        stored = stage[0].dtype == np.int8
        if stored and (self.weight_only or stage[1].ndim == 2):
            weight = decompressed(self, name, *stage, four_bits=self.four_bits)
        else:
            weight = self._weight(name, stage[0].T, stage[1], axis=1)
        if bias is None:
            self.node("MatMul", [x, weight], output)
        else:
            product = self.node("MatMul", [x, weight], f"{name}/product")
            self.node("Add", [product, bias], output)

    def _conv(
        self, name: str, stage: Stage, x: str, bias: str | None, output: str, groups: int,
        geometry: LayerSpec | None,
    ) -> None:  # fmt: skip
        """A convolution; without a geometry it is one of single points."""
        weight = self._weight(name, stage[0], stage[1], axis=0)
        kernel, given = list(stage[0].shape[2:]), dict[str, Any]()
        if geometry is not None:
            given = {
                "strides": list(geometry.stride), "pads": list(geometry.padding) * 2,
                "dilations": list(geometry.dilation), "group": groups,
            }  # fmt: skip
            points = kernel == [1, 1] and not any(geometry.padding)
            if points and max(geometry.stride) > 1 and x in self.codes:
                x, given["strides"] = self._stepped(x, geometry.stride), [1] * len(kernel)
        inputs = [x, weight] if bias is None else [x, weight, bias]
        self.node("Conv", inputs, output, kernel_shape=kernel, **given)

    def _stepped(self, x: str, stride: Sequence[int]) -> str:
        """Return points of a rounded tensor that a strided 1x1 convolution reads, still rounded.

        OpenVINO takes such a stride before the convolution itself, but in float, and what reads
        it then runs in float too. Between two roundings on one grid it is taken in 8 bits.
        """
        grid = self.codes[x][1]
        taken = f"{x}/stride{'x'.join(map(str, stride))}"
        if taken not in self.codes:
            points = self.node(
                "MaxPool", [x], f"{taken}/points", kernel_shape=[1] * len(stride),
                strides=list(stride),
            )  # fmt: skip
            codes = self.node("QuantizeLinear", [points, *grid], f"{taken}/codes")
            self.node("DequantizeLinear", [codes, *grid], taken)
            self.codes[taken] = codes, grid
        return taken

    def _weight(self, name: str, integers: Weight, scale: Floats, axis: int) -> str:
        if scale.ndim > 1:
            raise SpecError(f"{name}: only linear layers and tables take scales of groups")
        if integers.dtype == np.float32:
            return self.constant(f"{name}/weight_float", np.ascontiguousarray(integers))
        codes = self.constant(f"{name}/weight", np.ascontiguousarray(integers))
        args = [codes, self.constant(f"{name}/weight_scale", scale)]
        return self.node("DequantizeLinear", args, f"{name}/weight_float", axis=axis)

    def model(
        self,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
    ) -> onnx.ModelProto:
        used = {name for node in self.nodes for name in node.input} | {o.name for o in outputs}
        constants = [numpy_helper.from_array(v, n) for n, v in self.constants.items() if n in used]
        graph = helper.make_graph(self.nodes, "t3c", list(inputs), list(outputs), constants)
        opset = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION)


def fit_one_product(
    members: Sequence[Member], constants: Mapping[str, npt.NDArray[np.generic]]
) -> bool:
    """Whether members have as many stages as each other, weights of one type, known biases."""
    kinds = {(len(m.stages), m.stages[0][0].dtype, m.stages[0][1].shape[1:]) for m in members}
    biases = [(m.bias, m.stages[-1][1].shape[:1]) for m in members if m.bias is not None]
    return len(kinds) == 1 and all(n in constants and constants[n].shape == s for n, s in biases)


def execution_stages(
    stored: Sequence[Stage], form: Form, weight_bits: int, *, exact: bool = False
) -> list[Stage]:
    """The stages an engine multiplies by: as stored, or recomposed to one dense weight.

    A recomposed weight is rounded to int8 again; `exact` leaves it in float, for reference.
    """
    if form is Form.DENSE and len(stored) > 1:
        weights = [stage[0].astype(np.float64) * _spread(stage) for stage in stored]
        whole = reduce(_compose, weights)
        if not np.abs(whole).max() < LARGEST:
            raise CorruptError("the scales of a layer make weights too large for float32")
        dense = whole.astype(np.float32)
        if exact:
            return [(dense, np.ones(len(dense), dtype=np.float32))]
        stored = [quantize_rows(dense)]
    return [_fitting(stage, weight_bits) for stage in stored]


def narrow_stages(stored: Sequence[Stage], weight_bits: int, *, exact: bool = False) -> list[Stage]:
    """The one stage of a narrowed layer: its leading weight, with the correction added to it.

    With one it is rounded to int8 again; `exact` leaves it in float, for reference.
    """
    if len(stored) == 1:
        return [_fitting(stored[0], weight_bits)]
    corner, *correction = (dequantized(stage) for stage in stored)
    dense = (corner + reduce(_compose, correction)).astype(np.float32)
    if not np.abs(dense).max() < LARGEST:
        raise CorruptError("the scales of a layer make weights too large for float32")
    if exact:
        return [(dense, np.ones(len(dense), dtype=np.float32))]
    return [_fitting(quantize_rows(dense), weight_bits)]


def _fitting(stage: Stage, weight_bits: int) -> Stage:
    """A stage whose integers fit `weight_bits`, with a coarser grid if it takes one."""
    weight, scale = stage
    if weight_bits == MAX_BITS or int(np.abs(weight.astype(np.int16)).max()) <= 64:
        return stage
    return np.rint(weight / 2).astype(np.int8), scale * np.float32(2)


def quantize_rows(weight: Floats) -> Stage:
    """int8 and a scale per row of a float weight."""
    scale = (np.abs(weight).reshape(len(weight), -1).max(axis=1) / 127).astype(np.float32)
    scale = np.maximum(scale, np.float32(1e-12))
    return np.rint(weight / _rows(scale, weight.ndim)).astype(np.int8), scale


def dequantized(stage: Stage) -> npt.NDArray[np.float64]:
    """The weight that a stage stands for."""
    return np.asarray(stage[0].astype(np.float64) * _spread(stage))


def _spread(stage: Stage) -> Floats:
    """The scales of a stage in a shape that its weight can be multiplied by."""
    weight, scale = stage
    if scale.ndim == 1:
        return _rows(scale, weight.ndim)
    return np.repeat(scale, group_size(weight, scale), axis=1)


def _rows(scale: Floats, ndim: int) -> Floats:
    return scale.reshape(-1, *([1] * (ndim - 1)))


def _compose(
    before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    if after.shape[1] != before.shape[0]:  # depthwise
        return np.asarray(after * before)
    if np.prod(after.shape[2:]) == 1:
        rows = after.reshape(after.shape[:2])
        return np.asarray(np.tensordot(rows, before, axes=1))
    columns = before.reshape(before.shape[:2])
    return np.asarray(np.einsum("ma...,an->mn...", after, columns, optimize=True))
