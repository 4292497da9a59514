"""From the points a layer could take to the chain it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from t3c.errors import SpecError
from t3c.spec import LayerPoint, Menu


@dataclass(frozen=True)
class Option:
    """A layer point with its cost (any unit that adds up) and its squared drift."""

    point: LayerPoint
    cost: float
    squared_drift: float


def chain(options: Sequence[Option]) -> tuple[Option, ...]:
    """The chain of options whose staircase of squared drift over cost encloses the least area.

    It ends at the top, the option that stands above all others. Options that cost no less than
    another of no more drift are dropped first, so that cost rises and drift falls strictly along
    the chain; it starts at the cheapest option that is left.
    """
    if not options:
        raise SpecError("a layer needs at least one option")
    top = next((o for o in options if all(p.point <= o.point for p in options)), None)
    if top is None:
        raise SpecError("no option of the layer stands above all others")
    front = [*_pareto([o for o in options if o.cost < top.cost], top), top]
    best: list[tuple[float, int | None]] = [(0.0, None)]
    for j in range(1, len(front)):
        reachable = [
            (best[i][0] + (front[j].cost - front[i].cost) * front[i].squared_drift, i)
            for i in range(j)
            if front[i].point <= front[j].point and (i == 0 or best[i][1] is not None)
        ]
        best.append(min(reachable) if reachable else (float("inf"), None))
    path: list[Option] = []
    last: int | None = len(front) - 1
    if last and best[last][1] is None:  # nothing cheaper stands below the top
        return (front[last],)
    while last is not None:
        path.append(front[last])
        last = best[last][1]
    return tuple(reversed(path))


def menu(options: Sequence[Option]) -> Menu:
    """The points of a chain of options."""
    return Menu(tuple(option.point for option in options))


def _pareto(options: Sequence[Option], top: Option) -> list[Option]:
    """Options sorted by cost, each of strictly less drift than all cheaper ones.

    More is never worse by definition: what was measured to drift less than the top counts as
    drifting a little more than it.
    """
    floor = top.squared_drift * (1 + 1e-6) + 1e-18
    front: list[Option] = []
    order = sorted(options, key=lambda o: (o.cost, o.squared_drift, -o.point.rank, -o.point.bits))
    for option in order:
        drift = max(option.squared_drift, floor)
        if not front or drift < front[-1].squared_drift:
            front.append(Option(option.point, option.cost, drift))
    return front
