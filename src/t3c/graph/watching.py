"""Engine graphs that also tell how large their activations are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from t3c.artifact.manifest import ELASTIC_DOMAIN, elastic_layer
from t3c.errors import DataError, SpecError
from t3c.graph.assemble import quantized_inputs
from t3c.spec import LayerSpec

WATCHED = "t3c/watched"
LEAST_SQUARE = 1e-24  # of a tensor of zeros, whose log is none

Floats = npt.NDArray[np.float64]


def monitored_tensors(
    graph: onnx.GraphProto, specs: Mapping[str, LayerSpec], given: Sequence[str], most: int = 8
) -> list[tuple[str, str]]:
    """At most `most` tensors that elastic layers multiply, each with a layer that reads it.

    They are spread evenly over the depth of an artifact's topology, of which `given` are the
    model's inputs and the rest constants; an input comes first.
    """
    if most < 1:
        raise SpecError(f"at least one tensor is monitored, got most={most}")
    made = {name for node in graph.node for name in node.output} | set(given)
    multiplied = set(quantized_inputs(graph, specs)) & made
    readers: dict[str, str] = {}
    for node in graph.node:
        if node.domain == ELASTIC_DOMAIN and node.input[0] in multiplied:
            readers.setdefault(node.input[0], elastic_layer(node))
    ordered = sorted(readers.items(), key=lambda item: item[0] not in given)
    picked = np.linspace(0, len(ordered) - 1, min(most, len(ordered))).round().astype(int)
    return [ordered[index] for index in picked]


def watched(
    model: onnx.ModelProto, tensors: Sequence[str], thresholds: Mapping[str, float]
) -> onnx.ModelProto:
    """A copy of an engine graph with one more output, `t3c/watched` (n, 2 * tensors).

    It holds, of each sample, the mean square of every tensor, then of every tensor the share of
    values whose size is above its threshold. Tensors are float, as they are before rounding.
    """
    copy = _copied(model, tensors)
    missing = [name for name in tensors if name not in thresholds]
    if missing or not tensors:
        raise SpecError(f"no threshold for {missing[0]!r}" if missing else "no tensor to watch")
    graph = copy.graph

    def constant(name: str, value: npt.NDArray[np.generic]) -> str:
        graph.initializer.append(numpy_helper.from_array(value, f"{WATCHED}/{name}"))
        return f"{WATCHED}/{name}"

    def node(kind: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        output = f"{WATCHED}/{name}"
        graph.node.append(helper.make_node(kind, list(inputs), [output], output, **attributes))
        return output

    # Some layers read samples times positions in one axis, so the batch is counted at the input.
    batch = node("Shape", [graph.input[0].name], "batch", start=0, end=1)
    rest = constant("rest", np.array([-1], dtype=np.int64))
    shape = node("Concat", [batch, rest], "shape", axis=0)
    axes = constant("axes", np.array([1], dtype=np.int64))
    squares, shares = [], []
    for index, name in enumerate(tensors):
        flat = node("Reshape", [name, shape], f"flat{index}")
        square = node("Mul", [flat, flat], f"square{index}")
        squares.append(node("ReduceMean", [square, axes], f"mean{index}", keepdims=1))
        # |x| > t is x^2 > t^2, and the squares are there already.
        limit = constant(f"limit{index}", np.array(thresholds[name] ** 2, dtype=np.float32))
        above = node("Greater", [square, limit], f"above{index}")
        ones = node("Cast", [above], f"ones{index}", to=TensorProto.FLOAT)
        shares.append(node("ReduceMean", [ones, axes], f"share{index}", keepdims=1))
    graph.node.append(helper.make_node("Concat", [*squares, *shares], [WATCHED], WATCHED, axis=1))
    size = [None, 2 * len(tensors)]
    graph.output.append(helper.make_tensor_value_info(WATCHED, TensorProto.FLOAT, size))
    return copy


def features(raw: npt.ArrayLike) -> Floats:
    """Return the features (n, F) of a shift model from the watched output: log RMS, root shares.

    A root steadies the variance of a share, a log makes a gain a step.
    """
    given = np.asarray(raw, dtype=np.float64)
    if given.ndim != 2 or given.shape[1] % 2:
        raise DataError(f"a watched output has two columns a tensor, got shape {given.shape}")
    squares, shares = np.split(given, 2, axis=1)
    logs = np.log(np.maximum(squares, LEAST_SQUARE)) / 2
    return np.concatenate([logs, np.sqrt(np.maximum(shares, 0))], axis=1)


def _copied(model: onnx.ModelProto, tensors: Sequence[str]) -> onnx.ModelProto:
    """A copy of a graph that has these tensors."""
    made = {name for node in model.graph.node for name in node.output}
    made |= {value.name for value in model.graph.input}
    missing = [name for name in tensors if name not in made]
    if missing:
        raise SpecError(f"the graph has no tensor {missing[0]!r} to watch")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy
