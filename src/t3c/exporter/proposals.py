"""Templates for the units of a model: where each stands, and what it is to ask of its menu."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from t3c.control.snap import Wish
from t3c.control.templates import LOWEST, Place, ladder, template
from t3c.convert import Unit
from t3c.convert.config import Role


def places(units: Sequence[Unit]) -> list[Place]:
    """The place of each unit, in their order; the last is the classifier if it is linear."""
    steps = max(len(units) - 1, 1)
    found = []
    for index, unit in enumerate(units):
        role = _role(unit)
        last = role is Role.LINEAR and index == len(units) - 1
        found.append(Place(unit.name, role, index / steps, last))
    return found


def template_wishes(units: Sequence[Unit], count: int) -> list[dict[str, Wish]]:
    """`count` proposals by the template, smallest first; the last one asks for every unit's top."""
    by_name = {unit.name: unit for unit in units}
    shares = [template(places(units), share) for share in ladder(count)]
    return [{n: _wish(by_name[n], share) for n, share in mine.items()} for mine in shares]


def _role(unit: Unit) -> Role:
    """That of its first layer; what is in a block is a projection, a convolution too."""
    lead = unit.layers[0]
    return Role.PROJECTION if lead.block else lead.role


def _wish(unit: Unit, share: float) -> Wish:
    """A share of full rank as a level between those of a unit, and bits that rise with it."""
    levels = unit.levels
    bits = sorted({point.bits for point in unit.points()})
    return Wish(
        float(np.interp(share, levels, np.arange(1, len(levels) + 1))),
        float(np.interp(share, (LOWEST, 1.0), (bits[0], bits[-1]))),
    )
