"""Attention as engines know it: a softmax that a product follows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx


def zero_after_products(
    graph: onnx.GraphProto, constants: Mapping[str, npt.NDArray[np.generic]]
) -> None:
    """Put what makes zeros of NaN behind the product that reads a softmax, not before it.

    A row that is masked everywhere has NaN for shares, and torch attends to nothing there. Zeros
    for these shares, or for the product's row, which is NaN in all of its columns: it is the same,
    unless values are not finite. Engines run softmax and product as one where nothing is between.
    """
    for check in [node for node in graph.node if node.op_type == "IsNaN"]:
        made = {name: node for node in graph.node for name in node.output}
        shares = check.input[0]
        if shares not in made or made[shares].op_type != "Softmax":
            continue
        choice = _only_reader(graph, check.output[0])
        product = None if choice is None else _only_reader(graph, choice.output[0])
        if choice is None or product is None or product.op_type != "MatMul":
            continue
        zeros = choice.op_type == "Where" and not np.any(constants.get(choice.input[1], 1))
        if not zeros or choice.input[2] != shares or product.input[0] != choice.output[0]:
            continue
        output = product.output[0]
        product.input[0], product.output[0] = shares, f"{output}/attended"
        check.input[0] = choice.input[2] = product.output[0]
        choice.output[0] = output
        _move_behind(graph, product, [check, choice])


def _only_reader(graph: onnx.GraphProto, name: str) -> onnx.NodeProto | None:
    readers = [node for node in graph.node if name in node.input]
    kept = any(value.name == name for value in graph.output)
    return readers[0] if len(readers) == 1 and not kept else None


def _move_behind(
    graph: onnx.GraphProto, first: onnx.NodeProto, moved: list[onnx.NodeProto]
) -> None:
    """Let nodes come right after another: in ONNX what is read has to stand before."""
    names = {node.output[0] for node in moved}
    order = [node for node in graph.node if node.output[0] not in names]
    place = next(i for i, node in enumerate(order) if node.output[0] == first.output[0]) + 1
    copies = []
    for node in [*order[:place], *moved, *order[place:]]:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copies.append(copy)
    del graph.node[:]
    graph.node.extend(copies)
