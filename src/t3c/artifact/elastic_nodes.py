"""Turn the nodes that use a weight into elastic ones, and fold batch norms into them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from t3c.artifact.manifest import ELASTIC_DOMAIN, elastic_layer
from t3c.errors import ConvertError

Floats = npt.NDArray[np.float32]


def make_elastic(graph: onnx.GraphProto, weight: str, layer: str) -> None:
    """Replace the nodes that use a weight by elastic nodes of its layer, one for each use.

    There are none where a layer runs but the output does not depend on it, such as a pooler's.
    """
    users = [(node, weight) for node in graph.node if weight in node.input]
    for turned in [node for node, _ in users if node.op_type == "Transpose"]:
        users = [(node, name) for node, name in users if node is not turned]
        users += [(n, turned.output[0]) for n in graph.node if turned.output[0] in n.input]
        graph.node.remove(turned)
    order = {id(node): index for index, node in enumerate(graph.node)}
    users.sort(key=lambda user: order[id(user[0])])
    for index, (node, name) in enumerate(users):
        kind = _kind_of(node, turned=name != weight)
        if kind is None:
            raise ConvertError(f"layer {layer!r}: {node.op_type} cannot be made elastic")
        inputs = [value for value in node.input if value != name]
        label = layer if index == 0 else f"{layer}#{index + 1}"
        node.CopyFrom(
            helper.make_node(
                "Elastic", inputs, list(node.output), label, domain=ELASTIC_DOMAIN, layer=layer,
                kind=kind,
            )
        )  # fmt: skip


def _kind_of(node: onnx.NodeProto, *, turned: bool) -> str | None:
    """Return what a node that uses a weight, or the weight turned, computes; None if nothing."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Conv" and not turned:
        return "conv"
    if node.op_type == "Gather" and not turned and not attributes.get("axis"):
        return "embedding"
    gemm = node.op_type == "Gemm" and attributes.get("transB", 0) == int(not turned)
    if (node.op_type == "MatMul" and turned) or (gemm and not attributes.get("transA")):
        return "linear"
    return None


def fold_norms(graph: onnx.GraphProto, constants: dict[str, Floats]) -> dict[str, Floats]:
    """Fold each batch norm that is alone behind an elastic layer into it: a factor and a bias."""
    uses: dict[str, int] = {}
    for node in graph.node:
        for name in node.input:
            uses[name] = uses.get(name, 0) + 1
    makers = {name: node for node in graph.node for name in node.output}
    layers = [elastic_layer(node) for node in graph.node if node.domain == ELASTIC_DOMAIN]
    folded = {}
    for norm in [node for node in graph.node if node.op_type == "BatchNormalization"]:
        layer = makers.get(norm.input[0])
        if layer is None or layer.domain != ELASTIC_DOMAIN or uses[norm.input[0]] != 1:
            continue
        if layers.count(elastic_layer(layer)) > 1:
            continue  # the weight is not this norm's alone
        gamma, beta, mean, variance = (
            constants[name].astype(np.float64) for name in norm.input[1:5]
        )
        epsilon = next((a.f for a in norm.attribute if a.name == "epsilon"), 1e-5)
        factor = gamma / np.sqrt(variance + epsilon)
        before = constants[layer.input[1]] if len(layer.input) > 1 else 0.0
        constants[f"{layer.name}.bias"] = (beta + (before - mean) * factor).astype(np.float32)
        folded[layer.name] = factor.astype(np.float32)
        del layer.input[1:]
        layer.input.append(f"{layer.name}.bias")
        layer.output[0] = norm.output[0]
        graph.node.remove(norm)
    return folded
