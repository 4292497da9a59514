"""From the topology and a profile's weights to the graph an engine runs: ONNX, QDQ, int8."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from t3c.artifact.devices import Group
from t3c.artifact.manifest import ELASTIC_DOMAIN, elastic_kind, elastic_layer
from t3c.artifact.reader import Artifact
from t3c.errors import CorruptError, SpecError
from t3c.runtime.builder import (
    Builder,
    Member,
    Ranges,
    Stage,
    activation_grid,
    execution_stages,
    fit_one_product,
    quantize_rows,
)
from t3c.runtime.grouping import candidate_groups, plan_groups
from t3c.spec import MAX_BITS, Form, Kind, LayerPoint, LayerSpec, Profile

__all__ = [
    "Builder",
    "Group",
    "activation_grid",
    "assemble",
    "candidate_groups",
    "example_input",
    "example_shape",
    "execution_stages",
    "quantize_rows",
    "quantized_inputs",
    "synthetic_group",
    "synthetic_layer",
]


def assemble(
    artifact: Artifact,
    profile: Profile,
    forms: Mapping[str, Form],
    ranges: Ranges | None,
    weight_bits: int = MAX_BITS,
    grouped: Collection[Group] = (),
) -> onnx.ModelProto:
    """The engine graph of a profile; without ranges its activations stay float.

    The layers of a group run as one product where their forms allow it, else one by one.
    """
    graph, entries = artifact.graph().graph, artifact.entries
    builder = Builder(ranges)
    model_inputs = _add_constants(builder, artifact, graph)

    def stages_of(layer: str) -> list[Stage]:
        stored = artifact.stages(layer, profile.points[layer])
        return execution_stages(stored, forms[layer], weight_bits, exact=ranges is None)

    plan = plan_groups(graph, entries, builder.constants, stages_of, grouped)
    rounded: dict[str, str] = {}
    feeds = set(quantized_inputs(graph, artifact.manifest.specs))
    for value in model_inputs:
        if value.name in feeds:
            rounded[value.name] = builder.quantized(value.name)
    for node in graph.node:
        inputs = [rounded.get(name, name) for name in node.input]
        made = list(node.output)
        if node.output[0] in plan.groups:
            members = plan.groups[node.output[0]]
            builder.group(members, inputs[0])
            made = [member.output for member in members]
        elif node.output[0] in plan.replaced:
            continue
        elif node.domain == ELASTIC_DOMAIN:
            layer = elastic_layer(node)
            spec = entries[layer].spec
            bias = inputs[1] if len(inputs) > 1 else None
            kind = elastic_kind(node, spec)
            builder.layer(node.name, kind, spec, stages_of(layer), inputs[0], bias, made[0])
        else:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.input[:] = inputs
            builder.nodes.append(copy)
        for name in made:
            if name in feeds:
                rounded[name] = builder.quantized(name)
    return builder.model(model_inputs, graph.output)


def _add_constants(
    builder: Builder, artifact: Artifact, graph: onnx.GraphProto
) -> list[onnx.ValueInfoProto]:
    """Give a builder the tensors that are not elastic; what is left are the model's inputs."""
    for initializer in graph.initializer:
        if initializer.data_location == TensorProto.EXTERNAL:
            raise CorruptError(f"{artifact.path}: {initializer.name!r} lies outside of the graph")
        builder.constant(initializer.name, numpy_helper.to_array(initializer))
    dense = artifact.dense()
    used = {name for node in graph.node for name in node.input}
    for name, value in dense.items():
        if name in used:
            builder.constant(name, value)
    return [value for value in graph.input if value.name not in dense]


def quantized_inputs(graph: onnx.GraphProto, specs: Mapping[str, LayerSpec]) -> list[str]:
    """The tensors that elastic layers multiply by their weights."""
    names = []
    for node in graph.node:
        if node.domain != ELASTIC_DOMAIN:
            continue
        if elastic_layer(node) not in specs:
            raise CorruptError(f"the graph names an unknown layer {elastic_layer(node)!r}")
        if elastic_kind(node, specs[elastic_layer(node)]) != "embedding":
            names.append(node.input[0])
    return names


def synthetic_layer(
    spec: LayerSpec, point: LayerPoint, form: Form, seed: int = 0, *, to_float: bool = False
) -> onnx.ModelProto:
    """A graph of one layer alone, with random weights: for timing it.

    Its output is rounded to 8 bits, as where another layer follows, or stays float.
    """
    inner = [f"{spec.name}/stage{index}" for index in range(3)]
    builder = Builder(dict.fromkeys(["x", "y", *inner], (-1, 1)))
    stages = _random_stages(spec, point, form, np.random.default_rng(seed))
    kind = "conv" if spec.convolution else str(spec.kind)
    table = spec.kind is Kind.EMBEDDING
    bias = builder.constant("bias", np.zeros(spec.out_channels, dtype=np.float32))
    x = "x" if table else builder.quantized("x")
    builder.layer(spec.name, kind, spec, stages, x, None if table else bias, "y")
    out = "y" if to_float else builder.quantized("y")
    into, outof = example_shape(spec)
    return builder.model(
        [
            helper.make_tensor_value_info(
                "x", TensorProto.INT64 if table else TensorProto.FLOAT, into
            )
        ],
        [helper.make_tensor_value_info(out, TensorProto.FLOAT, outof)],
    )


def synthetic_group(
    specs: Sequence[LayerSpec],
    points: Sequence[LayerPoint],
    form: Form,
    grouped: bool,
    seed: int = 0,
) -> onnx.ModelProto:
    """Linear layers on one input, with random weights, as one product or one by one: for timing.

    Outputs stay float, as those of projections do: what follows them is no product by a weight.
    """
    rng = np.random.default_rng(seed)
    inner = [f"{spec.name}/stage0" for spec in specs]
    builder = Builder(dict.fromkeys(["x", *inner], (-1, 1)))
    members = [
        Member(
            spec.name, _random_stages(spec, point, form, rng),
            builder.constant(f"{spec.name}/bias", np.zeros(spec.out_channels, dtype=np.float32)),
            f"{spec.name}/y",
        )
        for spec, point in zip(specs, points, strict=True)
    ]  # fmt: skip
    x = builder.quantized("x")
    if not grouped:
        for spec, m in zip(specs, members, strict=True):
            builder.layer(m.name, "linear", spec, m.stages, x, m.bias, m.output)
    elif fit_one_product(members, builder.constants):
        builder.group(members, x)
    else:
        names = ", ".join(spec.name for spec in specs)
        raise SpecError(f"{names}: not all {form} at these points: time them separately")
    shapes = [example_shape(spec) for spec in specs]
    return builder.model(
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shapes[0][0])],
        [
            helper.make_tensor_value_info(member.output, TensorProto.FLOAT, outof)
            for member, (_, outof) in zip(members, shapes, strict=True)
        ],
    )


def _random_stages(
    spec: LayerSpec, point: LayerPoint, form: Form, rng: np.random.Generator
) -> list[Stage]:
    return [
        (rng.integers(-127, 128, shape, dtype=np.int8), np.full(shape[0], 1e-3, dtype=np.float32))
        for shape in spec.executed_shapes(point, form)
    ]


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
