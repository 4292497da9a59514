"""Fit what lies between narrowed layers to them.

A narrowed layer computes only its leading outputs, and the layers that read them have only the
leading columns. Between the two, constants of a size a channel are cut and shapes rewritten. Where
that is not understood, zeros are put behind the layer, and the leading channels are taken again
before each narrowed reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from t3c.artifact.manifest import ELASTIC_DOMAIN, elastic_kind, elastic_layer
from t3c.errors import SpecError
from t3c.graph.rewriting import Rewriting
from t3c.graph.shapes import (
    Constants,
    Entry,
    Shapes,
    Size,
    SizeOf,
    computed_sizes,
    entries_of,
    infer_shapes,
    numbers,
)
from t3c.graph.tracks import MOVES, Move, NotUnderstoodError, Track, reshaped
from t3c.spec import LayerSpec

WHOLE = Fraction(1)
ELEMENTWISE = {
    "Abs", "Add", "And", "Cast", "Clip", "Cos", "Div", "Elu", "Equal", "Erf", "Exp", "Gelu",
    "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsNaN", "LeakyRelu",
    "Less", "LessOrEqual", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Not", "Or", "PRelu", "Pow",
    "Reciprocal", "Relu", "Sigmoid", "Sin", "Softplus", "Sqrt", "Sub", "Tanh", "Where",
}  # fmt: skip


@dataclass(frozen=True)
class Narrowed:
    """The units a layer keeps and has, of its outputs (rows) and its inputs; None: all of them."""

    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None


def narrowed(
    graph: onnx.GraphProto,
    constants: Constants,
    layers: Mapping[str, Narrowed],
    specs: Mapping[str, LayerSpec],
) -> tuple[onnx.GraphProto, dict[str, npt.NDArray[Any]]]:
    """Return a topology fit to narrowed layers, and the constants it reads.

    `constants` are the topology's, by name; `specs` are those of all its layers at full size.
    Constants that change get new names. What is read by several narrowed layers may also be read
    whole: then only those take the leading channels.
    """
    if all(layer.rows is None and layer.columns is None for layer in layers.values()):
        return graph, dict(constants)
    shapes = infer_shapes(graph, constants, specs)
    filled: frozenset[str] = frozenset()
    while True:
        walk = _Walk(graph, constants, layers, specs, shapes, filled)
        if not walk.unfit:
            return walk.result()
        assert not walk.unfit <= filled
        filled |= walk.unfit


class _Walk:
    """One pass over a topology; the outputs of layers in `filled` are filled up with zeros."""

    def __init__(
        self, graph: onnx.GraphProto, constants: Constants, layers: Mapping[str, Narrowed],
        specs: Mapping[str, LayerSpec], shapes: Shapes, filled: frozenset[str],
    ) -> None:  # fmt: skip
        self.graph, self.layers, self.specs = graph, layers, specs
        self.made, self.filled = Rewriting(graph, constants, shapes), filled
        failed: set[str] = set()
        for node in graph.node:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            try:
                self._step(copy)
            except NotUnderstoodError:
                failed |= {self.made.root(track.source) for track in self.made.involved(node)}
                self.made.nodes.append(copy)
        for value in graph.output:
            if value.name in self.made.tracks:
                failed.add(self.made.root(self.made.tracks[value.name].source))
        self.unfit = {source for source in self.made.parents if self.made.root(source) in failed}

    def result(self) -> tuple[onnx.GraphProto, dict[str, npt.NDArray[Any]]]:
        """Return the topology and its constants."""
        self.made.keep_names()
        read, nodes = {value.name for value in self.graph.output}, []
        for node in reversed(self.made.nodes):
            if not read.isdisjoint(node.output):
                nodes.append(node)
                read.update(node.input)
        made = onnx.GraphProto()
        made.CopyFrom(self.graph)
        del made.node[:]
        made.node.extend(reversed(nodes))
        return made, self.made.constants

    def _step(self, node: onnx.NodeProto) -> None:
        """Take over a node, changed as it has to be."""
        if node.domain == ELASTIC_DOMAIN:
            self._layer(node)
            return
        entries = None
        if node.op_type == "Shape" or not any(name in self.made.tracks for name in node.input):
            entries = computed_sizes(node, self.made.sizes, self.made.constants, self.made.shapes)
        if entries is not None:
            self.made.sizes[node.output[0]] = entries
        elif node.op_type in ("Reshape", "Expand"):
            self._reshape(node)
        elif involved := self.made.involved(node):
            if self.made.reads_sizes(node):
                raise NotUnderstoodError
            self._operation(node, involved[0])
        self.made.nodes.append(node)

    def _operation(self, node: onnx.NodeProto, track: Track) -> None:
        """Fit an operation that reads narrowed tensors."""
        kind, first = node.op_type, node.input[0]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        concatenated = kind == "Concat" and track.axis != _from_end(
            attributes["axis"], self.made.rank(node.output[0])
        )
        if kind in ELEMENTWISE or concatenated:
            node.input[:] = [self._aligned(name, track) for name in node.input]
        elif kind == "MatMul":
            track = self._product(node, track)
        elif first not in self.made.tracks or any(
            name in self.made.tracks for name in node.input[1:]
        ):
            raise NotUnderstoodError
        elif kind in ("BatchNormalization", "InstanceNormalization", "Conv"):
            self._channels(node, track, attributes)
        elif kind == "Flatten":
            track = reshaped(track, self.made.shapes[first], self.made.shape(node.output[0]))
        elif kind in MOVES:
            rank, rest, shapes = self.made.rank(first), node.input[1:], self.made.shapes
            move = Move(
                attributes, rank, rank + track.axis,
                [numbers(self.made.constants, name) for name in rest],
                [len(shapes[name]) if name in shapes else None for name in rest],
            )  # fmt: skip
            track = replace(track, axis=MOVES[kind](move))
        else:
            raise NotUnderstoodError
        for name in node.output:
            self.made.tracks[name] = track

    def _layer(self, node: onnx.NodeProto) -> None:
        """Fit the input, the bias and the output of a layer."""
        layer, x, out = elastic_layer(node), node.input[0], node.output[0]
        spec, narrow = self.specs[layer], self.layers.get(layer, Narrowed())
        rows, columns = _share(narrow.rows), _share(narrow.columns)
        kind = elastic_kind(node, spec)
        if kind == "embedding" and (rows, columns) != (WHOLE, WHOLE):
            raise SpecError(f"{layer}: a table cannot be narrowed")
        axis = -1 if kind != "conv" else 1 - self.made.rank(out)
        kept = [rows * spec.out_channels, columns * spec.in_channels]
        if any(count.denominator != 1 for count in kept):
            raise SpecError(f"{layer}: {narrow} does not divide its channels")
        wanted = Track(axis, spec.in_channels, columns, x)
        if x in self.made.tracks:
            if not self.made.tracks[x].alike(wanted):
                raise NotUnderstoodError
        elif columns != WHOLE:
            node.input[0] = self.made.leading(x, wanted)
        self.made.nodes.append(node)
        if rows == WHOLE:
            return
        track = Track(axis, spec.out_channels, rows, out)
        if len(node.input) > 1:
            node.input[1] = self.made.leading(node.input[1], replace(track, axis=-1))
        if out in self.filled:
            node.output[0] = self.made.new_name(f"{out}/kept")
            self._fill(node.output[0], out, track)
        else:
            self.made.tracks[out], self.made.parents[out] = track, out

    def _fill(self, narrow: str, out: str, track: Track) -> None:
        """Put zeros behind the channels kept."""
        rank = self.made.rank(out)
        pads = np.zeros(2 * rank, dtype=np.int64)
        pads[2 * rank + track.axis] = track.size - track.kept
        name = self.made.new_name(f"{out}/zeros")
        self.made.constants[name] = pads
        self.made.nodes.append(helper.make_node("Pad", [narrow, name], [out], f"{out}/filled"))

    def _aligned(self, name: str, track: Track) -> str:
        """Return an operand that is broadcast to a narrowed one, cut where it is not yet."""
        if not name:
            return name
        if name in self.made.tracks:
            other = self.made.tracks[name]
            if not other.alike(track):
                raise NotUnderstoodError
            self.made.join(track, other)
            return name
        shape = self.made.shape(name)
        size = shape[track.axis] if len(shape) >= -track.axis else 1
        if size == 1:
            return name
        if size != track.size or track.merged:
            raise NotUnderstoodError
        return self.made.leading(name, track)

    def _product(self, node: onnx.NodeProto, track: Track) -> Track:
        """Fit a product of two tensors: of narrowed batches, rows of the first, or columns of
        the second."""
        a, b = node.input
        if track.axis < -2:
            node.input[:] = [self._aligned(a, track), self._aligned(b, track)]
        elif (a in self.made.tracks) == (b in self.made.tracks) or track.axis != (
            -2 if a in self.made.tracks else -1
        ):
            raise NotUnderstoodError
        return track

    def _channels(self, node: onnx.NodeProto, track: Track, attributes: dict[str, Any]) -> None:
        """Fit an operation with constants of one number, or one kernel, for each channel."""
        if track.axis != 1 - self.made.rank(node.input[0]) or track.merged:
            raise NotUnderstoodError
        if node.op_type == "Conv":
            weight = self.made.shape(node.input[1])
            if attributes.get("group", 1) != track.size or weight[0] != track.size:
                raise NotUnderstoodError
            next(a for a in node.attribute if a.name == "group").i = track.kept
        for index, name in enumerate(node.input[1:], start=1):
            axis = -len(self.made.shape(name))
            node.input[index] = self.made.leading(name, replace(track, axis=axis))

    def _reshape(self, node: onnx.NodeProto) -> None:
        """Fit a Reshape or an Expand: its shape says how many channels there are, or what they
        follow from."""
        x, shape = node.input
        if x not in self.made.tracks:
            if self.made.reads_sizes(node):
                raise NotUnderstoodError
            return
        track, entries = (
            self.made.tracks[x],
            entries_of(shape, self.made.sizes, self.made.constants),
        )
        if entries is None or x not in self.made.shapes:
            raise NotUnderstoodError
        before = self.made.shapes[x]
        copied = node.op_type == "Reshape" and not any(a.i for a in node.attribute)
        entries = [
            SizeOf(x, i) if entry == 0 and copied else entry for i, entry in enumerate(entries)
        ]
        if node.op_type == "Reshape":
            after = self._sizes_after(entries, self.made.shapes.get(node.output[0]))
            made = reshaped(track, before, after)
        else:
            made = track
        place = len(entries) + made.axis
        for index, entry in enumerate(entries):
            followed = self.made.followed(entry)
            if index != place and followed is not None:
                raise NotUnderstoodError
            if index == place and followed is not None:
                whole = made.merged or self.made.size(entry) == made.size
                if followed.share != made.share or not whole:
                    raise NotUnderstoodError
                self.made.join(made, followed)
            elif index == place and not self._free(node, entry):
                size = self.made.size(entry)
                if not isinstance(size, int) or (not made.merged and size != made.size):
                    raise NotUnderstoodError
                node.input[1] = self.made.with_entry(shape, place, made.reduced(size))
        self.made.tracks[node.output[0]] = made

    def _sizes_after(self, entries: list[Entry], known: tuple[Size, ...] | None) -> list[Size]:
        """Return the sizes a Reshape makes, by its shape's entries or as they are known."""
        if known is None or len(known) != len(entries):
            known = (None,) * len(entries)
        return [
            size if entry == -1 else self.made.size(entry)
            for entry, size in zip(entries, known, strict=True)
        ]

    def _free(self, node: onnx.NodeProto, entry: Entry) -> bool:
        """Return whether an entry leaves the size to what is read."""
        return entry == (-1 if node.op_type == "Reshape" else 1)


def _share(units: tuple[int, int] | None) -> Fraction:
    if units is None:
        return WHOLE
    kept, total = units
    if not 0 < kept <= total:
        raise SpecError(f"{kept} of {total} units cannot be kept")
    return Fraction(kept, total)


def _from_end(axis: int, rank: int) -> int:
    return axis % rank - rank
