"""Width: units of channels put in order on data, and the plans of layers that are narrowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from t3c.convert.layer import LayerPlan
from t3c.errors import ConvertError
from t3c.factor.metric import data_metric
from t3c.factor.width import unit_order
from t3c.nn.canonical import canonical
from t3c.nn.inputs import Inputs, check_like, evaluating, first_samples, split_batch
from t3c.nn.layers import elastic_type, geometry
from t3c.nn.observe import (
    MOMENT_BYTES,
    WIDEST,
    observe_adjoints,
    observe_moments,
    use_matters,
)
from t3c.nn.units import Member, UnitGroup, find_units, permute_
from t3c.spec import Factorization, LayerSpec

SHARES = (4, 5, 6, 7, 8, 9, 10, 11, 12, 14)  # sixteenths of the units that may be kept
# Kept channels come in multiples of the first of these that leaves eight widths: vector registers
# hold 64 bytes, and engines pack weights in tiles of as many.
TILES = (64, 32, 16, 8)
CORRECTION = 6  # outputs for each rank of a correction: with 64 of 384, nearly exact on MiniLM
CORRECTION_TILE = 8
ADJOINT_SAMPLES = 64


@dataclass(frozen=True)
class Narrowing:
    """How one layer is narrowed: its unit, and the channels it keeps at each width, by share."""

    unit: str
    factorization: Factorization
    channels: Mapping[float, int]


@dataclass(frozen=True)
class Units:
    """The units of channels that a model has, and the order of each group's: what comes first
    costs most to leave out. `refused` are the layers whose outputs are in no group, and why."""

    groups: tuple[UnitGroup, ...]
    orders: Mapping[str, Tensor]
    refused: tuple[tuple[str, str], ...] = ()


def order_units_(model: nn.Module, example: Inputs, batches: Sequence[Any]) -> Units:
    """Put units of channels in order in place, before the model is made elastic; the model's
    output stays the same.

    >>> units = t3c.order_units_(model, example, batches)  # doctest: +SKIP
    >>> config = t3c.ElasticConfig(widths=units.groups)  # doctest: +SKIP
    >>> t3c.elasticize_(model, example, config, calibration=batches)  # doctest: +SKIP
    """
    units = find_orders(model, example, batches)
    reorder_(model, units)
    return units


def find_orders(model: nn.Module, example: Inputs, batches: Sequence[Any]) -> Units:
    """Return the units of a model and the order they are to stand in; nothing is changed."""
    inputs = [split_batch(batch)[0] for batch in batches]
    for batch in inputs:
        check_like(batch, example, "the data that units are ordered on", texts=True)
    with evaluating(model), canonical(model):
        groups, refused = find_units(model, example)
        readers = {group.name: _bare(model, group.name) for group in groups}
        if not readers:
            return Units((), {}, refused)
        orders: dict[str, Tensor] = {}
        for some in _in_memory(readers):
            moments = observe_moments(model, some, inputs)
            used = {n: spec for n, spec in some.items() if use_matters(spec, ADJOINT_SAMPLES)}
            few = first_samples(inputs, ADJOINT_SAMPLES)
            adjoints = observe_adjoints(model, used, few) if used else {}
            with torch.no_grad():
                orders |= {
                    group.name: _order(model, group, moments[group.name], adjoints)
                    for group in groups
                    if group.name in some
                }
    return Units(groups, orders, refused)


def _in_memory(readers: Mapping[str, LayerSpec]) -> list[dict[str, LayerSpec]]:
    """Return layers whose moments are held at once, as many as memory is meant for."""
    found, size = [dict[str, LayerSpec]()], 0
    for name, spec in readers.items():
        mine = 8 * (spec.in_channels**2 + min(spec.out_channels, WIDEST) ** 2)
        if found[-1] and size + mine > MOMENT_BYTES:
            found.append({})
            size = 0
        found[-1][name] = spec
        size += mine
    return found


def reorder_(model: nn.Module, units: Units) -> None:
    """Put units in their order, in place."""
    with torch.no_grad(), canonical(model):
        for group in units.groups:
            permute_(model, group, units.orders[group.name])


def _order(
    model: nn.Module, group: UnitGroup, moment: Tensor, adjoints: Mapping[str, Tensor]
) -> Tensor:
    weight = model.get_submodule(group.name).weight
    assert isinstance(weight, Tensor)
    used = adjoints.get(group.name)
    outputs = None if used is None else data_metric(used)
    return unit_order(weight, moment, _member(group, group.name).columns, outputs)


def _bare(model: nn.Module, name: str) -> LayerSpec:
    """Return a layer's kind and channels, which say how to observe its inputs."""
    module = model.get_submodule(name)
    kind = elastic_type(module)
    assert kind is not None
    fields: dict[str, Any] = geometry(module)
    fields |= {side: (1,) * len(fields.get("kernel", (1, 1))) for side in ("in_size", "out_size")}
    return LayerSpec(name, kind.kind, Factorization.NONE, **fields)


