"""Profiles for a device: what each layer point drifts, weighs and takes, and the knapsack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from t3c.artifact.devices import LayerTiming
from t3c.certify.sensitivity import EXACT_OUTPUTS, layer_sensitivities
from t3c.control.knapsack import allocations
from t3c.control.menu import Option, chain
from t3c.control.profiles import pick_profiles
from t3c.convert import LayerPlan, Unit, units
from t3c.cost.work import stored_bytes
from t3c.nn.inputs import Inputs, select
from t3c.runtime.engines import Engine
from t3c.runtime.measured import time_layer
from t3c.spec import LayerPoint, Menu, Profile, ProfileChain

Say = Callable[[str], object]
SAMPLES, ADJOINT_BYTES = 32, 4 << 30


@dataclass(frozen=True)
class Allocated:
    """The menu of each layer, and the profiles."""

    menus: Mapping[str, Menu]
    profiles: ProfileChain


def time_layers(engine: Engine, plans: Sequence[LayerPlan], say: Say) -> tuple[LayerTiming, ...]:
    """Every rank of every layer in every form, on the engine. Layers of one geometry share."""
    shared: dict[object, list[LayerTiming]] = {}
    timings: list[LayerTiming] = []
    for index, plan in enumerate(plans):
        spec = plan.spec
        key = (replace(spec, name=""), plan.ranks)
        if key not in shared:
            say(f"timing layer {index + 1} of {len(plans)}: {spec.name}")
            shared[key] = time_layer(engine, spec, plan.ranks)
        timings += [t.model_copy(update={"layer": spec.name}) for t in shared[key]]
    return tuple(timings)


def affordable(plans: Sequence[LayerPlan]) -> int:
    """How many samples' adjoints of all layers fit into memory at once."""
    outputs = (p.spec.runs * p.spec.out_channels * p.spec.out_positions for p in plans)
    floats = sum(outputs) * EXACT_OUTPUTS
    return int(min(SAMPLES, max(2, ADJOINT_BYTES // (4 * floats))))


def allocate(
    model: nn.Module,
    samples: Inputs,
    plans: Sequence[LayerPlan],
    timings: tuple[LayerTiming, ...],
    *,
    worst_drift: float,
    size_weight: float,
) -> Allocated:
    """Chains over (cost, drift) for each unit of layers, then the nested profiles of the knapsack.

    Cost is a share of the all-dense, all-8-bit model: of its summed layer time, and with
    `size_weight` of its bytes.
    """
    best = {(t.layer, t.rank): min(t.ms.values()) for t in timings}
    specs = {p.spec.name: p.spec for p in plans}
    tops = {p.spec.name: LayerPoint(p.ranks[-1], p.bits[-1]) for p in plans}
    full_ms = sum(specs[name].runs * best[name, top.rank] for name, top in tops.items())
    full_bytes = sum(stored_bytes(specs[name], top) for name, top in tops.items())
    sensitivities = layer_sensitivities(model, select(samples, slice(0, affordable(plans))))
    drift: dict[tuple[str, LayerPoint], float] = {}

    def option(unit: Unit, point: LayerPoint) -> Option:
        cost = squared = 0.0
        for name, mine in unit.layer_points(point).items():
            time = specs[name].runs * best[name, mine.rank] / full_ms
            size = stored_bytes(specs[name], mine) / full_bytes
            cost += (1 - size_weight) * time + size_weight * size
            if (name, mine) not in drift:
                drift[name, mine] = sensitivities[name].squared_drift(mine)
            squared += drift[name, mine]
        return Option(point, cost, squared)

    shared = {unit.name: unit for unit in units(plans)}
    chains = {n: chain([option(u, point) for point in u.points()]) for n, u in shared.items()}
    profiles = pick_profiles(allocations(chains), worst_drift)
    return Allocated(_menus(shared, chains), _by_layer(shared, profiles))


def _menus(shared: Mapping[str, Unit], chains: Mapping[str, Sequence[Option]]) -> dict[str, Menu]:
    """The points of each layer along its unit's chain."""
    menus: dict[str, Menu] = {}
    for name, options in chains.items():
        along = [shared[name].layer_points(option.point) for option in options]
        for layer in along[0]:
            menus[layer] = Menu(tuple(dict.fromkeys(points[layer] for points in along)))
    return menus


def _by_layer(shared: Mapping[str, Unit], chain: ProfileChain) -> ProfileChain:
    """Profiles of units as profiles of layers."""
    profiles = []
    for profile in chain:
        points: dict[str, LayerPoint] = {}
        for name, point in profile.points.items():
            points |= shared[name].layer_points(point)
        profiles.append(Profile(profile.name, points))
    return ProfileChain(tuple(profiles))
