"""What training aims at: chains and profiles, by counted work unless a device is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import nn

from t3c.certify.sensitivity import PointDrifts, layer_sensitivities
from t3c.control.knapsack import Allocation, allocations
from t3c.control.menu import Option, chain
from t3c.control.options import Shares, chain_shares, layer_profile, unit_options
from t3c.control.profiles import names_for, spread
from t3c.convert import LayerPlan, Unit, state_of, units
from t3c.cost.work import layer_work
from t3c.nn.inputs import Inputs, select
from t3c.spec import Goal, LayerPoint, LayerSpec, Profile, ProfileChain

SAMPLES = 6


@dataclass(frozen=True)
class Targets:
    """The chain of each unit, what its points take (resources, points), and nested profiles."""

    units: Mapping[str, Unit]
    chains: Mapping[str, Sequence[Option]]
    shares: Mapping[str, npt.NDArray[np.float64]]
    profiles: ProfileChain


def find_targets(
    model: nn.Module, samples: Inputs, goal: Goal, shares: Shares | None = None
) -> Targets:
    """Chains over what points take and first-order drift, profiles from the knapsack over them.

    Without `shares` of a device, time is taken as FLOPs of whichever form has fewer, size as
    stored bytes.
    """
    return find_path(model, samples, goal.size_weight, shares).targets(goal)


@dataclass(frozen=True)
class Path:
    """The chain of each unit, and the knapsack's nested allocations over them, smallest first."""

    units: Mapping[str, Unit]
    chains: Mapping[str, Sequence[Option]]
    shares: Shares
    steps: Sequence[Allocation]

    def targets(self, goal: Goal) -> Targets:
        """Return what training for a goal aims at: profiles evenly along the path."""
        steps = spread(self.steps, goal.worst_drift, goal.profiles)
        named = zip(names_for(len(steps)), steps, strict=True)
        profiles = ProfileChain(tuple(self.profile(step, name) for name, step in named))
        taken = chain_shares(self.units, self.chains, self.shares)
        return Targets(self.units, self.chains, taken, profiles)

    def within(self, drift: float) -> Allocation:
        """Return the smallest allocation that drifts at most so much by the estimate."""
        return next((step for step in self.steps if step.drift <= drift), self.steps[-1])

    def profile(self, step: Allocation, name: str) -> Profile:
        """Return an allocation as a profile of layers."""
        return layer_profile(self.units, step.points, name)


def find_path(
    model: nn.Module, samples: Inputs, size_weight: float, shares: Shares | None = None
) -> Path:
    """Estimate what each point drifts on a few samples, and walk the knapsack over what they take.

    Without `shares` of a device, work is counted.
    """
    plans = state_of(model).plan.layers
    shared = {unit.name: unit for unit in units(plans)}
    sensitivities = layer_sensitivities(model, select(samples, slice(0, SAMPLES)))
    taken = shares or counted_shares(plans)
    offered = unit_options(
        shared, taken,
        PointDrifts(sensitivities, {plan.spec.name: plan.bits for plan in plans}), size_weight,
    )  # fmt: skip
    chains = {name: chain(options) for name, options in offered.items()}
    return Path(shared, chains, taken, allocations(chains))


def counted_shares(plans: Sequence[LayerPlan]) -> Shares:
    """FLOPs of the form that has fewest, and stored bytes, as shares of every layer at its top."""
    specs = {plan.spec.name: plan.spec for plan in plans}
    tops = {p.spec.name: LayerPoint(p.ranks[-1], p.bits[-1]) for p in plans}
    full = [_work(specs[name], top) for name, top in tops.items()]
    flops, size = (max(1, sum(column)) for column in zip(*full, strict=True))

    def shares(name: str, point: LayerPoint) -> tuple[float, float, float]:
        mine = _work(specs[name], point)
        return mine[0] / flops, mine[1] / size, math.nan

    return shares


def _work(spec: LayerSpec, point: LayerPoint) -> tuple[int, int]:
    works = [layer_work(spec, point, form) for form in spec.forms(point)]
    return min(w.flops for w in works), works[0].size_bytes
