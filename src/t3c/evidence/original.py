"""The original beside an artifact of it: the same topology, with the weights it was made from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, numpy_helper
from torch import nn

from t3c.artifact.elastic_nodes import Floats
from t3c.artifact.graph import Axes, original_onnx, topology, weight_name
from t3c.artifact.reader import Artifact
from t3c.convert import state_of
from t3c.convert.smooth import unsmooth_
from t3c.errors import ConvertError, DataError
from t3c.files import write_atomic
from t3c.nn.view import elastic_weights

LIMIT = 2**31 - 1  # bytes that one protobuf message can hold


class NamelessError(DataError):
    """A model in ONNX that does not name the layers' weights."""


@dataclass(frozen=True)
class Original:
    """The weights of elastic layers, norms folded in, and every other float tensor, by name."""

    weights: Mapping[str, Floats]
    dense: Mapping[str, Floats]


def write_original(model: nn.Module, path: str | Path, *, axes: Axes | None = None) -> None:
    """Write the original an elastic model was made from as ONNX, for certificates and comparisons.

    Its elastic weights keep their names, by which `t3c certify` finds them; `axes` are those the
    model is exported with.
    """
    onnx_model = to_original(model, axes)
    if onnx_model.ByteSize() > LIMIT:
        raise DataError(f"{path}: the original is larger than the 2 GB that one ONNX file holds")
    write_atomic(Path(path), onnx_model.SerializeToString())


def to_original(model: nn.Module, axes: Axes | None = None) -> onnx.ModelProto:
    """The original of an elastic model in ONNX."""
    state = state_of(model)
    refuse_batch_statistics(state.original)
    return original_onnx(state.original, state.example, list(elastic_weights(model)), axes)


def as_handed_over(model: nn.Module, axes: Axes | None = None) -> onnx.ModelProto:
    """Return the original of an elastic model in ONNX without the smoothing that came before."""
    state = state_of(model)
    plain = copy.deepcopy(state.original)
    unsmooth_(plain)
    return original_onnx(plain, state.example, [], axes)


def refuse_batch_statistics(model: nn.Module) -> None:
    """Refuse norms over the batch: what they put out for a sample depends on the others."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise ConvertError(
                f"layer {name!r} normalises by the statistics of its batch: a certificate is of "
                "single samples, so it needs running statistics that are frozen"
            )


def read_onnx(path: Path) -> onnx.ModelProto:
    """A model in ONNX from one file; what lies outside of it is refused."""
    if not path.is_file():
        raise DataError(f"{path}: no such file: --original names the original model in ONNX")
    try:
        model = onnx.load_model(str(path), load_external_data=False)
    except (DecodeError, OSError) as error:
        raise DataError(f"{path}: not a model in ONNX: {error}") from error
    if any(i.data_location == TensorProto.EXTERNAL for i in model.graph.initializer):
        raise DataError(f"{path}: its tensors lie in another file: store them in this one")
    return model


def beside(artifact: Artifact, model: onnx.ModelProto) -> Original:
    """The original's tensors as the artifact's topology names them.

    Refused where the file does not name the layers' weights, or is another network: another
    topology, other attributes or other whole numbers.
    """
    specs = artifact.manifest.specs
    named = onnx.ModelProto()
    named.CopyFrom(model)
    raw = {}
    for layer, spec in specs.items():
        found = [i for i in named.graph.initializer if i.name == weight_name(layer)]
        if not found or tuple(found[0].dims) != spec.dense_shape:
            raise NamelessError(
                f"the original does not hold the weight of layer {layer!r}: write it with "
                "t3c.write_original(model, path)"
            )
        raw[layer] = numpy_helper.to_array(found[0]).astype(np.float32)
        named.graph.initializer.remove(found[0])
        named.graph.input.append(
            onnx.helper.make_tensor_value_info(found[0].name, TensorProto.FLOAT, spec.dense_shape)
        )
    if any(a.name == "training_mode" and a.i for node in named.graph.node for a in node.attribute):
        raise DataError("the original has a BatchNormalization in training mode: export it frozen")
    traced = topology(named, specs)
    if _shape_of(traced.model.graph) != _shape_of(artifact.graph().graph):
        raise DataError("the original is another network than the artifact's")
    weights = {
        layer: weight * _column(traced.folded[layer], weight.ndim)
        if layer in traced.folded
        else weight
        for layer, weight in raw.items()
    }
    return Original(weights, traced.dense)


def _column(factor: Floats, ndim: int) -> Floats:
    return factor.reshape(-1, *([1] * (ndim - 1)))


def _shape_of(graph: onnx.GraphProto) -> list[object]:
    """What two graphs have to share to be one network with other weights."""
    nodes = [
        (
            node.op_type, tuple(node.input), tuple(node.output),
            sorted(a.SerializeToString() for a in node.attribute),
        )
        for node in graph.node
    ]  # fmt: skip
    numbers = {i.name: numpy_helper.to_array(i).tolist() for i in graph.initializer}
    return [nodes, numbers]
