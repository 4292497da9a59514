"""graph.onnx: the topology of a model, without its weights.

Every use of an elastic weight is a node `t3c.Elastic(x[, bias])` that names its layer and says what
it computes, a batch norm behind one is folded into it, and every other float tensor is a named
input that dense.safetensors provides. Of the inputs the batch is free, and every axis that has a
name; the states of a model that carries some follow its inputs, and what they become its output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from t3c.artifact.alike import merge_factors
from t3c.artifact.attention import zero_after_products
from t3c.artifact.elastic_nodes import Floats, fold_norms, make_elastic
from t3c.artifact.manifest import ELASTIC_DOMAIN, OPSET, STATE
from t3c.errors import ConvertError, SpecError
from t3c.nn.inputs import Inputs, call, moved, tensors
from t3c.nn.parametrized import WithParameters
from t3c.nn.view import on_cpu
from t3c.silence import silenced
from t3c.spec import LayerSpec

Axes = Mapping[str, Mapping[int, str]]  # by input and axis, the name under which a size is free
BATCH_AXIS, PAST_AXIS = "batch", "past"  # the axes of samples, and of what states remember


@runtime_checkable
class Stateful(Protocol):
    """A model that carries tensors from call to call.

    Called with its states by name it returns its output and then, in order, what they become.
    """

    def states(self, batch: int, length: int) -> Mapping[str, Tensor]:
        """States that remember `length` steps; the batch comes first, names begin with `past_`."""
        ...


@dataclass(frozen=True)
class Traced:
    """A topology, the float tensors it refers to, and the output factor folded into each layer."""

    model: onnx.ModelProto
    dense: Mapping[str, Floats]
    folded: Mapping[str, Floats]

    @property
    def stateful(self) -> bool:
        """Whether the model carries states, and so runs token by token."""
        return any(value.name.startswith(STATE) for value in self.model.graph.input)


def trace(
    plain: nn.Module,
    example: Inputs,
    specs: Mapping[str, LayerSpec],
    axes: Axes | None = None,
) -> Traced:
    """Trace a plain model (no elastic layers); `specs` says which layers become elastic nodes."""
    return topology(to_onnx(plain.eval(), example, list(specs), axes), specs)


def topology(model: onnx.ModelProto, specs: Mapping[str, LayerSpec]) -> Traced:
    """The topology of a model in ONNX whose elastic weights are inputs named `weight:LAYER`."""
    graph = model.graph
    model.opset_import.append(helper.make_opsetid(ELASTIC_DOMAIN, 1))
    constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    names = {weight_name(layer): layer for layer in specs}
    for weight, layer in names.items():
        make_elastic(graph, weight, layer)
    merge_factors(graph, constants)
    zero_after_products(graph, constants)
    folded = fold_norms(graph, constants)
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


def original_onnx(
    plain: nn.Module, example: Inputs, layers: Sequence[str], axes: Axes | None = None
) -> onnx.ModelProto:
    """A plain model in ONNX, its elastic weights named, so that they can be found in it again."""
    model = to_onnx(plain.eval(), example, layers, axes)
    names = {weight_name(layer): layer for layer in layers}
    for value in [value for value in model.graph.input if value.name in names]:
        model.graph.input.remove(value)
        weight = plain.get_parameter(f"{names[value.name]}.weight").detach().contiguous()
        model.graph.initializer.append(numpy_helper.from_array(weight.cpu().numpy(), value.name))
    return model


def weight_name(layer: str) -> str:
    """What the weight of an elastic layer is called in ONNX."""
    return f"weight:{layer}"


def to_onnx(
    plain: nn.Module, example: Inputs, layers: Sequence[str] = (), axes: Axes | None = None
) -> onnx.ModelProto:
    """ONNX of a plain model with a free batch size, free named axes, and its states if it has any.

    The weights of `layers` become graph inputs, so that nothing is folded into them. It is traced
    on the CPU, wherever the model is.
    """
    plain, example = on_cpu(plain), moved(example, torch.device("cpu"))
    weights = [f"{name}.weight" for name in layers]
    values = [plain.get_parameter(name).detach() for name in weights]
    names = list(example) if isinstance(example, Mapping) else _input_names(len(tensors(example)))
    free = _free_axes(names, tensors(example), axes or {})
    args = [_long(a, over) for a, over in zip(tensors(example), free, strict=True)]
    states, remembering = example_states(plain, args, free)

    class Traced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = plain

        def forward(self, args: list[Tensor], past: list[Tensor], values: list[Tensor]) -> Any:
            model = WithParameters(self.plain, dict(zip(weights, values, strict=True)))
            inputs: Inputs = tuple(args)
            if isinstance(example, Mapping):
                inputs = dict(zip(names, args, strict=True))
            if not states:
                return call(model, inputs)
            given = dict(zip(states, past, strict=True))
            return model(**inputs, **given) if isinstance(inputs, dict) else model(*args, **given)

    sizes = {n: torch.export.Dim(n) for over in (*free, *remembering) for n in over.values()}
    shapes = (
        [{axis: sizes[name] for axis, name in over.items()} for over in free],
        [{axis: sizes[name] for axis, name in over.items()} for over in remembering],
        [None for _ in values],
    )
    model = _exported(Traced().eval(), (args, list(states.values()), values), shapes)
    _name_values(model.graph, [*names, *states, *map(weight_name, layers)], list(states))
    _name_axes(model.graph, (*free, *remembering))
    return model


def present_name(state: str) -> str:
    """What the output is called that a state becomes."""
    return f"present_{state.removeprefix(STATE)}"


def _free_axes(names: Sequence[str], args: Sequence[Tensor], axes: Axes) -> list[dict[int, str]]:
    """The free axes of each input, or one clear error."""
    for name, given in axes.items():
        if name not in names:
            raise SpecError(f"axes name an input {name!r}: there are {', '.join(names)}")
        rank = args[names.index(name)].dim()
        for axis, called in given.items():
            if not 0 < axis < rank:
                raise SpecError(f"axis {axis} of {name!r} is not one of 1 to {rank - 1}")
            if not called.isidentifier() or called in (BATCH_AXIS, PAST_AXIS):
                raise SpecError(f"axis {axis} of {name!r} cannot be called {called!r}")
    return [{0: BATCH_AXIS, **axes.get(name, {})} for name in names]


def _long(value: Tensor, free: Mapping[int, str]) -> Tensor:
    """An example of at least two along each free axis: one alone would be taken for a constant."""
    for axis in free:
        value = torch.cat([value, value], dim=axis) if value.shape[axis] == 1 else value
    return value


def example_states(
    plain: nn.Module, args: Sequence[Tensor], free: Sequence[Mapping[int, str]]
) -> tuple[dict[str, Tensor], list[dict[int, str]]]:
    """A stateful model's states of some length and their free axes; nothing of other models."""
    if not isinstance(plain, Stateful):
        return {}, []
    if all(len(over) == 1 for over in free):
        raise ConvertError(
            "a model with states takes inputs of any length: name the axis, for example "
            "axes={'input_ids': {1: 'sequence'}}"
        )
    batch = args[0].shape[0]
    # A size of its own, so that no other is taken for it.
    length = next(n for n in range(3, 99) if all(n not in value.shape for value in args))
    states, longer = (dict(plain.states(batch, length + more)) for more in (0, 1))
    axes = []
    for name, value in states.items():
        if not name.startswith(STATE):
            raise ConvertError(f"state {name!r}: names of states begin with {STATE!r}")
        grown = [a for a in range(value.dim()) if value.shape[a] != longer[name].shape[a]]
        axes.append({0: BATCH_AXIS} | dict.fromkeys(grown, PAST_AXIS))
    return states, axes


