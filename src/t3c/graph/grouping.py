"""Linear layers that read one tensor, as one product: which can, and what they stand for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from t3c.artifact.devices import Group
from t3c.artifact.manifest import ELASTIC_DOMAIN, LayerEntry, elastic_kind, elastic_layer
from t3c.errors import CorruptError
from t3c.graph.builder import Member, Stage, fit_one_product

Constants = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Plan:
    """Groups by the output of the node in whose place they run, and all outputs they take over."""

    groups: Mapping[str, Sequence[Member]]
    replaced: frozenset[str]


def candidate_groups(
    graph: onnx.GraphProto, entries: Mapping[str, LayerEntry]
) -> tuple[Group, ...]:
    """The linear layers that read the same tensor and run once, in the order of the graph."""
    nodes = [node for node in graph.node if node.domain == ELASTIC_DOMAIN]
    uses = Counter(elastic_layer(node) for node in nodes)
    readers: dict[str, list[str]] = {}
    for node in nodes:
        layer = elastic_layer(node)
        if layer not in entries:
            raise CorruptError(f"the graph names an unknown layer {layer!r}")
        spec = entries[layer].spec
        if elastic_kind(node, spec) == "linear" and uses[layer] == spec.runs == 1:
            readers.setdefault(node.input[0], []).append(layer)
    return tuple(tuple(layers) for layers in readers.values() if len(layers) > 1)


def plan_groups(
    graph: onnx.GraphProto,
    entries: Mapping[str, LayerEntry],
    constants: Constants,
    stages_of: Callable[[str], Sequence[Stage]],
    wanted: Collection[Group],
) -> Plan:
    """Those of the wanted groups that fit one product; the layers of others are left alone."""
    possible = candidate_groups(graph, entries) if wanted else ()
    nodes = {elastic_layer(n): n for n in graph.node if n.domain == ELASTIC_DOMAIN}
    groups: dict[str, Sequence[Member]] = {}
    replaced: set[str] = set()
    for group in wanted:
        for layer in group:
            if layer not in entries:
                raise CorruptError(f"a group names an unknown layer {layer!r}: calibrate again")
        named = next((layers for layers in possible if set(group) <= set(layers)), ())
        uses = [nodes[layer] for layer in named if layer in group]
        if len(uses) < 2 or any(node.output[0] in replaced for node in uses):
            continue
        members = [_member(graph, n, stages_of(elastic_layer(n)), constants) for n in uses]
        if fit_one_product(members, constants):
            groups[uses[0].output[0]] = members
            replaced |= {node.output[0] for node in uses} | {m.output for m in members}
    return Plan(groups, frozenset(replaced))


def _member(
    graph: onnx.GraphProto, node: onnx.NodeProto, stages: Sequence[Stage], constants: Constants
) -> Member:
    """A layer with its bias, also one that the only node behind it adds."""
    output = node.output[0]
    if len(node.input) > 1:
        return Member(node.name, stages, node.input[1], output)
    readers = [reader for reader in graph.node if output in reader.input]
    if len(readers) == 1 and readers[0].op_type == "Add" and not _leaves(graph, output):
        (bias,) = [name for name in readers[0].input if name != output] or [""]
        if bias in constants and constants[bias].shape == stages[-1][1].shape[:1]:
            return Member(node.name, stages, bias, readers[0].output[0])
    return Member(node.name, stages, None, output)


def _leaves(graph: onnx.GraphProto, tensor: str) -> bool:
    return any(value.name == tensor for value in graph.output)
