"""Profiles for a device: what each layer point drifts, weighs and takes, and the knapsack."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import nn

from t3c.artifact.devices import LayerTiming, few_pay
from t3c.certify.gains import EXACT_OUTPUTS
from t3c.certify.sensitivity import LayerSensitivity, PointDrifts, layer_sensitivities
from t3c.control.knapsack import Allocation, allocation, allocations
from t3c.control.menu import Chains, Dropped, Option, chain, dropped
from t3c.control.options import (
    Shares,
    chain_shares,
    layer_profile,
    unit_options,
    unit_shares,
)  # fmt: skip
from t3c.control.policy import Policy, summarize
from t3c.control.profiles import spread
from t3c.control.proposed import Controlled
from t3c.control.token import Token
from t3c.convert import LayerPlan, Unit, units
from t3c.cost.work import stored_bytes
from t3c.errors import SpecError
from t3c.nn.inputs import Inputs, select, tensors
from t3c.nn.norms import OutputNorms
from t3c.spec import Goal, LayerPoint, Level, Profile, ProfileChain
from t3c.train.controller import train_controller
from t3c.train.policy_net import ControllerConfig
from t3c.train.terrain import Terrain

SAMPLES, ADJOINT_BYTES = 32, 4 << 30
DEVICE = "measured"
BUDGETS = 400  # levels that a controller is asked for the allocations between


Menus = dict[str, tuple[LayerPoint, ...]]


@dataclass(frozen=True)
class Allocated:
    """The menu of each layer, the profiles, and the first-order drift of each.

    `dropped` are the levels of each unit that are on no menu, `norms` the gains and shifts that
    profiles have for themselves, by name.
    """

    menus: Menus
    profiles: ProfileChain
    drifts: Mapping[str, float]
    dropped: Mapping[str, tuple[Dropped, ...]] = field(default_factory=dict)
    control: Controlled | None = None
    norms: Mapping[str, OutputNorms] = field(default_factory=dict)

    @classmethod
    def of(cls, chain: ProfileChain) -> Allocated:
        """Profiles that are given: menus of what they take, and nothing known of their drift."""
        menus = _menus([profile.points for profile in chain])
        return cls(menus, chain, {profile.name: 0.0 for profile in chain})

    def renamed(self, names: Mapping[str, str]) -> Allocated:
        """The profiles that have a new name, under it; the others are dropped."""
        kept = [Profile(names[p.name], p.points) for p in self.profiles if p.name in names]
        drifts = {names[name]: drift for name, drift in self.drifts.items() if name in names}
        norms = {names[name]: mine for name, mine in self.norms.items() if name in names}
        control = self.control
        if control is not None:
            points = {names[n]: p for n, p in control.profiles.items() if n in names}
            shares = {names[n]: s for n, s in control.shares.items() if n in names}
            control = Controlled(control.policy, points, shares)
        chain = ProfileChain(tuple(kept))
        return replace(self, profiles=chain, drifts=drifts, control=control, norms=norms)


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
    goal: Goal,
    *,
    count: int,
    controller: ControllerConfig | None = None,
) -> Allocated:
    """Return chains over (cost, drift) for each unit of layers, and up to `count` nested profiles.

    Cost is a share of the all-dense, all-8-bit model: of its summed layer time, and with
    `goal.size_weight` of its bytes. The knapsack allocates, or a `controller` trained for it.
    """
    shared = {unit.name: unit for unit in units(plans)}
    sensitivities = layer_sensitivities(model, select(samples, slice(0, affordable(plans))))
    shares = measured_shares(plans, timings)
    offered = unit_options(
        shared,
        shares,
        PointDrifts(sensitivities, {plan.spec.name: plan.bits for plan in plans}),
        goal.size_weight,
    )
    chains = {name: chain(options) for name, options in offered.items()}
    policy, path = None, allocations(chains)
    if controller is not None:
        terrain = Terrain(chains, chain_shares(shared, chains, shares))
        policy = trained_policy(terrain, shared, samples, sensitivities, controller)
        path = decided(policy, chains, continuous=controller.proposals)
    taken = spread(path, goal.worst_drift, count)
    named = {f"candidate{i + 1}": allocated for i, allocated in enumerate(taken)}
    menus: Menus = {}
    for name, options in chains.items():
        menus |= _menus([shared[name].layer_points(option.point) for option in options])
    return Allocated(
        menus,
        ProfileChain(tuple(layer_profile(shared, a.points, name) for name, a in named.items())),
        {name: a.drift for name, a in named.items()},
        {name: dropped(offered[name], chains[name]) for name in shared},
        None if policy is None else _controlled(policy, shared, named, shares),
    )


def trained_policy(
    terrain: Terrain,
    shared: Mapping[str, Unit],
    samples: Inputs,
    sensitivities: Mapping[str, LayerSensitivity],
    config: ControllerConfig,
) -> Policy:
    """A controller of the terrain; units that see the input learn from what samples drift."""
    unknown = sorted(set(config.summary_units) - set(shared))
    if unknown:
        known = ", ".join(map(repr, shared))
        raise SpecError(f"no unit is called {unknown[0]!r}, only {known}: see summary_units")
    if not config.summary_units:
        return train_controller({DEVICE: terrain}, config).to_policy()
    count = len(next(iter(sensitivities.values())).uses)
    first = tensors(samples)[0][:count].cpu().numpy()
    return train_controller(
        {DEVICE: terrain}, config,
        summaries=np.stack([summarize(sample[None]) for sample in first]),
        sample_drift={
            unit: sample_drift(shared[unit], terrain.chains[unit], sensitivities)
            for unit in config.summary_units
        },
    ).to_policy()  # fmt: skip


def sample_drift(
    unit: Unit, options: Sequence[Option], sensitivities: Mapping[str, LayerSensitivity]
) -> NDArray[np.float64]:
    """What each sample drifts, squared, at every point of a unit's chain: (n, J)."""
    along = [unit.layer_points(option.point) for option in options]
    total: NDArray[np.float64] | float = 0.0
    for layer in along[0]:
        found = sensitivities[layer]
        alone = [
            replace(found, uses=(uses,), output_norms=(norm,))
            for uses, norm in zip(found.uses, found.output_norms, strict=True)
        ]
        total = total + np.array([[one.squared_drift(p[layer]) for p in along] for one in alone])
    return np.asarray(total)


