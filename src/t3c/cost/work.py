"""FLOPs, bytes moved, kernel launches and stored bytes of a layer point, at batch 1 (paper B.5)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from t3c.spec import Cost, Form, Kind, LayerPoint, LayerSpec, Profile

SCALE_BYTES = 4


def layer_work(spec: LayerSpec, point: LayerPoint, form: Form) -> Cost:
    """The work of one layer, all its runs; weights and activations move as int8."""
    size = stored_bytes(spec, point)
    if spec.kind is Kind.EMBEDDING:
        rows = spec.in_positions * spec.in_channels
        return Cost(0, 2 * rows * spec.runs, spec.runs, size)
    flops = moved = 0
    shapes = spec.executed_shapes(point, form)
    factored = len(shapes) > 1
    strided = spec.strided_stage() if factored else 0
    groups = spec.stage_groups(point.rank) if factored else (spec.groups,)
    for index, (shape, group) in enumerate(zip(shapes, groups, strict=True)):
        before = spec.in_positions if index <= strided else spec.out_positions
        after = spec.in_positions if index < strided else spec.out_positions
        flops += 2 * prod(shape) * after
        moved += prod(shape) + shape[1] * group * before + shape[0] * after
    return Cost(flops * spec.runs, moved * spec.runs, len(shapes) * spec.runs, size)


def stored_bytes(spec: LayerSpec, point: LayerPoint) -> int:
    """Bytes of the code planes and row scales a point needs, without its bias."""
    stored = zip(spec.stored_shapes(point), spec.stored_bits(point), strict=True)
    return sum(-(-prod(shape) * q // 8) + SCALE_BYTES * shape[0] for shape, q in stored)


def profile_work(
    specs: Mapping[str, LayerSpec], profile: Profile, forms: Mapping[str, Form]
) -> Cost:
    """The summed work of a profile's layers."""
    parts = (layer_work(specs[n], p, forms[n]) for n, p in profile.points.items())
    return sum(parts, start=Cost())
