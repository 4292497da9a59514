"""factors.safetensors: nested codes, each rank block and each bit plane stored once.

A stage at rank k is a leading corner of its weight. What a larger rank adds to a smaller one's
corner is a block; a block's codes lie in bit planes, so that a profile reads a prefix of blocks
and of each block a prefix of planes. A narrowed layer has its one weight nested so in its widths,
and the small correction of each width beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from t3c.artifact.manifest import LayerEntry
from t3c.errors import CorruptError
from t3c.quant.groups import Shares, group_scale
from t3c.quant.nested import Codes, encode, integers, unit_scale
from t3c.quant.pack import pack_planes, unpack_planes
from t3c.spec import CORRECTION_BITS, MAX_BITS, LayerPoint, LayerSpec

Floats = npt.NDArray[np.float32]
Tensors = dict[str, npt.NDArray[np.generic]]
Shapes = Sequence[tuple[int, ...]]  # of a stage at rising ranks
DENSE_PART = "dense"


@dataclass(frozen=True)
class StageCodes:
    """One stage to be stored: its weight (out, in, ...), the scale (out,) its codes are made with,
    and the scale (out,) each view is read with. A weight in groups of columns has been divided by
    their `shares` (out, groups) of the row's grid."""

    weight: Floats
    grid: Floats
    views: Mapping[int, Floats]
    shares: Shares | None = None


