"""From the topology and a profile's weights to the graph an engine runs: ONNX, QDQ, int8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from t3c.artifact.manifest import (
    ELASTIC_DOMAIN,
    OPSET,
    LayerEntry,
    elastic_kind,
    elastic_layer,
)
from t3c.artifact.reader import Artifact
from t3c.artifact.store import Floats
from t3c.errors import CorruptError
from t3c.spec import MAX_BITS, Form, Kind, LayerPoint, LayerSpec, Profile

IR_VERSION = 10

Weight = npt.NDArray[np.int8] | Floats
Stage = tuple[Weight, Floats]
Ranges = Mapping[str, tuple[float, float]]


class Builder:
    """Collects nodes and constants; quantizes tensors for which a range is known."""

    def __init__(self, ranges: Ranges | None) -> None:
        self.ranges = ranges
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, npt.NDArray[np.generic]] = {}

    def node(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, list(inputs), [output], output, **attributes))
        return output

    def constant(self, name: str, value: npt.NDArray[np.generic]) -> str:
        self.constants[name] = value
        return name

    def quantized(self, tensor: str) -> str:
        """The tensor rounded to 8 bits; as it is when ranges are not known yet."""
        if self.ranges is None:
            return tensor
        if tensor not in self.ranges:
            raise CorruptError(f"no activation range for {tensor!r}")
        scale, zero = activation_grid(*self.ranges[tensor])
        args = [self.constant(f"{tensor}/scale", scale), self.constant(f"{tensor}/zero", zero)]
        codes = self.node("QuantizeLinear", [tensor, *args], f"{tensor}/codes")
        return self.node("DequantizeLinear", [codes, *args], f"{tensor}/rounded")

    def layer(
        self, name: str, kind: str, spec: LayerSpec, stages: Sequence[Stage], x: str,
        bias: str | None, output: str,
    ) -> None:  # fmt: skip
        """The nodes of one use of a layer; `x` is quantized already, or the ids of a table."""
        if kind == "embedding":
            self._gather(name, stages[0], x, output)
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

    def _gather(self, name: str, stage: Stage, ids: str, output: str) -> None:
        """Rows of a table of int8, each times its scale."""
        table = self.constant(f"{name}/table", stage[0])
        scale = self.constant(f"{name}/table_scale", stage[1][:, None])
        rows = self.node("Gather", [table, ids], f"{name}/rows", axis=0)
        floats = self.node("Cast", [rows], f"{name}/floats", to=TensorProto.FLOAT)
        scales = self.node("Gather", [scale, ids], f"{name}/scales", axis=0)
        self.node("Mul", [floats, scales], output)

    def _matmul(self, name: str, stage: Stage, x: str, bias: str | None, output: str) -> None:
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
        inputs = [x, weight] if bias is None else [x, weight, bias]
        given: dict[str, Any] = {}
        if geometry is not None:
            given = {
                "strides": list(geometry.stride), "pads": list(geometry.padding) * 2,
                "dilations": list(geometry.dilation), "group": groups,
            }  # fmt: skip
        self.node("Conv", inputs, output, kernel_shape=list(stage[0].shape[2:]), **given)

    def _weight(self, name: str, integers: Weight, scale: Floats, axis: int) -> str:
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
        constants = [numpy_helper.from_array(v, n) for n, v in self.constants.items()]
        graph = helper.make_graph(self.nodes, "t3c", list(inputs), list(outputs), constants)
        opset = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION)


def activation_grid(low: float, high: float) -> tuple[Floats, npt.NDArray[np.generic]]:
    """Scale and zero point: unsigned for tensors that are never negative, else symmetric."""
    largest = max(-low, high)
    largest = largest if largest > 1e-6 else 1.0  # a tensor of zeros is exact on any grid
    if low >= 0:
        return np.array(largest / 255, np.float32), np.zeros((), dtype=np.uint8)
    return np.array(largest / 127, np.float32), np.zeros((), dtype=np.int8)


def assemble(
    artifact: Artifact,
    profile: Profile,
    forms: Mapping[str, Form],
    ranges: Ranges | None,
    weight_bits: int = MAX_BITS,
) -> onnx.ModelProto:
    """The engine graph of a profile; without ranges its activations stay float."""
    topology = artifact.graph()
    graph = topology.graph
    builder = Builder(ranges)
    dense = artifact.dense()
    model_inputs = [i for i in graph.input if i.name not in dense]
    for initializer in graph.initializer:
        if initializer.data_location == TensorProto.EXTERNAL:
            raise CorruptError(f"{artifact.path}: {initializer.name!r} lies outside of the graph")
        builder.constant(initializer.name, numpy_helper.to_array(initializer))
    used = {name for node in graph.node for name in node.input}
    for name, value in dense.items():
        if name in used:
            builder.constant(name, value)
    rounded: dict[str, str] = {}
    feeds = set(quantized_inputs(graph, artifact.entries))
    for value in model_inputs:
        if value.name in feeds:
            rounded[value.name] = builder.quantized(value.name)
    for node in graph.node:
        inputs = [rounded.get(name, name) for name in node.input]
        if node.domain == ELASTIC_DOMAIN:
            layer = elastic_layer(node)
            spec = artifact.entries[layer].spec
            stages = execution_stages(
                artifact.stages(layer, profile.points[layer]),
                forms[layer],
                weight_bits,
                exact=ranges is None,
            )
            bias = inputs[1] if len(inputs) > 1 else None
            kind = elastic_kind(node, spec)
            builder.layer(node.name, kind, spec, stages, inputs[0], bias, node.output[0])
        else:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.input[:] = inputs
            builder.nodes.append(copy)
        for name in node.output:
            if name in feeds:
                rounded[name] = builder.quantized(name)
    return builder.model(model_inputs, graph.output)


def quantized_inputs(graph: onnx.GraphProto, entries: Mapping[str, LayerEntry]) -> list[str]:
    """The tensors that elastic layers multiply by their weights."""
    names = []
    for node in graph.node:
        if node.domain != ELASTIC_DOMAIN:
            continue
        if elastic_layer(node) not in entries:
            raise CorruptError(f"the graph names an unknown layer {elastic_layer(node)!r}")
        if elastic_kind(node, entries[elastic_layer(node)].spec) != "embedding":
            names.append(node.input[0])
    return names


def execution_stages(
    stored: Sequence[Stage], form: Form, weight_bits: int, *, exact: bool = False
) -> list[Stage]:
    """The stages an engine multiplies by: as stored, or recomposed to one dense weight.

    A recomposed weight is rounded to int8 again; `exact` leaves it in float, for reference.
    """
    if form is Form.DENSE and len(stored) > 1:
        weights = [w.astype(np.float64) * _rows(s, w.ndim) for w, s in stored]
        dense = reduce(_compose, weights).astype(np.float32)
        if exact:
            return [(dense, np.ones(len(dense), dtype=np.float32))]
        stored = [quantize_rows(dense)]
    return [_narrowed(stage, weight_bits) for stage in stored]


def _narrowed(stage: Stage, weight_bits: int) -> Stage:
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


def synthetic_layer(
    spec: LayerSpec, point: LayerPoint, form: Form, seed: int = 0
) -> onnx.ModelProto:
    """A graph of one layer alone, with random weights: for timing it."""
    rng = np.random.default_rng(seed)
    inner = [f"{spec.name}/stage{index}" for index in range(3)]
    builder = Builder(dict.fromkeys(["x", "y", *inner], (-1, 1)))
    stages: list[Stage] = [
        (rng.integers(-127, 128, shape, dtype=np.int8), np.full(shape[0], 1e-3, dtype=np.float32))
        for shape in spec.executed_shapes(point, form)
    ]
    kind = "conv" if spec.convolution else str(spec.kind)
    table = spec.kind is Kind.EMBEDDING
    bias = builder.constant("bias", np.zeros(spec.out_channels, dtype=np.float32))
    x = "x" if table else builder.quantized("x")
    builder.layer(spec.name, kind, spec, stages, x, None if table else bias, "y")
    out = builder.quantized("y")
    into, outof = example_shape(spec)
    return builder.model(
        [
            helper.make_tensor_value_info(
                "x", TensorProto.INT64 if table else TensorProto.FLOAT, into
            )
        ],
        [helper.make_tensor_value_info(out, TensorProto.FLOAT, outof)],
    )


def example_shape(spec: LayerSpec) -> tuple[list[int], list[int]]:
    """Input and output shapes of one layer at batch 1."""
    if spec.kind is Kind.EMBEDDING:
        return [1, spec.in_positions], [1, spec.out_positions, spec.in_channels]
    if spec.kind is Kind.LINEAR:
        return [1, spec.in_positions, spec.in_channels], [1, spec.out_positions, spec.out_channels]
    return [1, spec.in_channels, *spec.in_size], [1, spec.out_channels, *spec.out_size]


def example_input(spec: LayerSpec, seed: int = 0) -> npt.NDArray[Any]:
    """A random input of one layer at batch 1."""
    rng, shape = np.random.default_rng(seed), example_shape(spec)[0]
    if spec.kind is Kind.EMBEDDING:
        return rng.integers(0, spec.out_channels, shape)
    return rng.normal(size=shape).astype(np.float32)


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
