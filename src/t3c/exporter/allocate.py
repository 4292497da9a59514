"""Profiles for a device: what each layer point drifts, weighs and takes, and the knapsack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from t3c.artifact.devices import LayerTiming
from t3c.certify.sensitivity import EXACT_OUTPUTS, layer_sensitivities
from t3c.control.knapsack import allocations
from t3c.control.menu import Option, chain, menu
from t3c.control.profiles import pick_profiles
from t3c.convert import LayerPlan
from t3c.cost.work import stored_bytes
from t3c.nn.inputs import Inputs, select
from t3c.runtime.engines import Engine
from t3c.runtime.measured import time_layer
from t3c.spec import LayerPoint, Menu, ProfileChain

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
    floats = sum(p.spec.out_channels * p.spec.out_positions for p in plans) * EXACT_OUTPUTS
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
    """Chains over (cost, drift) for each layer, then the nested profiles of the knapsack.

    Cost is a share of the all-dense, all-8-bit model: of its summed layer time, and with
    `size_weight` of its bytes.
    """
    best = {(t.layer, t.rank): min(t.ms.values()) for t in timings}
    tops = {p.spec.name: LayerPoint(p.ranks[-1], p.bits[-1]) for p in plans}
    full_ms = sum(best[name, top.rank] for name, top in tops.items())
    full_bytes = sum(stored_bytes(p.spec, tops[p.spec.name]) for p in plans)
    chains = {}
    sensitivities = layer_sensitivities(model, select(samples, slice(0, affordable(plans))))
    for plan in plans:
        name = plan.spec.name
        options = []
        for point in (LayerPoint(k, q) for k in plan.ranks for q in plan.bits):
            time = best[name, point.rank] / full_ms
            size = stored_bytes(plan.spec, point) / full_bytes
            cost = (1 - size_weight) * time + size_weight * size
            options.append(Option(point, cost, sensitivities[name].squared_drift(point)))
        chains[name] = chain(options)
    profiles = pick_profiles(allocations(chains), worst_drift)
    return Allocated({n: menu(options) for n, options in chains.items()}, profiles)
