"""Nodes that compute the same are one: what reads them reads one tensor, and is known to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx


def merge_factors(graph: onnx.GraphProto, constants: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Let one node stand for all that multiply a tensor by the same constant."""
    first: dict[tuple[str, bytes], str] = {}
    renamed: dict[str, str] = {}
    outputs = {value.name for value in graph.output}
    for node in [node for node in graph.node if node.op_type == "Mul"]:
        held = [name for name in node.input if name in constants]
        given = [name for name in node.input if name not in constants]
        if len(held) != 1 or len(given) != 1:
            continue
        factor, source = constants[held[0]], renamed.get(given[0], given[0])
        key = source, repr((factor.shape, factor.dtype.str)).encode() + factor.tobytes()
        if key in first and node.output[0] not in outputs:
            renamed[node.output[0]] = first[key]
            graph.node.remove(node)
        else:
            first.setdefault(key, node.output[0])
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