@dataclass(frozen=True)
class Part:
    """A stored stage of a layer: its name, its shapes at rising ranks, the bits of its views."""

    name: str
    shapes: Shapes
    bits: Sequence[int]

    def group(self, entry: LayerEntry) -> int | None:
        """Return the columns of a group: of a part whose columns are what the layer reads."""
        return entry.group if self.name in (DENSE_PART, "stage0") else None

    def group_bytes(self, entry: LayerEntry) -> int:
        """Return the bytes of what share each group has of its row's grid."""
        group, (rows, columns) = self.group(entry), self.shapes[-1][:2]
        return 0 if group is None else rows * (columns // group)


def pack_layer(
    entry: LayerEntry, dense: StageCodes | None, stages: Mapping[str, StageCodes]
) -> Tensors:
    """Return the tensors of one layer.

    `stages` are its other stages, by the names that `stage_names` gives them; `dense` is None
    where nothing is stored dense.
    """
    given = stages if dense is None else {DENSE_PART: dense, **stages}
    tensors: Tensors = {}
    for part in _parts(entry):
        stage = given[part.name]
        out, into = part.shapes[-1][:2]
        codes = encode(stage.weight[:out, :into], stage.grid[:out])
        scales = {view: stage.views[view][:out].astype(np.float32) for view in part.bits}
        shares = None if stage.shares is None else stage.shares[:out]
        tensors |= _stored(f"{entry.spec.name}/{part.name}", codes, part.shapes, scales, shares)
    return tensors


def stage_names(spec: LayerSpec, rank: int) -> tuple[str, ...]:
    """Return what the stages of `LayerSpec.stage_shapes` are called in the file."""
    count = len(spec.stage_shapes(rank))
    if not spec.narrows:
        return tuple(f"stage{index}" for index in range(count))
    return (DENSE_PART, *(f"correction{rank}/{index}" for index in range(count - 1)))


def read_layer(
    file: Any, entry: LayerEntry, point: LayerPoint
) -> list[tuple[npt.NDArray[np.int8], Floats]]:
    """(int8 weight, scale) of each stage that stores `point`, reading no more than it needs.

    Scales are (rows,), or (rows, groups) of a stage whose columns come in groups.
    """
    try:
        return [
            _read_stage(file, f"{entry.spec.name}/{p.name}", p.shapes, p.bits[0], p.group(entry))
            for p in _read_parts(entry, point)
        ]
    except SafetensorError as error:
        raise CorruptError(f"{entry.spec.name}: {error}") from error


def trim_layer(file: Any, entry: LayerEntry, wanted: LayerEntry) -> Tensors:
    """Return the tensors that store what `wanted` has of a layer, of those that store `entry`."""
    stored = {part.name: part for part in _parts(entry)}
    tensors: Tensors = {}
    try:
        for part in _parts(wanted):
            name, last = f"{entry.spec.name}/{part.name}", part.shapes[-1]
            below = [shape for shape in stored[part.name].shapes if prod(shape) <= prod(last)]
            codes = _read_codes(file, name, below, max(part.bits))
            scales = {view: _read_scale(file, name, last[0], view) for view in part.bits}
            shares = _read_shares(file, name, last, part.group(entry))
            tensors |= _stored(name, codes, part.shapes, scales, shares)
    except SafetensorError as error:
        raise CorruptError(f"{entry.spec.name}: {error}") from error
    return tensors


def layer_bytes(entry: LayerEntry, point: LayerPoint) -> int:
    """Bytes of the planes and scales that `read_layer` reads."""
    return sum(
        _stage_bytes(part.shapes, part.bits[0]) + part.group_bytes(entry)
        for part in _read_parts(entry, point)
    )


def _parts(entry: LayerEntry) -> list[Part]:
    """Return all that is stored of a layer."""
    spec, found = entry.spec, list[Part]()
    whole = [spec.dense_shape] if entry.dense_bits else []
    if spec.narrows:
        corners = [spec.corner(rank) for rank in entry.ranks]
        found.append(Part(DENSE_PART, [*corners, *whole], sorted({*entry.bits, *entry.dense_bits})))
        for rank in entry.ranks:
            names, shapes = stage_names(spec, rank)[1:], spec.stage_shapes(rank)[1:]
            found += [Part(n, [s], [CORRECTION_BITS]) for n, s in zip(names, shapes, strict=True)]
        return found
    if whole:
        found.append(Part(DENSE_PART, whole, entry.dense_bits))
    ladder = [spec.stage_shapes(rank) for rank in entry.ranks]
    for index, shapes in enumerate(zip(*ladder, strict=True)):
        found.append(Part(f"stage{index}", shapes, _stage_views(entry, index)))
    return found


def _read_parts(entry: LayerEntry, point: LayerPoint) -> list[Part]:
    """Return what is read of a layer for a point: each part in the bits it is read in."""
    spec, ladder = entry.spec, list[Shapes]()
    names: tuple[str, ...] = (DENSE_PART,)
    if spec.narrows:
        steps = [spec.stage_shapes(rank) for rank in entry.ranks if rank <= point.rank]
        corners = [step[0] for step in steps]
        if spec.stored_dense(point):
            ladder = [[*corners, spec.dense_shape]]
        else:
            names = stage_names(spec, point.rank)
            ladder = [corners, *([shape] for shape in steps[-1][1:])]
    elif spec.stored_dense(point):
        ladder = [[spec.dense_shape]]
    else:
        names = stage_names(spec, point.rank)
        steps = [spec.stage_shapes(rank) for rank in entry.ranks if rank <= point.rank]
        ladder = [*zip(*steps, strict=True)]
    bits = spec.stored_bits(point)
    return [Part(n, shapes, [q]) for n, shapes, q in zip(names, ladder, bits, strict=True)]


def _stage_views(entry: LayerEntry, index: int) -> list[int]:
    """Return the bits of a stage's views, rising."""
    return sorted({entry.spec.stage_bits(q)[index] for q in entry.bits})


def _stored(
    name: str, codes: Codes, shapes: Shapes, scales: Mapping[int, Floats], shares: Shares | None
) -> Tensors:
    """Return the tensors of a stage: scales, and blocks of as many planes as the largest view."""
    tensors: Tensors = {f"{name}/scale{view}": scale for view, scale in scales.items()}
    if shares is not None:
        tensors[f"{name}/groups"] = shares
    for index, corner in enumerate(_corners(shapes)):
        block = np.concatenate([codes[area].ravel() for area in corner])
        tensors[f"{name}/block{index}"] = pack_planes(block)[: max(scales)]
    return tensors


def _read_stage(
    file: Any, name: str, shapes: Shapes, bits: int, group: int | None
) -> tuple[npt.NDArray[np.int8], Floats]:
    codes = _read_codes(file, name, shapes, bits)
    scale = unit_scale(_read_scale(file, name, shapes[-1][0], bits), bits)
    shares = _read_shares(file, name, shapes[-1], group)
    return integers(codes, bits), scale if shares is None else group_scale(scale, shares)


def _read_codes(file: Any, name: str, shapes: Shapes, bits: int) -> Codes:
    """The codes of the largest shape, of which all but the top `bits` are zero."""
    blocks = [file.get_slice(f"{name}/block{index}") for index in range(len(shapes))]
    stored = [block.get_shape() for block in blocks]
    if any(len(shape) != 2 or not bits <= shape[0] <= MAX_BITS for shape in stored):
        raise CorruptError(f"{name}: blocks of shapes {stored} do not hold {bits} bit planes")
    if prod(shapes[-1]) > sum(8 * shape[1] for shape in stored):
        raise CorruptError(f"{name}: a weight of shape {shapes[-1]} is not stored")
    codes: Codes = np.zeros(shapes[-1], dtype=np.uint8)
    for block, corner in zip(blocks, _corners(shapes), strict=True):
        count = sum(prod(codes[area].shape) for area in corner)
        planes = block[:bits]
        if planes.dtype != np.uint8:
            raise CorruptError(f"{name}: bit planes are uint8, not {planes.dtype}")
        flat = unpack_planes(planes, count)
        for area in corner:
            size = prod(codes[area].shape)
            codes[area] = flat[:size].reshape(codes[area].shape)
            flat = flat[size:]
    return codes


def _read_scale(file: Any, name: str, rows: int, bits: int) -> Floats:
    stored = file.get_slice(f"{name}/scale{bits}")
    if len(stored.get_shape()) != 1:
        raise CorruptError(f"{name}: scale of shape {stored.get_shape()} for {rows} rows")
    scale: Floats = stored[:rows]
    if scale.shape != (rows,) or scale.dtype != np.float32:
        raise CorruptError(f"{name}: scale of shape {scale.shape} for {rows} rows")
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise CorruptError(f"{name}: a scale is not positive and finite")
    return scale


def _read_shares(file: Any, name: str, shape: tuple[int, ...], group: int | None) -> Shares | None:
    """Return what share of its row's grid each group has; None where there are no groups."""
    if group is None:
        return None
    stored, wanted = file.get_slice(f"{name}/groups"), [shape[0], shape[1] // group]
    there = stored.get_shape()
    if len(there) != 2 or there[0] < wanted[0] or there[1] != wanted[1]:
        raise CorruptError(f"{name}: groups of shape {there}, not {wanted}")
    shares: Shares = stored[: shape[0]]
    if shares.dtype != np.uint8:
        raise CorruptError(f"{name}: shares of groups are uint8, not {shares.dtype}")
    if not shares.all():
        raise CorruptError(f"{name}: a group has no share of its row's grid")
    return shares


def _corners(shapes: Shapes) -> Iterator[tuple[tuple[slice, slice], ...]]:
    """What each shape adds to the leading corner before it: new columns of old rows, new rows."""
    out = into = 0
    for shape in shapes:
        yield (slice(0, out), slice(into, shape[1])), (slice(out, shape[0]), slice(0, shape[1]))
        out, into = shape[0], shape[1]


def _stage_bytes(shapes: Shapes, bits: int) -> int:
    total, before = 4 * shapes[-1][0], 0
    for shape in shapes:
        total += bits * -(-(prod(shape) - before) // 8)
        before = prod(shape)
    return total
