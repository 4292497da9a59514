"""Where the kept channels of a narrowed tensor lie, and where an operation moves them to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

from t3c.graph.shapes import Size


class NotUnderstoodError(Exception):
    """A narrowed tensor meets something that may need the channels left out."""


@dataclass(frozen=True)
class Track:
    """The kept channels of a tensor: a leading share of an axis, counted from the end.

    `size` is that of the whole axis. Where outer axes are merged into it, `size` is the inner
    part's, and the kept channels are a leading share of each run of so many. `source` is an output
    of a narrowed layer that they come from.
    """

    axis: int
    size: int
    share: Fraction
    source: str
    merged: bool = False

    @property
    def kept(self) -> int:
        return self.reduced(self.size)

    def reduced(self, size: int) -> int:
        """Return the share of a size, which has to be a whole number."""
        if (size * self.share).denominator != 1:
            raise NotUnderstoodError
        return int(size * self.share)

    def alike(self, other: Track) -> bool:
        """Return whether two tensors keep the same channels on the same axis."""
        return replace(self, source="") == replace(other, source="")


def reshaped(track: Track, before: Sequence[Size], after: Sequence[Size]) -> Track:
    """Return where a Reshape from one shape to another puts the kept channels."""
    place = len(before) + track.axis
    behind = tuple(before[place + 1 :])
    start = None if track.merged else _start(before, after, place)
    if start is not None:
        while start < len(after) - 1 and after[start] == 1:
            start += 1
        size = _first_size(before[place:], after[start:])
        if size is not None and (size * track.share).denominator == 1:
            return replace(track, axis=start - len(after), size=size)
    end = len(after) - len(behind) - 1
    if end < 0 or tuple(after[end + 1 :]) != behind or None in behind:
        raise NotUnderstoodError
    whole = after[end]
    if whole == track.size:
        return replace(track, axis=end - len(after), merged=False)
    if end == 0 or (isinstance(whole, int) and whole % track.size == 0):
        return replace(track, axis=end - len(after), merged=True)
    raise NotUnderstoodError


def _start(before: Sequence[Size], after: Sequence[Size], place: int) -> int | None:
    """Return from which axis on the new shape holds what the old one holds from `place` on."""
    if None not in before[:place] and tuple(after[:place]) == tuple(before[:place]):
        return place if place < len(after) else None
    whole = _product(before[place:])
    for start in reversed(range(len(after))):
        if whole is not None and _product(after[start:]) == whole:
            return start
    return None


def _first_size(before: Sequence[Size], after: Sequence[Size]) -> int | None:
    """Return the first of the new sizes, by the others if it is not known itself."""
    if isinstance(after[0], int):
        return after[0]
    whole, others = _product(before), _product(after[1:])
    return None if whole is None or others is None else whole // others


def _product(sizes: Sequence[Size]) -> int | None:
    known = [size for size in sizes if isinstance(size, int)]
    return prod(known) if len(known) == len(sizes) else None


@dataclass(frozen=True)
class Move:
    """Describe what an operation that reads one narrowed tensor does to its axes.

    `place` is the axis of the kept channels, from the start. Of the other inputs, `numbers` are
    those of short constants, and `ranks` the ranks.
    """

    attributes: dict[str, Any]
    rank: int
    place: int
    numbers: Sequence[Sequence[int] | None]
    ranks: Sequence[int | None]

    def axes(self, index: int = 0, rank: int | None = None) -> list[int]:
        """Return the axes another input names, from the start."""
        if index >= len(self.numbers):
            raise NotUnderstoodError
        given = self.numbers[index]
        if given is None:
            raise NotUnderstoodError
        return [axis % (rank or self.rank) for axis in given]

    def axis(self, otherwise: int) -> int:
        """Return the axis an attribute names, from the start."""
        axis: int = self.attributes.get("axis", otherwise)
        return axis % self.rank


def _kept(move: Move, others: bool) -> int:
    """Return the axis as it is, if an operation only works along others."""
    if not others:
        raise NotUnderstoodError
    return move.place - move.rank


def _gathered(move: Move) -> int:
    axis, rank = move.axis(0), move.ranks[0]
    if axis == move.place or rank is None:
        raise NotUnderstoodError
    return move.place - move.rank if axis < move.place else move.place - move.rank - rank + 1


def _padded(move: Move) -> int:
    pads = move.numbers[0]
    if pads is None or len(pads) != 2 * move.rank or len(move.numbers) > 2:
        raise NotUnderstoodError
    return _kept(move, pads[move.place] == pads[move.place + move.rank] == 0)


def _sliced(move: Move) -> int:
    return _kept(move, move.place not in move.axes(2))


def _reduced(move: Move) -> int:
    axes = move.axes()
    if not axes or move.attributes.get("keepdims", 1):
        return _kept(move, bool(axes) and move.place not in axes)
    return _squeezed(move)


def _squeezed(move: Move) -> int:
    axes = move.axes()
    return _kept(move, move.place not in axes) + sum(axis > move.place for axis in axes)


def _transposed(move: Move) -> int:
    perm: list[int] = list(move.attributes.get("perm") or reversed(range(move.rank)))
    return perm.index(move.place) - move.rank


def _unsqueezed(move: Move) -> int:
    given = move.numbers[0]
    rank = move.rank + len(given or ())
    axes = move.axes(rank=rank)
    return [axis for axis in range(rank) if axis not in axes][move.place] - rank


MOVES: dict[str, Callable[[Move], int]] = {
    "AveragePool": lambda move: _kept(move, move.place < 2),
    "Gather": _gathered,
    "GlobalAveragePool": lambda move: _kept(move, move.place < 2),
    "LayerNormalization": lambda move: _kept(move, move.place < move.axis(-1)),
    "MaxPool": lambda move: _kept(move, move.place < 2),
    "Pad": _padded,
    "ReduceMean": _reduced,
    "ReduceSum": _reduced,
    "Slice": _sliced,
    "Softmax": lambda move: _kept(move, move.place != move.axis(-1)),
    "Split": lambda move: _kept(move, move.place != move.axis(0)),
    "Squeeze": _squeezed,
    "Transpose": _transposed,
    "Trilu": lambda move: _kept(move, move.place < move.rank - 2),
    "Unsqueeze": _unsqueezed,
}
