"""FLOPs, bytes moved, kernel launches and stored bytes of a layer point, at batch 1 (paper B.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from t3c.spec import Cost, Form, Kind, LayerPoint, LayerSpec, Profile

SCALE_BYTES = 4


@dataclass(frozen=True)
class StageWork:
    """The work of one kernel: of a convolution of single points or not, and the layer's last."""

    pointwise: bool
    last: bool
    flops: int
    moved_bytes: int
    launches: int


def stage_work(spec: LayerSpec, point: LayerPoint, form: Form) -> list[StageWork]:
    """The kernels of one layer, all its runs; weights and activations move as int8."""
    if spec.kind is Kind.EMBEDDING:
        rows = spec.in_positions * spec.in_channels
        return [StageWork(False, True, 0, 2 * rows * spec.runs, spec.runs)]
    if form is Form.NARROW:
        narrow = spec.narrowed(point.rank)
        return stage_work(narrow, LayerPoint(narrow.full_rank, point.bits), Form.DENSE)
    found = []
    shapes = spec.executed_shapes(point, form)
    if form is Form.ALIGNED and len(shapes) > 1:
        # The input's channels are put in order, and those kept are read again.
        gathered = (2 * spec.in_channels + point.rank) * spec.in_positions
        found.append(StageWork(False, False, 0, gathered * spec.runs, spec.runs))
    factored = len(shapes) > 1
    strided = spec.strided_stage() if factored else 0
    groups = spec.stage_groups(point.rank) if factored else (spec.groups,)
    for index, (shape, group) in enumerate(zip(shapes, groups, strict=True)):
        before = spec.in_positions if index <= strided else spec.out_positions
        after = spec.in_positions if index < strided else spec.out_positions
        moved = prod(shape) + shape[1] * group * before + shape[0] * after
        found.append(
            StageWork(
                pointwise=spec.convolution and prod(shape[2:]) == 1,
                last=index == len(shapes) - 1,
                flops=2 * prod(shape) * after * spec.runs,
                moved_bytes=moved * spec.runs,
                launches=spec.runs,
            )
        )
    return found


def layer_work(spec: LayerSpec, point: LayerPoint, form: Form) -> Cost:
    """The work of one layer, and the bytes stored for it."""
    parts = stage_work(spec, point, form)
    return Cost(
        sum(part.flops for part in parts),
        sum(part.moved_bytes for part in parts),
        sum(part.launches for part in parts),
        stored_bytes(spec, point),
    )


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
