"""Narrow layers or factor them: whichever takes less time for the same drift, unit by unit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from t3c.artifact.devices import LayerTiming
from t3c.certify.sensitivity import LayerSensitivity, PointDrifts, layer_sensitivities
from t3c.compression.choice import Choice
from t3c.compression.elastic import PROBED, config_for, mean_time
from t3c.control.knapsack import allocations
from t3c.control.menu import chain
from t3c.control.options import unit_options
from t3c.convert import LayerPlan, Units, elasticize_, state_of, units
from t3c.convert.width import narrowings
from t3c.device.measured import time_layers
from t3c.engines import Engine
from t3c.exporter.allocate import measured_shares
from t3c.nn.canonical import canonical
from t3c.nn.inputs import Inputs, select
from t3c.nn.units import Member, UnitGroup
from t3c.nn.view import elastic_weights
from t3c.spec import MAX_BITS, Factorization

Curve = list[tuple[float, float]]  # squared drift and time, relative to all layers at full rank
WIDTH, RANK = "width", "rank"
CONVERTED = 2  # batches that trials are fitted to


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
    if not alike:
        return (), None
    curves = _curves(model, example, batches, [_middle(kind) for kind in alike], kernels, engine)
    tried: dict[str, list[float]] = {WIDTH: [], RANK: []}
    taken: list[UnitGroup] = []
    for kind, ways in zip(alike, curves, strict=True):
        known = [curve for curve in ways.values() if len(curve) > 1]
        if not known:
            continue
        least = max(min(drift for drift, _ in curve[:-1]) for curve in known)
        most = max(drift for curve in known for drift, _ in curve)
        times = {way: mean_time(curve, least, most) for way, curve in ways.items()}
        for way, time in times.items():
            tried[way].append(time)
        if times[WIDTH] < times[RANK]:
            taken += [group for unit in kind for group in unit]
    if not tried[WIDTH]:
        return (), None
    names = {group.name for group in taken}
    choice = Choice(
        what="layers that could be narrowed", unit="of the time of dense, at equal drift",
        tried={way: float(np.mean(times)) for way, times in tried.items()},
        taken=f"width in {len(names)} of {len(groups)} units",
        why=f"one of each of {len(tried[WIDTH])} kinds was timed",
    )  # fmt: skip
    return tuple(group for group in groups if group.name in names), choice


def kept_units(units: Units) -> dict[str, Any]:
    """Return units as plain values, to be kept."""
    orders = {name: order.tolist() for name, order in units.orders.items()}
    groups = [asdict(group) for group in units.groups]
    return {"groups": groups, "orders": orders, "refused": units.refused}


def known_units(kept: Mapping[str, Any]) -> Units:
    """Return units from what was kept of them."""
    groups = []
    for one in kept["groups"]:
        members = tuple(Member(**member) for member in one["members"])
        groups.append(UnitGroup(one["name"], one["units"], members, tuple(one["vectors"])))
    orders = {name: torch.tensor(order) for name, order in kept["orders"].items()}
    return Units(tuple(groups), orders, tuple(map(tuple, kept["refused"])))


def _alike(model: nn.Module, groups: Sequence[UnitGroup]) -> list[list[tuple[UnitGroup, ...]]]:
    """Return units by their kind; a unit is the groups that are narrowed together."""
    how, _ = narrowings(groups)
    layers = {member.layer for group in groups for member in group.members}
    with canonical(model):
        shapes = {name: tuple(model.get_parameter(f"{name}.weight").shape) for name in layers}
    joined: dict[str, list[UnitGroup]] = {}
    for group in groups:
        if group.name in how:
            joined.setdefault(how[group.name].unit, []).append(group)
    kinds: dict[object, list[tuple[UnitGroup, ...]]] = {}
    for unit in joined.values():
        key = tuple(shapes[layer] for layer in _layers(unit))
        kinds.setdefault(key, []).append(tuple(unit))
    return list(kinds.values())


def _middle(kind: Sequence[tuple[UnitGroup, ...]]) -> tuple[UnitGroup, ...]:
    return kind[len(kind) // 2]


def _layers(unit: Sequence[UnitGroup]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(member.layer for group in unit for member in group.members))


def _curves(
    model: nn.Module,
    example: Inputs,
    batches: Sequence[Inputs],
    units_tried: Sequence[tuple[UnitGroup, ...]],
    kernels: Mapping[str, Factorization],
    engine: Engine,
) -> list[dict[str, Curve]]:
    """Return the curve of each unit by width and by rank; none where nothing can be narrowed."""
    groups = tuple(group for unit in units_tried for group in unit)
    layers, samples = _layers(groups), select(batches[0], slice(0, PROBED))
    curves: list[dict[str, Curve]] = [{} for _ in units_tried]
    sensitivities: Mapping[str, LayerSensitivity] = {}
    for way, widths in ((WIDTH, groups), (RANK, ())):
        trial = copy.deepcopy(model)
        mine = {name: kind for name, kind in kernels.items() if name in layers}
        config = config_for(mine, include=layers, bits=(MAX_BITS,), widths=widths, metric="inputs")
        elasticize_(trial, example, config, calibration=batches[:CONVERTED])
        weights = elastic_weights(trial)
        # Inputs and adjoints are those of the full view, which both have in common.
        sensitivities = sensitivities or layer_sensitivities(trial, samples)
        known = {n: replace(sensitivities[n], weight=weight) for n, weight in weights.items()}
        plans = {plan.spec.name: plan for plan in state_of(trial).plan.layers}
        timings = time_layers(engine, [(plan.spec, plan.ranks) for plan in plans.values()])
        for curve, unit in zip(curves, units_tried, strict=True):
            mine_only = [plans[name] for name in _layers(unit) if name in plans]
            curve[way] = _curve(mine_only, known, timings)
    return curves


def _curve(
    plans: Sequence[LayerPlan],
    sensitivities: Mapping[str, LayerSensitivity],
    timings: Sequence[LayerTiming],
) -> Curve:
    """Return what the knapsack makes of a unit's layers: squared drift over time, dense last."""
    drifts = PointDrifts(sensitivities, {plan.spec.name: plan.bits for plan in plans})
    shared = {unit.name: unit for unit in units(plans)}
    offered = unit_options(shared, measured_shares(plans, timings), drifts, 0.0)
    path = allocations({name: chain(options) for name, options in offered.items()})
    top = path[-1].squared_drift
    return [(max(step.squared_drift - top, 0.0), step.cost) for step in path]
