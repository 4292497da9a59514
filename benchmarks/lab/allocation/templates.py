"""Proposals that need no measurement: the cross-model templates of paper D.2, as shares of rank.

A unit that deserves more than others takes `share ** exponent` with an exponent under 1: more
than `share` below 1, rising with it, and 1 at 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from t3c.control.policy import Wish
from t3c.convert import Unit
from t3c.convert.config import Role

LOWEST = 1 / 8  # the share the smallest of several profiles is proposed at
FIRST, CLASSIFIER = 0.5, 0.5  # exponents of a first convolution and of the final classifier
EARLY = 1 / 3  # the part of the depth over which the exponent of convolutions rises to 1
MLP = 0.9  # the exponent of a transformer's linear layers outside attention


@dataclass(frozen=True)
class Place:
    """Where a unit stands in its network: `depth` from 0 to 1, `last` if it is the classifier."""

    name: str
    role: Role
    depth: float
    last: bool = False


def template_wishes(units: Sequence[Unit], count: int) -> list[dict[str, Wish]]:
    """Return `count` proposals, smallest first; the last one asks for every unit's top."""
    by_name = {unit.name: unit for unit in units}
    shares = [template(places(units), share) for share in ladder(count)]
    return [{n: _wish(by_name[n], share) for n, share in mine.items()} for mine in shares]


def places(units: Sequence[Unit]) -> list[Place]:
    """Return the place of each unit, in their order; the last is the classifier if it is linear."""
    steps = max(len(units) - 1, 1)
    roles = [_role(unit) for unit in units]
    last = len(units) - 1
    return [
        Place(unit.name, role, index / steps, role is Role.LINEAR and index == last)
        for index, (unit, role) in enumerate(zip(units, roles, strict=True))
    ]


def template(places: Sequence[Place], share: float) -> dict[str, float]:
    """Return the share of full rank of each unit: a transformer's if any unit is a projection."""
    transformer = any(place.role is Role.PROJECTION for place in places)
    exponent = _transformer if transformer else _convolutional
    return {place.name: share ** exponent(place) for place in places}


def ladder(count: int) -> list[float]:
    """Return the shares that `count` profiles are proposed at, geometric from 1/8 to 1."""
    steps = max(count - 1, 1)
    return [LOWEST ** (step / steps) for step in reversed(range(count))]


def _convolutional(place: Place) -> float:
    """More for early convolutions and the final classifier."""
    if place.last:
        return CLASSIFIER
    if place.role in (Role.CONVOLUTION, Role.DEPTHWISE):
        return min(1.0, FIRST + (1 - FIRST) * place.depth / EARLY)
    return 1.0


def _transformer(place: Place) -> float:
    """One share for all projections, slightly more for the MLP."""
    return MLP if place.role is Role.LINEAR else 1.0


def _role(unit: Unit) -> Role:
    """Return the role of its first layer; what is in a block is a projection."""
    lead = unit.layers[0]
    return Role.PROJECTION if lead.block else lead.role


def _wish(unit: Unit, share: float) -> Wish:
    """Return a share of full rank as a level between those of a unit, and bits that go with it."""
    levels = unit.levels
    bits = sorted({level.bits for level in unit.points()})
    return Wish(
        float(np.interp(share, levels, np.arange(1, len(levels) + 1))),
        float(np.interp(share, (LOWEST, 1.0), (bits[0], bits[-1]))),
    )
