"""Narrow layers or factor them: whichever takes less time for the same drift, unit by unit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from t3c.artifact.devices import LayerTiming
from t3c.certify.sensitivity import PointDrifts, layer_sensitivities
from t3c.compression.choice import Choice
from t3c.compression.elastic import PROBED, config_for, mean_time
from t3c.control.knapsack import allocations
from t3c.control.menu import chain
from t3c.control.options import unit_options
from t3c.convert import LayerPlan, Units, elasticize_, state_of, units
from t3c.convert.width import narrowings
from t3c.device.measured import time_layers
from t3c.engines import Engine
from t3c.errors import ConvertError
from t3c.exporter.allocate import measured_shares
from t3c.nn.inputs import Inputs, select
from t3c.nn.units import Member, UnitGroup
from t3c.spec import MAX_BITS, Factorization

Curve = list[tuple[float, float]]  # squared drift and time, relative to all layers at full rank
WIDTH, RANK = "width", "rank"
CONVERTED = 64  # samples that trials are fitted to


def choose_widths(
    model: nn.Module,
    example: Inputs,
    batches: Sequence[Inputs],
    groups: Sequence[UnitGroup],
    kernels: Mapping[str, Factorization],
    engine: Engine,
) -> tuple[tuple[UnitGroup, ...], Choice | None]:
    """Return the units that layers are narrowed by instead of being factored.

    Of units that are alike one, in the middle of the network, is tried.
    """
    alike = _alike(model, groups)
    tried: dict[str, list[float]] = {WIDTH: [], RANK: []}
    taken: list[UnitGroup] = []
    for kinds in alike:
        middle = kinds[len(kinds) // 2]
        times = _times(model, example, batches, middle, kernels, engine)
        if times is None:
            continue
        for way, time in times.items():
            tried[way].append(time)
        if times[WIDTH] < times[RANK]:
            taken += [group for unit in kinds for group in unit]
    if not tried[WIDTH]:
        return (), None
    count, names = len(groups), {group.name for group in taken}
    choice = Choice(
        what="layers that could be narrowed", unit="of the time of dense, at equal drift",
        tried={way: float(np.mean(times)) for way, times in tried.items()},
        taken=f"width in {len(names)} of {count} units",
        why=f"one of each of {len(tried[WIDTH])} kinds was timed",
    )  # fmt: skip
    return tuple(group for group in groups if group.name in names), choice


def kept_units(units: Units) -> dict[str, Any]:
    """Return units as plain values, to be kept."""
    orders = {name: order.tolist() for name, order in units.orders.items()}
    return {"groups": [asdict(group) for group in units.groups], "orders": orders}


def known_units(kept: Mapping[str, Any]) -> Units:
    """Return units from what was kept of them."""
    groups = []
    for one in kept["groups"]:
        members = tuple(Member(**member) for member in one["members"])
        groups.append(UnitGroup(one["name"], one["units"], members, tuple(one["vectors"])))
    orders = {name: torch.tensor(order) for name, order in kept["orders"].items()}
    return Units(tuple(groups), orders)


def _alike(model: nn.Module, groups: Sequence[UnitGroup]) -> list[list[tuple[UnitGroup, ...]]]:
    """Return units by their kind; a unit is the groups that are narrowed together."""
    how = narrowings(groups)
    joined: dict[str, list[UnitGroup]] = {}
    for group in groups:
        if group.name in how:
            joined.setdefault(how[group.name].unit, []).append(group)
    kinds: dict[object, list[tuple[UnitGroup, ...]]] = {}
    for unit in joined.values():
        layers = dict.fromkeys(member.layer for group in unit for member in group.members)
        shapes = [model.get_submodule(layer).weight.shape for layer in layers]
        kinds.setdefault(tuple(map(tuple, shapes)), []).append(tuple(unit))  # type: ignore[arg-type]
    return list(kinds.values())


def _times(
    model: nn.Module,
    example: Inputs,
    batches: Sequence[Inputs],
    unit: tuple[UnitGroup, ...],
    kernels: Mapping[str, Factorization],
    engine: Engine,
) -> dict[str, float] | None:
    """Return what a unit takes of its dense time by width and by rank, in the mean over drifts
    that both reach; None where it cannot be narrowed at all."""
    layers = tuple(dict.fromkeys(member.layer for group in unit for member in group.members))
    samples = [select(batches[0], slice(0, CONVERTED))]
    curves: dict[str, Curve] = {}
    for way, widths in ((WIDTH, unit), (RANK, ())):
        trial = copy.deepcopy(model)
        mine = {name: kind for name, kind in kernels.items() if name in layers}
        config = config_for(mine, include=layers, bits=(MAX_BITS,), widths=widths)
        try:
            elasticize_(trial, example, config, calibration=samples)
        except ConvertError:
            return None
        curves[way] = _curve(trial, samples, engine)
    known = [curve for curve in curves.values() if len(curve) > 1]
    if not known:
        return None
    least = max(min(drift for drift, _ in curve[:-1]) for curve in known)
    most = max(drift for curve in known for drift, _ in curve)
    return {way: mean_time(curve, least, most) for way, curve in curves.items()}


def _curve(trial: nn.Module, samples: Sequence[Inputs], engine: Engine) -> Curve:
    """Return what the knapsack makes of a unit's layers: squared drift over time, dense last."""
    plans = state_of(trial).plan.layers
    timings = _timings(plans, engine)
    drifts = PointDrifts(
        layer_sensitivities(trial, select(samples[0], slice(0, PROBED))),
        {plan.spec.name: plan.bits for plan in plans},
    )  # fmt: skip
    shared = {unit.name: unit for unit in units(plans)}
    offered = unit_options(shared, measured_shares(plans, timings), drifts, 0.0)
    path = allocations({name: chain(options) for name, options in offered.items()})
    top = path[-1].squared_drift
    return [(max(step.squared_drift - top, 0.0), step.cost) for step in path]


def _timings(plans: Sequence[LayerPlan], engine: Engine) -> tuple[LayerTiming, ...]:
    return time_layers(engine, [(plan.spec, plan.ranks) for plan in plans])
