"""The norms of one profile: gains and biases in the place of those that all profiles share.

One tensor (2, rows) a profile: gains, then biases, of the layers that the manifest names, one
behind the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx

from t3c.artifact.manifest import (
    ELASTIC_DOMAIN,
    Manifest,
    NormedEntry,
    elastic_kind,
    elastic_layer,
)
from t3c.artifact.store import Floats
from t3c.errors import SpecError
from t3c.spec import LayerSpec

WIDEST = 1e30  # bias: sums with it are still numbers
HALVED = 1e-3  # largest error of float16, as a share of a layer's largest value


@dataclass(frozen=True)
class OwnNorms:
    """Gains (out,) by layer, and biases (out,) by the tensors in whose place they stand."""

    gains: Mapping[str, Floats] = field(default_factory=dict)
    biases: Mapping[str, Floats] = field(default_factory=dict)


def normed_layers(
    graph: onnx.GraphProto,
    specs: Mapping[str, LayerSpec],
    tensors: Mapping[str, npt.NDArray[np.generic]],
) -> tuple[NormedEntry, ...]:
    """Return the layers that can have norms of their own: used once, with a bias of their own.

    `tensors` are those that dense.safetensors provides. The bias is an input of the elastic node,
    or what is added to a linear layer's output by the one node that reads it.
    """
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    leaving = {value.name for value in graph.output}
    elastic = [node for node in graph.node if node.domain == ELASTIC_DOMAIN]
    uses = Counter(map(elastic_layer, elastic))
    found = []
    for node in elastic:
        layer, out = elastic_layer(node), node.output[0]
        spec, kind = specs[layer], elastic_kind(node, specs[layer])
        if uses[layer] > 1 or spec.runs > 1 or kind == "embedding":
            continue
        biases, behind = [*node.input[1:]], readers.get(out, [])
        added = kind == "linear" and out not in leaving
        if not biases and added and [reader.op_type for reader in behind] == ["Add"]:
            biases = [name for name in behind[0].input if name != out]
        if len(biases) == 1 and len(readers[biases[0]]) == 1:
            stored = tensors.get(biases[0])
            if stored is not None and stored.shape == (spec.out_channels,):
                found.append(NormedEntry(layer=layer, bias=biases[0]))
    return tuple(found)


def pack_norms(
    gains: Mapping[str, Floats], biases: Mapping[str, Floats], normed: tuple[NormedEntry, ...]
) -> npt.NDArray[np.generic]:
    """Return the tensor (2, rows) of a profile: gains by layer, biases by tensor.

    It is of half precision where that holds every layer's values well enough.
    """
    rows = [[gains[entry.layer] for entry in normed], [biases[entry.bias] for entry in normed]]
    whole = np.stack([np.concatenate(row) for row in rows]).astype(np.float32)
    return whole.astype(np.float16) if all(map(_fits_half, [*rows[0], *rows[1]])) else whole


def _fits_half(values: Floats) -> bool:
    with np.errstate(over="ignore"):
        error = np.abs(values.astype(np.float16).astype(np.float32) - values).max()
    return bool(error <= HALVED * np.abs(values).max())


def read_norms(stored: npt.NDArray[np.generic], manifest: Manifest) -> OwnNorms:
    """Return the norms that a tensor (2, rows) holds."""
    normed, specs = manifest.model.normed, manifest.specs
    ends = np.cumsum([specs[entry.layer].out_channels for entry in normed])
    rows = int(ends[-1]) if normed else 0
    if stored.shape != (2, rows) or stored.dtype not in (np.float16, np.float32):
        raise SpecError(f"{stored.dtype} of shape {stored.shape} for {rows} channels")
    gains, biases = stored.astype(np.float32)
    if not (np.abs(biases) < WIDEST).all() or not ((gains > 0) & (gains < WIDEST)).all():
        raise SpecError("a gain is not positive, or a number is not finite")
    parts = [np.split(values, ends[:-1]) for values in (gains, biases)]
    return OwnNorms(
        {entry.layer: part for entry, part in zip(normed, parts[0], strict=True)},
        {entry.bias: part for entry, part in zip(normed, parts[1], strict=True)},
    )
