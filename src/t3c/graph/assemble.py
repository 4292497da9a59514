"""From the topology and a profile's weights to the graph an engine runs: ONNX, QDQ, int8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from functools import lru_cache

import onnx
from onnx import TensorProto, numpy_helper

from t3c.artifact.devices import Group
from t3c.artifact.manifest import ELASTIC_DOMAIN, elastic_kind, elastic_layer
from t3c.artifact.reader import Artifact
from t3c.artifact.store import Tensors
from t3c.errors import CorruptError
from t3c.graph.aligning import Execution, execution
from t3c.graph.builder import (
    Builder,
    Ranges,
    execution_stages,
    quantize_rows,
)
from t3c.graph.grouping import candidate_groups, plan_groups
from t3c.graph.int4 import Activations
from t3c.graph.narrow import Narrowed, narrowed
from t3c.measure.processor import cache_bytes
from t3c.spec import MAX_BITS, Factorization, Form, LayerSpec, Profile

__all__ = [
    "PASSING",
    "Builder",
    "Group",
    "assemble",
    "candidate_groups",
    "execution_stages",
    "pooled_inputs",
    "quantize_rows",
    "quantized_inputs",
    "rounded_tensors",
    "summed_inputs",
]

PASSING = ("Relu", "Clip", "Identity")  # operations that engines run at the end of a layer


def assemble(
    artifact: Artifact,
    profile: Profile,
    forms: Mapping[str, Form],
    ranges: Ranges | None,
    weight_bits: int = MAX_BITS,
    grouped: Collection[Group] = (),
    activations: Activations | None = None,
    few: bool | None = None,
) -> onnx.ModelProto:
    """The engine graph of a profile; with neither ranges nor activations, the exact reference.

    Activations are by default as the artifact has them. Float ones need no ranges, and weights of
    any bits: only they are compressed. The layers of a group run as one product where their forms
    allow it, else one by one. `few` says whether views of at most 4 bits run in kernels of their
    own on float activations: faster to read and slower to unpack, they do where that was not timed
    and the caches do not hold the model.
    """
    topology, entries = artifact.graph().graph, artifact.entries
    exact = ranges is None and activations != "float"
    weight_only = artifact.weight_only and not exact
    if few is None:
        few = artifact.manifest.model.parameters > cache_bytes()
    builder = Builder(ranges, activations or ("float" if weight_only else "int8"), four_bits=few)
    bits = MAX_BITS if builder.weight_only else weight_bits
    dense = artifact.dense(profile.name)
    model_inputs = _add_constants(builder, artifact, topology, dense)
    graph = topology
    widths = narrowed_layers(artifact.manifest.specs, profile)
    if widths:
        specs = artifact.manifest.specs
        graph, builder.constants = narrowed(topology, builder.constants, widths, specs)

    @lru_cache(maxsize=8)  # a block of layers may be used again and again
    def executed(layer: str) -> Execution:
        stored, spec = artifact.weights(profile, layer), entries[layer].spec
        return execution(dense, spec, stored, forms[layer], bits, exact=exact)

    plan = plan_groups(
        graph, entries, builder.constants, lambda layer: executed(layer).stages,
        [group for group in grouped if Form.ALIGNED not in map(forms.get, group)],
    )  # fmt: skip
    rounded: dict[str, str] = {}
    feeds = rounded_tensors(artifact, graph)
    pooled = pooled_inputs(graph, feeds)
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
            spec = entries[layer].spec.narrowed(profile.points[layer].rank)
            bias = inputs[1] if len(inputs) > 1 else None
            kind, run = elastic_kind(node, spec), executed(layer)
            builder.layer(
                node.name, kind, spec, run.stages, inputs[0], bias, made[0], run.kept
            )  # fmt: skip
        else:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.input[:] = inputs
            builder.nodes.append(copy)
        for name in made:
            if name in feeds:
                rounded[name] = builder.quantized(name)
            elif name in pooled:
                rounded[name] = builder.quantized(name, pooled[name])
    return builder.model(model_inputs, graph.output)


def narrowed_layers(specs: Mapping[str, LayerSpec], profile: Profile) -> dict[str, Narrowed]:
    """Return what the layers keep that a profile has below full width."""
    found = {}
    for name, spec in specs.items():
        rank = profile.points[name].rank
        if spec.narrows and rank < spec.full_rank:
            kept = rank, spec.full_rank
            inputs = spec.factorization is not Factorization.ROWS
            found[name] = Narrowed(kept if spec.cuts_outputs else None, kept if inputs else None)
    return found


def _add_constants(
    builder: Builder, artifact: Artifact, graph: onnx.GraphProto, dense: Tensors
) -> list[onnx.ValueInfoProto]:
    """Give a builder the tensors that are not elastic; what is left are the model's inputs."""
    for initializer in graph.initializer:
        if initializer.data_location == TensorProto.EXTERNAL:
            raise CorruptError(f"{artifact.path}: {initializer.name!r} lies outside of the graph")
        builder.constant(initializer.name, numpy_helper.to_array(initializer))
    used = {name for node in graph.node for name in node.input}
    for name, value in dense.items():
        if name in used:
            builder.constant(name, value)
    inputs = [value for value in graph.input if value.name not in dense]
    model = artifact.manifest.model
    wanted = [*(entry.name for entry in model.inputs), *(state.input for state in model.states)]
    if [value.name for value in inputs] != wanted:
        given = ", ".join(value.name for value in inputs)
        raise CorruptError(f"{artifact.path}: its graph takes {given}, not {', '.join(wanted)}")
    return inputs


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


