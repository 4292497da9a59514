"""From the levels a unit could take to the chain it may take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from t3c.errors import SpecError
from t3c.spec import Level


@dataclass(frozen=True)
class Option:
    """A level of a unit with its cost (any unit that adds up) and its squared drift."""

    point: Level
    cost: float
    squared_drift: float

    @property
    def drift(self) -> float:
        return math.sqrt(max(self.squared_drift, 0.0))


Chains = Mapping[str, Sequence[Option]]  # the options of each unit that are on its menu


class DropCode(StrEnum):
    """Why a level is not on the menu of its unit."""

    DEARER = "dearer than the top"
    BETTER = "another is better"
    OFF_CHAIN = "off the best chain"


@dataclass(frozen=True)
class Dropped:
    """A level that is not on the menu: its cost next to the top's, and a level that is better."""

    level: Level
    code: DropCode
    cost: float
    better: Level | None = None

    def __str__(self) -> str:
        reasons = {
            DropCode.DEARER: f"costs {self.cost:.2f} of the top and is less",
            DropCode.BETTER: f"{self.better} costs and drifts no more",
            DropCode.OFF_CHAIN: "no chain of levels through it does better",
        }
        return f"{self.level}: {reasons[self.code]}"


def chain(options: Sequence[Option]) -> tuple[Option, ...]:
    """The chain of options whose staircase of squared drift over cost encloses the least area.

    It starts at the cheapest option and ends at the top, the one that stands above all others;
    cost rises and drift falls strictly along it. More is never worse by definition: what was
    measured to drift less than the top counts as drifting a little more than it.
    """
    if not options:
        raise SpecError("a unit needs at least one option")
    top = next((o for o in options if all(p.point <= o.point for p in options)), None)
    if top is None:
        raise SpecError("no option of the unit stands above all others")
    floor = top.squared_drift * (1 + 1e-6) + 1e-18
    cheaper = [
        Option(o.point, o.cost, max(o.squared_drift, floor)) for o in options if o.cost < top.cost
    ]
    steps = [*sorted(cheaper, key=lambda o: (o.cost, o.squared_drift)), top]
    area = [0.0] + [math.inf] * (len(steps) - 1)
    before = [0] * len(steps)
    for j, above in enumerate(steps):
        for i, below in enumerate(steps[:j]):
            if _leads(below, above):
                enclosed = area[i] + (above.cost - below.cost) * below.squared_drift
                if enclosed < area[j]:
                    area[j], before[j] = enclosed, i
    path = [len(steps) - 1]
    while path[-1] != 0:
        path.append(before[path[-1]])
    return tuple(steps[index] for index in reversed(path))


def dropped(options: Sequence[Option], kept: Sequence[Option]) -> tuple[Dropped, ...]:
    """Return every option that is not on the chain that was kept, and why."""
    levels, top = {option.point for option in kept}, kept[-1]
    found = []
    for option in options:
        if option.point in levels:
            continue
        better = [
            k for k in kept if k.cost <= option.cost and k.squared_drift <= option.squared_drift
        ]
        share = option.cost / top.cost if top.cost else math.inf
        if option.cost >= top.cost:
            found.append(Dropped(option.point, DropCode.DEARER, share))
        elif better:
            found.append(Dropped(option.point, DropCode.BETTER, share, better[-1].point))
        else:
            found.append(Dropped(option.point, DropCode.OFF_CHAIN, share))
    return tuple(found)


def _leads(below: Option, above: Option) -> bool:
    """Whether `above` may follow `below` in a chain."""
    rises = below.cost < above.cost and below.squared_drift > above.squared_drift
    return rises and below.point <= above.point