def measured_shares(plans: Sequence[LayerPlan], timings: Sequence[LayerTiming]) -> Shares:
    """Time by the fastest form and stored bytes, as shares of the all-dense, all-8-bit model."""
    timed, few = {(t.layer, t.rank): t for t in timings}, few_pay(timings)
    specs = {p.spec.name: p.spec for p in plans}
    tops = {p.spec.name: LayerPoint(p.ranks[-1], p.bits[-1]) for p in plans}

    def taken(name: str, point: LayerPoint) -> float:
        best = min(timed[name, point.rank].at(point.bits, few).values())
        return specs[name].runs * best

    full_ms = sum(taken(name, top) for name, top in tops.items())
    full_bytes = sum(stored_bytes(specs[name], top) for name, top in tops.items())

    def shares(name: str, point: LayerPoint) -> tuple[float, float, float]:
        spec = specs[name]
        return taken(name, point) / full_ms, stored_bytes(spec, point) / full_bytes, math.nan

    return shares


def decided(policy: Policy, chains: Chains, *, continuous: bool = False) -> list[Allocation]:
    """The nested allocations a policy decides on as one budget for every resource grows.

    It decides by its logits over the menus, or by `continuous` proposals projected to them.
    """
    options = {unit: {o.point: o for o in mine} for unit, mine in chains.items()}
    found: dict[tuple[Level, ...], Allocation] = {}

    def note(points: Mapping[str, Level]) -> None:
        taken = {unit: options[unit][point] for unit, point in points.items()}
        found[tuple(points[unit] for unit in options)] = allocation(taken)

    for level in np.linspace(0, 1, BUDGETS):
        token = Token(float(level), float(level), float(level))
        note(policy.project(policy.proposals(token)) if continuous else policy.points(token))
    # Without a limit there is no reason for less than all, whatever was learned.
    note({unit: mine[-1].point for unit, mine in chains.items()})
    return list(found.values())


def _controlled(
    policy: Policy, units: Mapping[str, Unit], named: Mapping[str, Allocation], shares: Shares
) -> Controlled:
    """The policy over the candidates, with what they take of each resource that is known."""
    taken: dict[str, tuple[float | None, float | None, float | None]] = {}
    for name, chosen in named.items():
        rows = [unit_shares(units[unit], point, shares) for unit, point in chosen.points.items()]
        latency, size, energy = (math.fsum(column) for column in zip(*rows, strict=True))
        taken[name] = (latency, size, None if math.isnan(energy) else energy)
    return Controlled(policy, {name: a.points for name, a in named.items()}, taken)


def _menus(along: Sequence[Mapping[str, LayerPoint]]) -> Menus:
    """Return the points that each layer takes along a chain, each once."""
    return {n: tuple(dict.fromkeys(points[n] for points in along)) for n in along[0]}