def rounded_tensors(artifact: Artifact, graph: onnx.GraphProto) -> set[str]:
    """The tensors that an artifact rounds: what layers multiply, and summands it has ranges of."""
    feeds = set(quantized_inputs(graph, artifact.manifest.specs))
    return feeds | (summed_inputs(graph, feeds) & set(artifact.manifest.model.quantized))


def summed_inputs(graph: onnx.GraphProto, feeds: Collection[str]) -> set[str]:
    """Outputs of layers that nothing reads but a sum, all of which is rounded and `feeds` a layer.

    Rounded themselves, they are added up in 8 bits, in the kernel of the layer that ends there;
    otherwise they are written and read in float.
    """
    readers = _readers(graph)
    makers = {name: node for node in graph.node for name in node.output}
    followed = {node.input[0]: node.output[0] for node in graph.node if node.op_type in PASSING}

    def ends(tensor: str) -> bool:
        return tensor in feeds or (readers[tensor] == 1 and followed.get(tensor) in feeds)

    def summand(tensor: str) -> bool:
        made = makers.get(tensor)
        return made is not None and made.domain == ELASTIC_DOMAIN and readers[tensor] == 1

    found: set[str] = set()
    for node in graph.node:
        if node.op_type == "Add" and ends(node.output[0]):
            layers = {name for name in node.input if summand(name)}
            if all(name in layers or name in feeds for name in node.input):
                found |= layers
    return found


def _readers(graph: onnx.GraphProto) -> Counter[str]:
    """How often each tensor is read, the graph's outputs by the user."""
    readers = Counter(name for node in graph.node for name in node.input)
    readers.update(value.name for value in graph.output)
    return readers


def pooled_inputs(graph: onnx.GraphProto, feeds: Collection[str]) -> dict[str, str]:
    """Tensors that nothing but a maximum over windows reads, whose output `feeds` a layer.

    Rounding keeps order, so the maximum of rounded values is the rounded maximum: rounded before
    it already, what is pooled is written and read in 8 bits.
    """
    readers = _readers(graph)
    return {
        node.input[0]: node.output[0]
        for node in graph.node
        if node.op_type == "MaxPool" and node.output[0] in feeds and readers[node.input[0]] == 1
    }
