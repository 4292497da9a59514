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
        self.shapes, self.filled = shapes, filled
        self.constants = dict(constants)
        self.names = {n for node in graph.node for n in (*node.input, *node.output)}
        self.nodes: list[onnx.NodeProto] = []
        self.tracks: dict[str, Track] = {}
        self.sizes: dict[str, list[Entry]] = {}
        self.cut: dict[tuple[str, int, int], str] = {}
        self.parents: dict[str, str] = {}  # of narrowed outputs that end in the same layers
        failed: set[str] = set()
        for node in graph.node:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            try:
                self._step(copy)
            except NotUnderstoodError:
                failed |= {self._root(track.source) for track in self._involved(node)}
                self.nodes.append(copy)
        for value in graph.output:
            if value.name in self.tracks:
                failed.add(self._root(self.tracks[value.name].source))
        self.unfit = {source for source in self.parents if self._root(source) in failed}

    def result(self) -> tuple[onnx.GraphProto, dict[str, npt.NDArray[Any]]]:
        """Return the topology and its constants."""
        self._keep_names()
        read, nodes = {value.name for value in self.graph.output}, []
        for node in reversed(self.nodes):
            if not read.isdisjoint(node.output):
                nodes.append(node)
                read.update(node.input)
        made = onnx.GraphProto()
        made.CopyFrom(self.graph)
        del made.node[:]
        made.node.extend(reversed(nodes))
        return made, self.constants

    def _step(self, node: onnx.NodeProto) -> None:
        """Take over a node, changed as it has to be."""
        if node.domain == ELASTIC_DOMAIN:
            self._layer(node)
            return
        entries = None
        if node.op_type == "Shape" or not any(name in self.tracks for name in node.input):
            entries = computed_sizes(node, self.sizes, self.constants, self.shapes)
        if entries is not None:
            self.sizes[node.output[0]] = entries
        elif node.op_type in ("Reshape", "Expand"):
            self._reshape(node)
        elif involved := self._involved(node):
            if self._reads_sizes(node):
                raise NotUnderstoodError
            self._operation(node, involved[0])
        self.nodes.append(node)

    def _operation(self, node: onnx.NodeProto, track: Track) -> None:
        """Fit an operation that reads narrowed tensors."""
        kind, first = node.op_type, node.input[0]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        concatenated = kind == "Concat" and track.axis != _from_end(
            attributes["axis"], self._rank(node.output[0])
        )
        if kind in ELEMENTWISE or concatenated:
            node.input[:] = [self._aligned(name, track) for name in node.input]
        elif kind == "MatMul":
            track = self._product(node, track)
        elif first not in self.tracks or any(name in self.tracks for name in node.input[1:]):
            raise NotUnderstoodError
        elif kind in ("BatchNormalization", "InstanceNormalization", "Conv"):
            self._channels(node, track, attributes)
        elif kind == "Flatten":
            track = reshaped(track, self.shapes[first], self._shape(node.output[0]))
        elif kind in MOVES:
            rank, rest = self._rank(first), node.input[1:]
            move = Move(
                attributes, rank, rank + track.axis,
                [numbers(self.constants, name) for name in rest],
                [len(self.shapes[name]) if name in self.shapes else None for name in rest],
            )  # fmt: skip
            track = replace(track, axis=MOVES[kind](move))
        else:
            raise NotUnderstoodError
        for name in node.output:
            self.tracks[name] = track

    def _layer(self, node: onnx.NodeProto) -> None:
        """Fit the input, the bias and the output of a layer."""
        layer, x, out = elastic_layer(node), node.input[0], node.output[0]
        spec, narrow = self.specs[layer], self.layers.get(layer, Narrowed())
        rows, columns = _share(narrow.rows), _share(narrow.columns)
        kind = elastic_kind(node, spec)
        if kind == "embedding" and (rows, columns) != (WHOLE, WHOLE):
            raise SpecError(f"{layer}: a table cannot be narrowed")
        axis = -1 if kind != "conv" else 1 - self._rank(out)
        kept = [rows * spec.out_channels, columns * spec.in_channels]
        if any(count.denominator != 1 for count in kept):
            raise SpecError(f"{layer}: {narrow} does not divide its channels")
        wanted = Track(axis, spec.in_channels, columns, x)
        if x in self.tracks:
            if not self.tracks[x].alike(wanted):
                raise NotUnderstoodError
        elif columns != WHOLE:
            node.input[0] = self._leading(x, wanted)
        self.nodes.append(node)
        if rows == WHOLE:
            return
        track = Track(axis, spec.out_channels, rows, out)
        if len(node.input) > 1:
            node.input[1] = self._leading(node.input[1], replace(track, axis=-1))
        if out in self.filled:
            node.output[0] = self._new_name(f"{out}/kept")
            self._fill(node.output[0], out, track)
        else:
            self.tracks[out], self.parents[out] = track, out

    def _fill(self, narrow: str, out: str, track: Track) -> None:
        """Put zeros behind the channels kept."""
        rank = self._rank(out)
        pads = np.zeros(2 * rank, dtype=np.int64)
        pads[2 * rank + track.axis] = track.size - track.kept
        name = self._new_name(f"{out}/zeros")
        self.constants[name] = pads
        self.nodes.append(helper.make_node("Pad", [narrow, name], [out], f"{out}/filled"))

    def _aligned(self, name: str, track: Track) -> str:
        """Return an operand that is broadcast to a narrowed one, cut where it is not yet."""
        if not name:
            return name
        if name in self.tracks:
            other = self.tracks[name]
            if not other.alike(track):
                raise NotUnderstoodError
            self._join(track, other)
            return name
        shape = self._shape(name)
        size = shape[track.axis] if len(shape) >= -track.axis else 1
        if size == 1:
            return name
        if size != track.size or track.merged:
            raise NotUnderstoodError
        return self._leading(name, track)

    def _product(self, node: onnx.NodeProto, track: Track) -> Track:
        """Fit a product of two tensors: of narrowed batches, rows of the first, or columns of
        the second."""
        a, b = node.input
        if track.axis < -2:
            node.input[:] = [self._aligned(a, track), self._aligned(b, track)]
        elif (a in self.tracks) == (b in self.tracks) or track.axis != (
            -2 if a in self.tracks else -1
        ):
            raise NotUnderstoodError
        return track

    def _channels(self, node: onnx.NodeProto, track: Track, attributes: dict[str, Any]) -> None:
        """Fit an operation with constants of one number, or one kernel, for each channel."""
        if track.axis != 1 - self._rank(node.input[0]) or track.merged:
            raise NotUnderstoodError
        if node.op_type == "Conv":
            weight = self._shape(node.input[1])
            if attributes.get("group", 1) != track.size or weight[0] != track.size:
                raise NotUnderstoodError
            next(a for a in node.attribute if a.name == "group").i = track.kept
        for index, name in enumerate(node.input[1:], start=1):
            axis = -len(self._shape(name))
            node.input[index] = self._leading(name, replace(track, axis=axis))

    def _reshape(self, node: onnx.NodeProto) -> None:
        """Fit a Reshape or an Expand: its shape says how many channels there are, or what they
        follow from."""
        x, shape = node.input
        if x not in self.tracks:
            if self._reads_sizes(node):
                raise NotUnderstoodError
            return
        track, entries = self.tracks[x], entries_of(shape, self.sizes, self.constants)
        if entries is None or x not in self.shapes:
            raise NotUnderstoodError
        before = self.shapes[x]
        copied = node.op_type == "Reshape" and not any(a.i for a in node.attribute)
        entries = [
            SizeOf(x, i) if entry == 0 and copied else entry for i, entry in enumerate(entries)
        ]
        if node.op_type == "Reshape":
            after = self._sizes_after(entries, self.shapes.get(node.output[0]))
            made = reshaped(track, before, after)
        else:
            made = track
        place = len(entries) + made.axis
        for index, entry in enumerate(entries):
            followed = self._followed(entry)
            if index != place and followed is not None:
                raise NotUnderstoodError
            if index == place and followed is not None:
                whole = made.merged or self._size(entry) == made.size
                if followed.share != made.share or not whole:
                    raise NotUnderstoodError
                self._join(made, followed)
            elif index == place and not self._free(node, entry):
                size = self._size(entry)
                if not isinstance(size, int) or (not made.merged and size != made.size):
                    raise NotUnderstoodError
                node.input[1] = self._with_entry(shape, place, made.reduced(size))
        self.tracks[node.output[0]] = made

    def _sizes_after(self, entries: list[Entry], known: tuple[Size, ...] | None) -> list[Size]:
        """Return the sizes a Reshape makes, by its shape's entries or as they are known."""
        if known is None or len(known) != len(entries):
            known = (None,) * len(entries)
        return [
            size if entry == -1 else self._size(entry)
            for entry, size in zip(entries, known, strict=True)
        ]

    def _free(self, node: onnx.NodeProto, entry: Entry) -> bool:
        """Return whether an entry leaves the size to what is read."""
        return entry == (-1 if node.op_type == "Reshape" else 1)

    def _size(self, entry: Entry) -> Size:
        """Return the size an entry of a shape stands for, every layer whole."""
        return self.shapes[entry.tensor][entry.axis] if isinstance(entry, SizeOf) else entry

    def _followed(self, entry: Entry) -> Track | None:
        """Return the track of the tensor that an entry takes the number of its kept channels of."""
        if not isinstance(entry, SizeOf) or entry.tensor not in self.tracks:
            return None
        track = self.tracks[entry.tensor]
        place = len(self.shapes[entry.tensor]) + track.axis
        return track if place == entry.axis else None

    def _with_entry(self, shape: str, place: int, size: int) -> str:
        """Return a shape like another with one entry changed."""
        key = shape, place, size
        if key in self.cut:
            return self.cut[key]
        name = self.cut[key] = self._new_name(f"{shape}/{size}")
        known = numbers(self.constants, shape)
        if known is not None:
            known[place] = size
            self.constants[name] = np.array(known, dtype=np.int64)
            return name
        maker = next((node for node in self.nodes if shape in node.output), None)
        if maker is None or maker.op_type != "Concat":
            raise NotUnderstoodError
        pieces, start = list(maker.input), 0
        for index, piece in enumerate(pieces):
            length = len(entries_of(piece, self.sizes, self.constants) or ())
            if start <= place < start + length:
                pieces[index] = self._with_entry(piece, place - start, size)
                break
            start += length
        self.nodes.append(helper.make_node("Concat", pieces, [name], name, axis=0))
        return name

    def _leading(self, name: str, track: Track) -> str:
        """Return the leading channels of a whole tensor: a constant, or what a Slice makes."""
        key = name, track.axis, track.kept
        if key in self.cut:
            return self.cut[key]
        made = self.cut[key] = self._new_name(f"{name}/first{track.kept}")
        if name in self.constants:
            value = self.constants[name]
            cut = [slice(None)] * value.ndim
            cut[track.axis] = slice(track.kept)
            self.constants[made] = np.ascontiguousarray(value[tuple(cut)])
            return made
        given = []
        for end, number in (("from", 0), ("to", track.kept), ("along", track.axis)):
            given.append(f"{made}/{end}")
            self.constants[given[-1]] = np.array([number], dtype=np.int64)
        self.nodes.append(helper.make_node("Slice", [name, *given], [made], made))
        return made

    def _keep_names(self) -> None:
        """Let the leading channels have a tensor's name where nothing reads the whole.

        Ranges of activations are known by these names.
        """
        makers = {name: node for node in self.nodes for name in node.output}
        outputs = {value.name for value in self.graph.output}
        for cut in [node for node in self.nodes if node.op_type == "Slice"]:
            whole, leading = cut.input[0], cut.output[0]
            readers = [node for node in self.nodes if whole in node.input]
            if leading not in self.cut.values() or len(readers) > 1 or whole in outputs:
                continue
            if whole in makers:
                maker, name = makers[whole], self._new_name(f"{whole}/whole")
                maker.output[:] = [name if n == whole else n for n in maker.output]
                for node in self.nodes:
                    node.input[:] = [whole if n == leading else n for n in node.input]
                cut.input[0], cut.output[0] = name, whole

    def _involved(self, node: onnx.NodeProto) -> list[Track]:
        """Return the tracks of what a node reads, and of what the sizes it reads are of."""
        tracks = [self.tracks[name] for name in node.input if name in self.tracks]
        return tracks + self._size_tracks(node)

    def _size_tracks(self, node: onnx.NodeProto) -> list[Track]:
        read = [entry for name in node.input for entry in self.sizes.get(name, [])]
        return [track for track in map(self._followed, read) if track is not None]

    def _reads_sizes(self, node: onnx.NodeProto) -> bool:
        """Return whether a node reads a number of kept channels."""
        return bool(self._size_tracks(node))

    def _shape(self, name: str) -> tuple[Size, ...]:
        if name not in self.shapes:
            raise NotUnderstoodError
        return self.shapes[name]

    def _rank(self, name: str) -> int:
        if name not in self.shapes:
            raise SpecError(f"the number of axes of {name!r} is not known: leave its layer whole")
        return len(self.shapes[name])

    def _join(self, one: Track, other: Track) -> None:
        self.parents[self._root(other.source)] = self._root(one.source)

    def _root(self, source: str) -> str:
        while self.parents[source] != source:
            source = self.parents[source]
        return source

    def _new_name(self, name: str) -> str:
        while name in self.names or name in self.constants:
            name = f"{name}'"
        self.names.add(name)
        return name


def _share(units: tuple[int, int] | None) -> Fraction:
    if units is None:
        return WHOLE
    kept, total = units
    if not 0 < kept <= total:
        raise SpecError(f"{kept} of {total} units cannot be kept")
    return Fraction(kept, total)


def _from_end(axis: int, rank: int) -> int:
    return axis % rank - rank
