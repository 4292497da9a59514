"""A topology while it is fit to narrowed layers: what is known of its tensors, what was changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from t3c.errors import SpecError
from t3c.graph.shapes import Constants, Entry, Shapes, Size, SizeOf, entries_of, numbers
from t3c.graph.tracks import NotUnderstoodError, Track


class Rewriting:
    """Nodes so far, constants, and of each tensor where its kept channels lie."""

    def __init__(self, graph: onnx.GraphProto, constants: Constants, shapes: Shapes) -> None:
        self.shapes = shapes
        self.constants: dict[str, npt.NDArray[Any]] = dict(constants)
        self.names = {n for node in graph.node for n in (*node.input, *node.output)}
        self.outputs = {value.name for value in graph.output}
        self.nodes: list[onnx.NodeProto] = []
        self.tracks: dict[str, Track] = {}
        self.sizes: dict[str, list[Entry]] = {}
        self.cut: dict[tuple[str, int, int], str] = {}
        self.parents: dict[str, str] = {}  # of narrowed outputs that end in the same layers

    def keep_names(self) -> None:
        """Let the leading channels have a tensor's name where nothing reads the whole.

        Ranges of activations are known by these names.
        """
        makers = {name: node for node in self.nodes for name in node.output}
        for cut in [node for node in self.nodes if node.op_type == "Slice"]:
            whole, leading = cut.input[0], cut.output[0]
            readers = [node for node in self.nodes if whole in node.input]
            if leading not in self.cut.values() or len(readers) > 1 or whole in self.outputs:
                continue
            if whole in makers:
                maker, name = makers[whole], self.new_name(f"{whole}/whole")
                maker.output[:] = [name if n == whole else n for n in maker.output]
                for node in self.nodes:
                    node.input[:] = [whole if n == leading else n for n in node.input]
                cut.input[0], cut.output[0] = name, whole

    def leading(self, name: str, track: Track) -> str:
        """Return the leading channels of a whole tensor: a constant, or what a Slice makes."""
        key = name, track.axis, track.kept
        if key in self.cut:
            return self.cut[key]
        made = self.cut[key] = self.new_name(f"{name}/first{track.kept}")
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

    def with_entry(self, shape: str, place: int, size: int) -> str:
        """Return a shape like another with one entry changed."""
        key = shape, place, size
        if key in self.cut:
            return self.cut[key]
        name = self.cut[key] = self.new_name(f"{shape}/{size}")
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
                pieces[index] = self.with_entry(piece, place - start, size)
                break
            start += length
        self.nodes.append(helper.make_node("Concat", pieces, [name], name, axis=0))
        return name

    def involved(self, node: onnx.NodeProto) -> list[Track]:
        """Return the tracks of what a node reads, and of what the sizes it reads are of."""
        tracks = [self.tracks[name] for name in node.input if name in self.tracks]
        return tracks + self.size_tracks(node)

    def size_tracks(self, node: onnx.NodeProto) -> list[Track]:
        read = [entry for name in node.input for entry in self.sizes.get(name, [])]
        return [track for track in map(self.followed, read) if track is not None]

    def reads_sizes(self, node: onnx.NodeProto) -> bool:
        """Return whether a node reads a number of kept channels."""
        return bool(self.size_tracks(node))

    def size(self, entry: Entry) -> Size:
        """Return the size an entry of a shape stands for, every layer whole."""
        return self.shapes[entry.tensor][entry.axis] if isinstance(entry, SizeOf) else entry

    def followed(self, entry: Entry) -> Track | None:
        """Return the track of the tensor that an entry takes the number of its kept channels of."""
        if not isinstance(entry, SizeOf) or entry.tensor not in self.tracks:
            return None
        track = self.tracks[entry.tensor]
        place = len(self.shapes[entry.tensor]) + track.axis
        return track if place == entry.axis else None

    def shape(self, name: str) -> tuple[Size, ...]:
        if name not in self.shapes:
            raise NotUnderstoodError
        return self.shapes[name]

    def rank(self, name: str) -> int:
        if name not in self.shapes:
            raise SpecError(f"the number of axes of {name!r} is not known: leave its layer whole")
        return len(self.shapes[name])

    def join(self, one: Track, other: Track) -> None:
        self.parents[self.root(other.source)] = self.root(one.source)

    def root(self, source: str) -> str:
        while self.parents[source] != source:
            source = self.parents[source]
        return source

    def new_name(self, name: str) -> str:
        while name in self.names or name in self.constants:
            name = f"{name}'"
        self.names.add(name)
        return name
