"""FLOPs, bytes moved, kernel launches and stored bytes of a layer point, at batch 1 (paper B.5)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from t3c.spec import Cost, Form, LayerPoint, LayerSpec, Profile

SCALE_BYTES = 4


def layer_work(spec: LayerSpec, point: LayerPoint, form: Form) -> Cost:
    """The work of one layer; weights and activations move as int8."""
    flops = moved = 0
    shapes = spec.executed_shapes(point, form)
    strided = spec.strided_stage() if len(shapes) > 1 else 0
    for index, shape in enumerate(shapes):
        before = spec.in_positions if index <= strided else spec.out_positions
        after = spec.in_positions if index < strided else spec.out_positions
        flops += 2 * prod(shape) * after
        moved += prod(shape) + shape[1] * spec.groups * before + shape[0] * after
    return Cost(flops, moved, len(shapes), stored_bytes(spec, point))


def stored_bytes(spec: LayerSpec, point: LayerPoint) -> int:
    """Bytes of the code planes and row scales a point needs, without its bias."""
    dense = spec.stored_dense(point)
    shapes = (spec.dense_shape,) if dense else spec.stage_shapes(point.rank)
    return sum(-(-prod(s) * point.bits // 8) + SCALE_BYTES * s[0] for s in shapes)


def profile_work(
    specs: Mapping[str, LayerSpec], profile: Profile, forms: Mapping[str, Form]
) -> Cost:
    """The summed work of a profile's layers."""
    parts = (layer_work(specs[n], p, forms[n]) for n, p in profile.points.items())
    return sum(parts, start=Cost())
