"""A profile as an ONNX file for TensorRT: int8 and symmetric throughout, checked before written.

What TensorRT takes is from its operator list for version 10.15 and its guide to explicit
quantization: int8 with zero points of 0, one scale for a tensor that is computed, one for each
output channel of a weight, and int8 nowhere but between QuantizeLinear and DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, checker, helper, numpy_helper, shape_inference

from t3c.artifact.devices import Group, choose_forms
from t3c.artifact.reader import Artifact
from t3c.errors import EngineError
from t3c.files import write_atomic
from t3c.graph.assemble import assemble
from t3c.graph.builder import Ranges
from t3c.graph.tensorrt_rules import (
    Index,
    problems,
)
from t3c.spec import MAX_BITS, Form, Profile
from t3c.version import __version__


def write_tensorrt(
    artifact: Artifact,
    profile: Profile,
    path: str | Path,
    forms: Mapping[str, Form] | None = None,
    *,
    weight_bits: int = MAX_BITS,
    grouped: Collection[Group] = (),
) -> onnx.ModelProto:
    """Write the file of a profile and return what is in it; nothing is written if a check fails."""
    model = tensorrt_model(artifact, profile, forms, weight_bits=weight_bits, grouped=grouped)
    found = [*_refusals(model), *problems(model)]
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise EngineError(f"{path}: not for TensorRT: {found[0]}{more}")
    write_atomic(Path(path), model.SerializeToString(deterministic=True), EngineError)
    return model


def tensorrt_model(
    artifact: Artifact,
    profile: Profile,
    forms: Mapping[str, Form] | None = None,
    *,
    weight_bits: int = MAX_BITS,
    grouped: Collection[Group] = (),
) -> onnx.ModelProto:
    """The graph of a profile on signed grids; without forms, factored wherever that saves work."""
    if forms is None:
        forms = choose_forms((), artifact.manifest.specs, profile.points)
    if artifact.weight_only:
        raise EngineError(f"{artifact.path}: its activations are float: what is written is int8")
    ranges = _signed(artifact.ranges(profile.name))
    model = assemble(artifact, profile, forms, ranges, weight_bits, grouped)
    _restore_tables(model.graph)
    if all(node.op_type != "GroupNormalization" for node in model.graph.node):
        # Of all else used here opset 21 only admits more types; the first 10.x read 20.
        model.opset_import[0].version, model.ir_version = 20, 9
    model.producer_name, model.producer_version = "t3c", __version__
    helper.set_model_props(model, {"profile": profile.name, "content": artifact.content})
    return model


def _signed(ranges: Ranges) -> Ranges:
    """Ranges that reach as far below zero as above: their grids are int8 and symmetric."""
    reach = {name: max(-low, high) or 1.0 for name, (low, high) in ranges.items()}
    return {name: (-most, most) for name, most in reach.items()}


def _restore_tables(graph: onnx.GraphProto) -> None:
    """Embeddings that gather rows of float: TensorRT gathers no int8."""
    index = Index.of(graph)
    for rows in list(graph.node):
        table = index.constants.get(rows.input[0]) if rows.op_type == "Gather" else None
        if table is None or table.data_type != TensorProto.INT8:
            continue
        (floats,) = index.users[rows.output[0]]
        (product,) = index.users[floats.output[0]]
        scales = index.makers[product.input[1]]
        if scales.input[0] not in index.constants:
            continue  # scales of groups of columns: told as int8 that TensorRT does not take
        restored = index.value(table.name).astype(np.float32) * index.value(scales.input[0])
        table.CopyFrom(numpy_helper.from_array(restored, table.name))
        rows.output[0] = product.output[0]
        for node in (floats, scales, product):
            graph.node.remove(node)
    used = {name for node in graph.node for name in node.input} | index.outputs
    for tensor in [t for t in graph.initializer if t.name not in used]:
        graph.initializer.remove(tensor)


def _refusals(model: onnx.ModelProto) -> list[str]:
    """Return the first line of what ONNX's own checker says against a model."""
    try:
        checker.check_model(model, full_check=True)
        shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except (checker.ValidationError, shape_inference.InferenceError, ValueError) as error:
        return [f"ONNX refuses it: {next(iter(str(error).strip().splitlines()), 'no reason')}"]
    return []
