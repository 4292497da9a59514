"""graph.onnx: the topology of a model, without its weights.

Every use of an elastic weight is a node `t3c.Elastic(x[, bias])` that names its layer and says what
it computes, a batch norm behind one is folded into it, and every other float tensor is a named
input that dense.safetensors provides.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from t3c.artifact.manifest import ELASTIC_DOMAIN, OPSET, elastic_layer
from t3c.errors import ConvertError
from t3c.nn.inputs import Inputs, call, tensors
from t3c.nn.parametrized import WithParameters
from t3c.spec import LayerSpec

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Traced:
    """A topology, the float tensors it refers to, and the output factor folded into each layer."""

    model: onnx.ModelProto
    dense: Mapping[str, Floats]
    folded: Mapping[str, Floats]


def trace(plain: nn.Module, example: Inputs, specs: Mapping[str, LayerSpec]) -> Traced:
    """Trace a plain model (no elastic layers); `specs` says which layers become elastic nodes."""
    return topology(to_onnx(plain.eval(), example, list(specs)), specs)


def topology(model: onnx.ModelProto, specs: Mapping[str, LayerSpec]) -> Traced:
    """The topology of a model in ONNX whose elastic weights are inputs named `weight:LAYER`."""
    graph = model.graph
    model.opset_import.append(helper.make_opsetid(ELASTIC_DOMAIN, 1))
    constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    names = {weight_name(layer): layer for layer in specs}
    for weight, layer in names.items():
        _make_elastic(graph, weight, layer)
    folded = _fold_norms(graph, constants)
    _drop_unused(graph, constants, set(names))
    dense = {n: v.astype(np.float32) for n, v in constants.items() if v.dtype.kind == "f"}
    for name, value in dense.items():
        graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, value.shape))
    del graph.initializer[:]
    graph.initializer.extend(
        numpy_helper.from_array(v, n) for n, v in constants.items() if n not in dense
    )
    del graph.value_info[:]
    onnx.checker.check_model(model)
    return Traced(model, dense, folded)


def original_onnx(plain: nn.Module, example: Inputs, layers: Sequence[str]) -> onnx.ModelProto:
    """A plain model in ONNX, its elastic weights named, so that they can be found in it again."""
    model = to_onnx(plain.eval(), example, layers)
    names = {weight_name(layer): layer for layer in layers}
    for value in [value for value in model.graph.input if value.name in names]:
        model.graph.input.remove(value)
        weight = plain.get_parameter(f"{names[value.name]}.weight").detach().contiguous()
        model.graph.initializer.append(numpy_helper.from_array(weight.numpy(), value.name))
    return model


def weight_name(layer: str) -> str:
    """What the weight of an elastic layer is called in ONNX."""
    return f"weight:{layer}"


def to_onnx(plain: nn.Module, example: Inputs, layers: Sequence[str] = ()) -> onnx.ModelProto:
    """ONNX of a plain model with a free batch size.

    The weights of `layers` become graph inputs, so that nothing is folded into them.
    """
    weights = [f"{name}.weight" for name in layers]
    values = [plain.get_parameter(name).detach() for name in weights]
    args = tensors(example)
    names = list(example) if isinstance(example, Mapping) else _input_names(len(args))
    # A batch of one would be taken for a constant.
    args = [torch.cat([a, a]) if a.shape[0] == 1 else a for a in args]

    class Traced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = plain

        def forward(self, args: list[Tensor], values: list[Tensor]) -> Tensor:
            given = dict(zip(weights, values, strict=True))
            inputs: Inputs = tuple(args)
            if isinstance(example, Mapping):
                inputs = dict(zip(names, args, strict=True))
            return call(WithParameters(self.plain, given), inputs)

    batch = torch.export.Dim("batch")
    shapes = ([{0: batch} for _ in args], [None for _ in values])
    try:
        with _quiet():
            program = torch.onnx.export(
                Traced().eval(), (args, values), dynamo=True, opset_version=OPSET,
                dynamic_shapes=shapes, verbose=False,
            )  # fmt: skip
    except torch.onnx.OnnxExporterError as error:
        lines = str(error.__cause__ or error).strip().splitlines()
        raise ConvertError(f"torch cannot trace the model to ONNX: {lines[0]}") from error
    assert program is not None
    model = program.model_proto
    renamed = dict(
        zip(
            (i.name for i in model.graph.input),
            [*names, *map(weight_name, layers)],
            strict=True,
        )
    )
    renamed[model.graph.output[0].name] = "output"
    _rename(model.graph, renamed)
    for value in [*model.graph.input[: len(names)], model.graph.output[0]]:
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


def _input_names(count: int) -> list[str]:
    return ["input"] if count == 1 else [f"input{index}" for index in range(count)]


def _make_elastic(graph: onnx.GraphProto, weight: str, layer: str) -> None:
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
    """What a node that uses a weight, or the weight turned, computes; None for anything else."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Conv" and not turned:
        return "conv"
    if node.op_type == "Gather" and not turned and not attributes.get("axis"):
        return "embedding"
    gemm = node.op_type == "Gemm" and attributes.get("transB", 0) == int(not turned)
    if (node.op_type == "MatMul" and turned) or (gemm and not attributes.get("transA")):
        return "linear"
    return None


def _fold_norms(graph: onnx.GraphProto, constants: dict[str, Floats]) -> dict[str, Floats]:
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


def _drop_unused(graph: onnx.GraphProto, constants: dict[str, Floats], weights: set[str]) -> None:
    used = {name for node in graph.node for name in node.input}
    for name in [n for n in constants if n not in used]:
        del constants[name]
    for value in [v for v in graph.input if v.name in weights]:
        graph.input.remove(value)


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for value in [*graph.input, *graph.output]:
        value.name = names.get(value.name, value.name)
        del value.metadata_props[:]
    for node in graph.node:
        node.input[:] = [names.get(n, n) for n in node.input]
        node.output[:] = [names.get(n, n) for n in node.output]
        node.doc_string = ""
        del node.metadata_props[:]


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's own chatter, kept from the user for the length of a block."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
