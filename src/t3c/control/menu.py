"""From the points a layer could take to the chain it may take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from t3c.errors import SpecError
from t3c.spec import LayerPoint


@dataclass(frozen=True)
class Option:
    """A layer point with its cost (any unit that adds up) and its squared drift."""

    point: LayerPoint
    cost: float
    squared_drift: float


def chain(options: Sequence[Option]) -> tuple[Option, ...]:
    """The chain of options whose staircase of squared drift over cost encloses the least area.

    It starts at the cheapest option and ends at the top, the one that stands above all others;
    cost rises and drift falls strictly along it. More is never worse by definition: what was
    measured to drift less than the top counts as drifting a little more than it.
    """
    if not options:
        raise SpecError("a layer needs at least one option")
    top = next((o for o in options if all(p.point <= o.point for p in options)), None)
    if top is None:
        raise SpecError("no option of the layer stands above all others")
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


def dropped(options: Sequence[Option], kept: Sequence[Option]) -> dict[LayerPoint, str]:
    """Why each option is not on the chain that was kept."""
    points = {option.point for option in kept}
    top = kept[-1]
    found = {}
    for option in options:
        if option.point in points:
            continue
        better = [
            k for k in kept if k.cost <= option.cost and k.squared_drift <= option.squared_drift
        ]
        if option.cost >= top.cost:
            reason = f"costs {option.cost / top.cost:.2f} of the top and is less"
        elif better:
            other = better[-1].point
            reason = f"rank {other.rank} at {other.bits} bits costs and drifts no more"
        else:
            reason = "no chain of points through it does better"
        found[option.point] = reason
    return found


def _leads(below: Option, above: Option) -> bool:
    """Whether `above` may follow `below` in a chain."""
    rises = below.cost < above.cost and below.squared_drift > above.squared_drift
    return rises and below.point <= above.point
