"""Allocations to compare with: greedy by the next step, and one level for all (paper B.4)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from t3c.control.knapsack import Allocation, allocation
from t3c.control.menu import Chains, Option
from t3c.errors import SpecError


def greedy(chains: Chains) -> list[Allocation]:
    """Nested allocations, each one step of one layer above the one before.

    The step is that of most benefit for its cost, among the next steps alone: what comes behind a
    poor step is not seen, as the hull would.
    """
    taken = _bottom(chains)
    path = [_allocation(chains, taken)]
    while True:
        gains = {
            n: _gain(c[taken[n]], c[taken[n] + 1]) for n, c in chains.items() if c[taken[n] + 1 :]
        }
        if not gains:
            return path
        name = min(gains, key=lambda n: (-gains[n], n))
        taken[name] += 1
        path.append(_allocation(chains, taken))


def uniform(chains: Chains) -> list[Allocation]:
    """Nested allocations with every layer at one level of its chain, all that differ.

    A layer of J points takes index round(level (J - 1)), halves up.
    """
    _bottom(chains)
    steps = {len(options) - 1 for options in chains.values()}
    turns = {Fraction(2 * i + 1, 2 * n) for n in steps for i in range(n)}
    levels = [Fraction(0), *sorted(turns)]  # where some index moves up
    path: list[dict[str, int]] = []
    for level in levels:
        taken = {n: math.floor(level * (len(c) - 1) + Fraction(1, 2)) for n, c in chains.items()}
        if not path or taken != path[-1]:
            path.append(taken)
    return [_allocation(chains, taken) for taken in path]


def _bottom(chains: Chains) -> dict[str, int]:
    if not chains or not all(chains.values()):
        raise SpecError("an allocation needs at least one chain, and chains at least one option")
    return dict.fromkeys(chains, 0)


def _gain(below: Option, above: Option) -> float:
    cost = above.cost - below.cost
    return (below.squared_drift - above.squared_drift) / cost if cost > 0 else math.inf


def _allocation(chains: Chains, taken: Mapping[str, int]) -> Allocation:
    return allocation({name: chains[name][index] for name, index in taken.items()})
