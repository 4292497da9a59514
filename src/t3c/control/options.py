"""What the points of units cost and drift, from what those of their layers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from t3c.control.menu import Chains, Option
from t3c.convert import Unit
from t3c.spec import LayerPoint, Level, Profile

# Of one layer at one point: latency, size and energy, each a share of all layers at their top;
# NaN where a resource is not known.
Shares = Callable[[str, LayerPoint], tuple[float, float, float]]
SquaredDrift = Callable[[str, LayerPoint], float]


def unit_options(
    units: Mapping[str, Unit], shares: Shares, squared_drift: SquaredDrift, size_weight: float
) -> dict[str, list[Option]]:
    """Every point of every unit; its cost is a share of time and, by `size_weight`, of bytes."""
    drifts: dict[tuple[str, LayerPoint], float] = {}  # units of a stage share layer points

    def drift(name: str, point: LayerPoint) -> float:
        if (name, point) not in drifts:
            drifts[name, point] = squared_drift(name, point)
        return drifts[name, point]

    def option(unit: Unit, point: Level) -> Option:
        layers = unit.layer_points(point).items()
        latency, size, _ = unit_shares(unit, point, shares)
        cost = (1 - size_weight) * latency + size_weight * size
        return Option(point, cost, sum(drift(name, mine) for name, mine in layers))

    return {name: [option(unit, p) for p in unit.points()] for name, unit in units.items()}


def unit_shares(unit: Unit, point: Level, shares: Shares) -> tuple[float, float, float]:
    """What a unit takes of each resource at a point."""
    rows = [shares(name, mine) for name, mine in unit.layer_points(point).items()]
    latency, size, energy = (float(sum(column)) for column in zip(*rows, strict=True))
    return latency, size, energy


def layer_profile(units: Mapping[str, Unit], points: Mapping[str, Level], name: str) -> Profile:
    """Points of units as a profile of their layers."""
    found: dict[str, LayerPoint] = {}
    for unit, point in points.items():
        found |= units[unit].layer_points(point)
    return Profile(name, found)


def chain_shares(
    units: Mapping[str, Unit], chains: Chains, shares: Shares
) -> dict[str, npt.NDArray[np.float64]]:
    """The shares (resources, points) along each unit's chain."""
    return {
        name: np.array([unit_shares(units[name], o.point, shares) for o in options]).T
        for name, options in chains.items()
    }