def _member(group: UnitGroup, layer: str) -> Member:
    return next(member for member in group.members if member.layer == layer)


def narrowings(groups: Sequence[UnitGroup]) -> tuple[dict[str, Narrowing], dict[str, str]]:
    """Return how each layer is narrowed, and why some groups are not, by their names.

    Groups that share a layer are narrowed together. Where a layer reads units of one group and
    makes those of another it has to have as many of each.
    """
    found: dict[str, Narrowing] = {}
    left: dict[str, str] = {}
    joined: dict[str, str] = {}  # the unit of each layer
    for group in groups:
        kept = _kept(group)
        layers = [member.layer for member in group.members]
        shared = [layer for layer in layers if layer in joined]
        unlike = [x for x in shared if not _agree(found[x], _member(group, x), kept)]
        if unlike or len(kept) == 1:
            left[group.name] = f"{group.units} units are too few for a width"
            if unlike:
                other = joined[unlike[0]]
                left[group.name] = f"{unlike[0]} is narrowed with {other}, to other numbers"
            continue
        unit = joined[shared[0]] if shared else group.name
        for layer in {other for other in joined if joined[other] in {joined[s] for s in shared}}:
            found[layer], joined[layer] = replace(found[layer], unit=unit), unit
        for member in group.members:
            found[member.layer] = _narrowing(unit, member, kept, found.get(member.layer))
            joined[member.layer] = unit
    return found, left


def _kept(group: UnitGroup) -> dict[float, int]:
    """Return the units that are kept at each width, by their share of all."""
    block = max(max(member.rows, member.columns) for member in group.members)
    tile = next((t for t in TILES if group.units * block >= 8 * t), 1)
    step = max(1, tile // block)
    counts = {step * round(share * group.units / 16 / step) for share in SHARES}
    kept = sorted(count for count in counts if 0 < count < group.units)
    return {count / group.units: count for count in [*kept, group.units]}


def _agree(known: Narrowing, member: Member, kept: Mapping[float, int]) -> bool:
    """Return whether a layer that another group narrows already can be in this one too."""
    block = member.rows or member.columns
    mine = {share: count * block for share, count in kept.items()}
    return known.factorization is not Factorization.CORNER and mine == dict(known.channels)


def _narrowing(
    unit: str, member: Member, kept: Mapping[float, int], known: Narrowing | None
) -> Narrowing:
    rows, columns = bool(member.rows), bool(member.columns)
    if known is not None or (rows and columns):
        how = Factorization.CORNER
    else:
        how = Factorization.ROWS if rows else Factorization.COLUMNS
    block = member.rows or member.columns
    return Narrowing(unit, how, {share: count * block for share, count in kept.items()})


def check_units(groups: Iterable[UnitGroup], named: Mapping[str, nn.Module]) -> None:
    """Raise for units that are not those of the model's layers."""
    for group in groups:
        for member in group.members:
            module, units = named.get(member.layer), group.units
            fields: Mapping[str, Any] = {} if module is None else geometry(module)
            sides = (member.rows, "out_channels"), (member.columns, "in_channels")
            if not fields or any(n and n * units != fields[side] for n, side in sides):
                raise ConvertError(
                    f"layer {member.layer!r} does not have the {units} units of {group.name!r}: "
                    "find the units of this model anew with order_units_"
                )


def narrow_plan(plan: LayerPlan, narrowing: Narrowing) -> LayerPlan:
    """Return the plan of a layer that is narrowed in width instead of being factored."""
    how = narrowing.factorization
    cuts = how is not Factorization.ROWS and plan.spec.groups == 1
    rank = plan.spec.out_channels // CORRECTION // CORRECTION_TILE * CORRECTION_TILE
    spec = replace(
        plan.spec, factorization=how, unit=narrowing.unit, correction=rank if cuts else 0,
        bit_offsets=(),
    )  # fmt: skip
    return replace(
        plan, spec=spec, ranks=tuple(narrowing.channels.values()),
        shares=tuple(narrowing.channels), tied_bits=None, reason="",
    )  # fmt: skip
