"""Profiles for a device: what each layer point drifts, weighs and takes, and the knapsack."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from t3c.artifact.devices import LayerTiming
from t3c.certify.sensitivity import EXACT_OUTPUTS, layer_sensitivities
from t3c.control.knapsack import allocations
from t3c.control.menu import Option, chain, dropped
from t3c.control.profiles import spread
from t3c.control.snap import Wish, snap
from t3c.convert import LayerPlan, Unit, units
from t3c.cost.work import stored_bytes
from t3c.exporter.proposals import template_wishes
from t3c.nn.inputs import Inputs, select
from t3c.spec import LayerPoint, Menu, Profile, ProfileChain

SAMPLES, ADJOINT_BYTES = 32, 4 << 30


@dataclass(frozen=True)
class Wanted:
    """What profiles to propose: `count` of them, by the knapsack or by a template.

    `worst_drift` bounds the drift of the knapsack's smallest; `layer_drift`, if given, that of
    every unit of layers; `tie` says what shares a point.
    """

    count: int
    worst_drift: float
    size_weight: float
    proposals: Literal["knapsack", "template"] = "knapsack"
    tie: Literal["block", "stage"] = "block"
    layer_drift: float | None = None


@dataclass(frozen=True)
class Allocated:
    """The menu of each layer, the profiles, and the first-order drift of each.

    `notes` say where a proposal was not simply rounded to its menu, and why; `dropped`, by unit,
    why a point is not on the menu.
    """

    menus: Mapping[str, Menu]
    profiles: ProfileChain
    drifts: Mapping[str, float]
    notes: tuple[str, ...] = ()
    dropped: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def renamed(self, names: Mapping[str, str]) -> Allocated:
        """The profiles that have a new name, under it; the others are dropped."""
        kept = [Profile(names[p.name], p.points) for p in self.profiles if p.name in names]
        drifts = {names[name]: drift for name, drift in self.drifts.items() if name in names}
        return replace(self, profiles=ProfileChain(tuple(kept)), drifts=drifts)


def affordable(plans: Sequence[LayerPlan]) -> int:
    """How many samples' adjoints of all layers fit into memory at once."""
    outputs = (p.spec.runs * p.spec.out_channels * p.spec.out_positions for p in plans)
    floats = sum(outputs) * EXACT_OUTPUTS
    return int(min(SAMPLES, max(2, ADJOINT_BYTES // (4 * floats))))


def allocate(
    model: nn.Module,
    samples: Inputs,
    plans: Sequence[LayerPlan],
    timings: Sequence[LayerTiming],
    wanted: Wanted,
) -> Allocated:
    """Chains over (cost, drift) for each unit of layers, and nested profiles proposed over them.

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
            cost += (1 - wanted.size_weight) * time + wanted.size_weight * size
            if (name, mine) not in drift:
                drift[name, mine] = sensitivities[name].squared_drift(mine)
            squared += drift[name, mine]
        return Option(point, cost, squared)

    shared = {unit.name: unit for unit in units(plans, wanted.tie)}
    offered = {n: [option(u, point) for point in u.points()] for n, u in shared.items()}
    chains = {name: chain(options) for name, options in offered.items()}
    snapped = snap(propose(shared, chains, wanted), chains, tolerance=wanted.layer_drift)
    # Proposals that snap to the same points are one.
    different = {tuple(sorted(a.points.items(), key=_name)): a for a in snapped.allocations}
    named = {f"candidate{i + 1}": a for i, a in enumerate(different.values())}
    profiles = ProfileChain(tuple(Profile(name, a.points) for name, a in named.items()))
    return Allocated(
        _menus(shared, chains),
        _by_layer(shared, profiles),
        {name: a.drift for name, a in named.items()},
        tuple(
            f"{note.unit}: {_shares(shared[note.unit], f'{_text(note.point)}: {note.reason}')}"
            for note in snapped.notes
        ),
        {
            name: {
                _shares(unit, _text(point)): _shares(unit, reason)
                for point, reason in dropped(offered[name], chains[name]).items()
            }
            for name, unit in shared.items()
        },
    )


def propose(
    shared: Mapping[str, Unit], chains: Mapping[str, Sequence[Option]], wanted: Wanted
) -> list[dict[str, Wish]]:
    """What is asked of each unit, for budgets from the smallest to the largest."""
    if wanted.proposals == "template":
        return template_wishes(list(shared.values()), wanted.count)
    path = spread(allocations(chains), wanted.worst_drift, wanted.count)
    return [{n: Wish(p.rank, p.bits) for n, p in step.points.items()} for step in path]


def _text(point: LayerPoint) -> str:
    return f"rank {point.rank} at {point.bits} bits"


def _shares(unit: Unit, text: str) -> str:
    """The levels of a unit, which its points have for ranks, as shares of full rank."""
    return re.sub(
        r"rank (\d+) at",
        lambda found: f"{unit.levels[int(found[1]) - 1]:.3g} of full rank at",
        text,
    )


def _name(item: tuple[str, LayerPoint]) -> str:
    return item[0]


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
