"""factors.safetensors: nested codes, each rank block and each bit plane stored once.

A stage at rank k is a leading corner of its weight. What a larger rank adds to a smaller one's
corner is a block; a block's codes lie in bit planes, so that a profile reads a prefix of blocks
and of each block a prefix of planes.
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
from t3c.quant.nested import Codes, encode, integers, unit_scale
from t3c.quant.pack import pack_planes, unpack_planes
from t3c.spec import MAX_BITS, LayerPoint

Floats = npt.NDArray[np.float32]
Tensors = dict[str, npt.NDArray[np.generic]]
Shapes = Sequence[tuple[int, ...]]  # of a stage at rising ranks


@dataclass(frozen=True)
class StageCodes:
    """One stage to be stored: its weight (out, in, ...), the scale (out,) its codes are made with,
    and the scale (out,) each view is read with."""

    weight: Floats
    grid: Floats
    views: Mapping[int, Floats]


def pack_layer(
    entry: LayerEntry, dense: StageCodes | None, stages: Sequence[StageCodes]
) -> Tensors:
    """Return the tensors of one layer; `dense` is None where no profile runs it at full rank."""
    parts: list[tuple[str, StageCodes, Shapes, Sequence[int]]] = []
    if dense is not None:
        parts.append(("dense", dense, [dense.weight.shape], entry.dense_bits))
    for index, stage in enumerate(stages):
        ladder = [entry.spec.stage_shapes(rank)[index] for rank in entry.ranks]
        parts.append((f"stage{index}", stage, ladder, _stage_views(entry, index)))
    tensors: Tensors = {}
    for part, stage, shapes, bits in parts:
        out, into = shapes[-1][:2]
        codes = encode(stage.weight[:out, :into], stage.grid[:out])
        scales = {view: stage.views[view][:out].astype(np.float32) for view in bits}
        tensors |= _stored(f"{entry.spec.name}/{part}", codes, shapes, scales)
    return tensors


def read_layer(
    file: Any, entry: LayerEntry, point: LayerPoint
) -> list[tuple[npt.NDArray[np.int8], Floats]]:
    """(int8 weight, row scale) of each stage that stores `point`, reading no more than it needs."""
    spec = entry.spec
    if spec.stored_dense(point):
        names, shapes = ["dense"], [[spec.dense_shape]]
    else:
        ranks = [rank for rank in entry.ranks if rank <= point.rank]
        ladder = [spec.stage_shapes(rank) for rank in ranks]
        names = [f"stage{index}" for index in range(len(ladder[-1]))]
        shapes = [[step[index] for step in ladder] for index in range(len(names))]
    try:
        return [
            _read_stage(file, f"{spec.name}/{name}", steps, q)
            for name, steps, q in zip(names, shapes, spec.stored_bits(point), strict=True)
        ]
    except SafetensorError as error:
        raise CorruptError(f"{spec.name}: {error}") from error


def trim_layer(file: Any, entry: LayerEntry, wanted: LayerEntry) -> Tensors:
    """Return the tensors that store what `wanted` has of a layer, of those that store `entry`."""
    spec = entry.spec
    parts: list[tuple[str, Shapes, Shapes, Sequence[int]]] = []
    if wanted.dense_bits:
        parts.append(("dense", [spec.dense_shape], [spec.dense_shape], wanted.dense_bits))
    if wanted.ranks:
        below = [rank for rank in entry.ranks if rank <= wanted.ranks[-1]]
        ladder, kept = ([spec.stage_shapes(rank) for rank in r] for r in (below, wanted.ranks))
        for index in range(len(kept[-1])):
            steps, least = ([step[index] for step in each] for each in (ladder, kept))
            parts.append((f"stage{index}", steps, least, _stage_views(wanted, index)))
    tensors: Tensors = {}
    try:
        for part, stored, needed, bits in parts:
            name = f"{spec.name}/{part}"
            codes = _read_codes(file, name, stored, max(bits))
            scales = {view: _read_scale(file, name, needed[-1][0], view) for view in bits}
            tensors |= _stored(name, codes, needed, scales)
    except SafetensorError as error:
        raise CorruptError(f"{spec.name}: {error}") from error
    return tensors


def layer_bytes(entry: LayerEntry, point: LayerPoint) -> int:
    """Bytes of the planes and scales that `read_layer` reads."""
    spec = entry.spec
    if spec.stored_dense(point):
        return _stage_bytes([spec.dense_shape], point.bits)
    ladder = [spec.stage_shapes(rank) for rank in entry.ranks if rank <= point.rank]
    stages = zip(zip(*ladder, strict=True), spec.stored_bits(point), strict=True)
    return sum(_stage_bytes(list(steps), q) for steps, q in stages)


def _stage_views(entry: LayerEntry, index: int) -> list[int]:
    """Return the bits of a stage's views, rising."""
    return sorted({entry.spec.stage_bits(q)[index] for q in entry.bits})


def _stored(name: str, codes: Codes, shapes: Shapes, scales: Mapping[int, Floats]) -> Tensors:
    """Return the tensors of a stage: scales, and blocks of as many planes as the largest view."""
    tensors: Tensors = {f"{name}/scale{view}": scale for view, scale in scales.items()}
    for index, corner in enumerate(_corners(shapes)):
        block = np.concatenate([codes[area].ravel() for area in corner])
        tensors[f"{name}/block{index}"] = pack_planes(block)[: max(scales)]
    return tensors


def _read_stage(
    file: Any, name: str, shapes: Shapes, bits: int
) -> tuple[npt.NDArray[np.int8], Floats]:
    codes = _read_codes(file, name, shapes, bits)
    scale = _read_scale(file, name, shapes[-1][0], bits)
    return integers(codes, bits), unit_scale(scale, bits)


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
