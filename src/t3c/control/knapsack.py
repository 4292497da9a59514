"""Allocation over menu chains: a multiple-choice knapsack, solved along its convex hull.

Each layer's hull of squared drift over cost is walked downhill; taking the steepest step of any
layer first gives, for every total cost it passes, the best allocation on the hulls, and each
allocation stands above the one before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from t3c.control.menu import Chains, Option
from t3c.spec import Level


@dataclass(frozen=True)
class Allocation:
    """One point per layer, with the summed cost and squared drift."""

    points: Mapping[str, Level]
    cost: float
    squared_drift: float

    @property
    def drift(self) -> float:
        """The drift, layers taken as orthogonal to each other."""
        return math.sqrt(max(self.squared_drift, 0.0))


def allocations(chains: Chains) -> list[Allocation]:
    """The nested allocations from every layer's cheapest point to every layer's top."""
    hulls = {name: _hull(options) for name, options in chains.items()}
    steps = []
    for name, hull in hulls.items():
        for below, above in itertools.pairwise(hull):
            gain = (below.squared_drift - above.squared_drift) / (above.cost - below.cost)
            steps.append((-gain, name, below, above))
    steps.sort(key=lambda step: (step[0], step[1], step[2].cost))
    points = {name: hull[0].point for name, hull in hulls.items()}
    cost = sum(hull[0].cost for hull in hulls.values())
    drift = sum(hull[0].squared_drift for hull in hulls.values())
    path = [Allocation(dict(points), cost, drift)]
    for _, name, below, above in steps:
        points[name] = above.point
        cost += above.cost - below.cost
        drift += above.squared_drift - below.squared_drift
        path.append(Allocation(dict(points), cost, drift))
    return path


def allocation(taken: Mapping[str, Option]) -> Allocation:
    """One option of each unit, summed up."""
    return Allocation(
        {unit: option.point for unit, option in taken.items()},
        math.fsum(option.cost for option in taken.values()),
        math.fsum(option.squared_drift for option in taken.values()),
    )


def _hull(options: Sequence[Option]) -> list[Option]:
    """The lower convex hull of a chain, whose steps get less steep from one to the next."""
    hull: list[Option] = []
    for option in options:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(below: Option, above: Option) -> float:
    return (above.squared_drift - below.squared_drift) / (above.cost - below.cost)
