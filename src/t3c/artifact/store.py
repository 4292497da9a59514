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
    """The tensors that store one layer; `dense` is None where no profile runs it at full rank."""
    tensors: Tensors = {}
    if dense is not None:
        shape = [dense.weight.shape]
        _pack_stage(f"{entry.spec.name}/dense", dense, shape, entry.dense_bits, tensors)
    for index, stage in enumerate(stages):
        shapes = [entry.spec.stage_shapes(rank)[index] for rank in entry.ranks]
        bits = sorted({entry.spec.stage_bits(q)[index] for q in entry.bits})
        _pack_stage(f"{entry.spec.name}/stage{index}", stage, shapes, bits, tensors)
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
    """The tensors that store what `wanted` has of a layer, of those that store `entry`."""
    spec, tensors = entry.spec, Tensors()
    try:
        if wanted.dense_bits:
            name, shape = f"{spec.name}/dense", [spec.dense_shape]
            _trim_stage(file, name, shape, shape, wanted.dense_bits, tensors)
        ladder = [
            spec.stage_shapes(rank) for rank in entry.ranks if rank <= max(wanted.ranks, default=0)
        ]
        kept = [spec.stage_shapes(rank) for rank in wanted.ranks]
        for index in range(len(kept[-1]) if kept else 0):
            steps, least = ([step[index] for step in each] for each in (ladder, kept))
            bits = sorted({spec.stage_bits(q)[index] for q in wanted.bits})
            _trim_stage(file, f"{spec.name}/stage{index}", steps, least, bits, tensors)
    except SafetensorError as error:
        raise CorruptError(f"{spec.name}: {error}") from error
    return tensors


def _trim_stage(
    file: Any,
    name: str,
    shapes: Sequence[tuple[int, ...]],
    kept: Sequence[tuple[int, ...]],
    bits: Sequence[int],
    tensors: Tensors,
) -> None:
    _pack_blocks(name, _read_codes(file, name, shapes, max(bits)), kept, bits, tensors)
    for view in bits:
        tensors[f"{name}/scale{view}"] = _read_scale(file, name, kept[-1][0], view)


def layer_bytes(entry: LayerEntry, point: LayerPoint) -> int:
    """Bytes of the planes and scales that `read_layer` reads."""
    spec = entry.spec
    if spec.stored_dense(point):
        return _stage_bytes([spec.dense_shape], point.bits)
    ladder = [spec.stage_shapes(rank) for rank in entry.ranks if rank <= point.rank]
    stages = zip(zip(*ladder, strict=True), spec.stored_bits(point), strict=True)
    return sum(_stage_bytes(list(steps), q) for steps, q in stages)


def _pack_stage(
    name: str,
    stage: StageCodes,
    shapes: Sequence[tuple[int, ...]],
    bits: Sequence[int],
    tensors: Tensors,
) -> None:
    out, into = shapes[-1][:2]
    codes = encode(stage.weight[:out, :into], stage.grid[:out])
    _pack_blocks(name, codes, shapes, bits, tensors)
    for view in bits:
        tensors[f"{name}/scale{view}"] = stage.views[view][:out].astype(np.float32)


def _pack_blocks(
    name: str,
    codes: Codes,
    shapes: Sequence[tuple[int, ...]],
    bits: Sequence[int],
    tensors: Tensors,
) -> None:
    """Blocks of as many planes as the largest view has."""
    for index, block in enumerate(_blocks(codes, shapes)):
        tensors[f"{name}/block{index}"] = pack_planes(block)[: max(bits)]


def _read_stage(
    file: Any, name: str, shapes: Sequence[tuple[int, ...]], bits: int
) -> tuple[npt.NDArray[np.int8], Floats]:
    codes = _read_codes(file, name, shapes, bits)
    scale = _read_scale(file, name, shapes[-1][0], bits)
    return integers(codes, bits), unit_scale(scale, bits)


def _read_codes(file: Any, name: str, shapes: Sequence[tuple[int, ...]], bits: int) -> Codes:
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


def _blocks(codes: Codes, shapes: Sequence[tuple[int, ...]]) -> Iterator[Codes]:
    for corner in _corners(shapes):
        yield np.concatenate([codes[area].ravel() for area in corner])


def _corners(shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[slice, slice], ...]]:
    """What each shape adds to the leading corner before it: new columns of old rows, new rows."""
    out = into = 0
    for shape in shapes:
        yield (slice(0, out), slice(into, shape[1])), (slice(out, shape[0]), slice(0, shape[1]))
        out, into = shape[0], shape[1]


def _stage_bytes(shapes: Sequence[tuple[int, ...]], bits: int) -> int:
    total, before = 4 * shapes[-1][0], 0
    for shape in shapes:
        total += bits * -(-(prod(shape) - before) // 8)
        before = prod(shape)
    return total