def _exported(model: nn.Module, args: tuple[Any, ...], shapes: tuple[Any, ...]) -> onnx.ModelProto:
    try:
        with silenced("torch.onnx", "onnxscript"):
            program = torch.onnx.export(
                model, args, dynamo=True, opset_version=OPSET, dynamic_shapes=shapes, verbose=False
            )
    except torch.onnx.OnnxExporterError as error:
        lines = str(error.__cause__ or error).strip().splitlines()
        raise ConvertError(f"torch cannot trace the model to ONNX: {lines[0]}") from error
    assert program is not None
    return program.model_proto


def _name_values(graph: onnx.GraphProto, inputs: Sequence[str], states: Sequence[str]) -> None:
    renamed = dict(zip((value.name for value in graph.input), inputs, strict=True))
    outputs = ["output", *map(present_name, states)]
    if len(graph.output) != len(outputs):
        raise ConvertError(f"{len(graph.output) - 1} states come out of {len(states)}")
    renamed |= dict(zip((value.name for value in graph.output), outputs, strict=True))
    _rename(graph, renamed)


def _name_axes(graph: onnx.GraphProto, free: Sequence[Mapping[int, str]]) -> None:
    """Call free axes by their names, in outputs too; refuse those that were traced as constants."""
    symbols: dict[str, str] = {}
    for value, over in zip(graph.input, free, strict=False):
        for axis, name in over.items():
            size = value.type.tensor_type.shape.dim[axis]
            if not size.dim_param and name != BATCH_AXIS:
                raise ConvertError(
                    f"the {name} of {value.name!r} cannot be free: the model takes it for the "
                    f"constant {size.dim_value}"
                )
            symbols[size.dim_param] = name
            size.dim_param = name
    for value in graph.output:
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                words = re.split(r"(\w+)", size.dim_param)
                size.dim_param = "".join(symbols.get(word, word) for word in words)
    graph.output[0].type.tensor_type.shape.dim[0].dim_param = BATCH_AXIS


def _input_names(count: int) -> list[str]:
    return ["input"] if count == 1 else [f"input{index}" for index in range(count)]


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
