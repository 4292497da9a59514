"""The surroundings of a layer in its graph that decide which kernels run it."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from t3c.artifact.manifest import ELASTIC_DOMAIN, elastic_layer
from t3c.graph.assemble import PASSING, pooled_inputs, quantized_inputs, summed_inputs
from t3c.spec import LayerSpec


def float_outputs(graph: onnx.GraphProto, specs: Mapping[str, LayerSpec]) -> frozenset[str]:
    """The layers of which an output is not rounded to 8 bits again before anything is done to it.

    An engine that wants 8 bits on both sides of an int8 kernel runs these in float.
    """
    feeds = set(quantized_inputs(graph, specs))
    rounded = feeds | pooled_inputs(graph, feeds).keys() | summed_inputs(graph, feeds)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    made = {output for node in graph.node for output in node.output}

    def ends_rounded(tensor: str) -> bool:
        while tensor not in rounded:
            reading = readers.get(tensor, [])
            if len(reading) != 1 or reading[0].domain == ELASTIC_DOMAIN:
                return False
            node = reading[0]
            others = [name for name in node.input if name != tensor and name in made]
            if node.op_type not in PASSING and (node.op_type != "Add" or others):
                return False
            tensor = node.output[0]
        return True

    return frozenset(
        elastic_layer(node)
        for node in graph.node
        if node.domain == ELASTIC_DOMAIN and not ends_rounded(node.output[0])
    )
