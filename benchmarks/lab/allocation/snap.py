"""From continuous proposals to nested levels of menus, by the rules of paper D.2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from t3c.control.knapsack import Allocation, allocation
from t3c.control.menu import Chains
from t3c.control.policy import Wish, nearest
from t3c.spec import Level


class SnapCode(StrEnum):
    """Why a unit does not simply take the level that was asked for."""

    NESTED = "the proposal before has more"
    RAISED = "over the tolerance"
    TOP_OVER = "even the top is over the tolerance"


@dataclass(frozen=True)
class Snap:
    """A level that is not the one asked for, or over the tolerance, and why.

    `drift` is what the level asked for drifts, by TOP_OVER what the top does.
    """

    profile: int
    unit: str
    asked: Level
    level: Level
    code: SnapCode
    drift: float
    tolerance: float

    def __str__(self) -> str:
        over = f"drifts {self.drift:.3g}, over the tolerance {self.tolerance:.3g}"
        reasons = {
            SnapCode.NESTED: f"the proposal before has {self.level}",
            SnapCode.RAISED: f"{self.asked} {over}",
            SnapCode.TOP_OVER: f"even the top {over}",
        }
        return f"{self.unit}: {self.level}: {reasons[self.code]}"


@dataclass(frozen=True)
class Snapped:
    """Nested allocations, smallest first, and the decisions worth telling."""

    allocations: tuple[Allocation, ...]
    notes: tuple[Snap, ...]


def snap(
    wishes: Sequence[Mapping[str, Wish]], chains: Chains, tolerance: float | None = None
) -> Snapped:
    """Return the levels of each unit's chain for proposals in order of growing budget.

    Each unit takes the nearest level, levels and bits as shares of its top's; no less than the
    proposal before it got; and where the drift of that is over the `tolerance`, the next level
    above that is within it, or the top.
    """
    levels = {unit: [option.point for option in options] for unit, options in chains.items()}
    asked = [{unit: nearest(levels[unit], wish[unit]) for unit in chains} for wish in wishes]
    return _nested(asked, chains, math.inf if tolerance is None else tolerance)


def hold(path: Sequence[Allocation], chains: Chains, tolerance: float | None) -> Snapped:
    """Return nested allocations with every unit raised to where it is within the tolerance."""
    if tolerance is None:
        return Snapped(tuple(path), ())
    places = {unit: {o.point: i for i, o in enumerate(mine)} for unit, mine in chains.items()}
    asked = [{unit: places[unit][a.points[unit]] for unit in chains} for a in path]
    return _nested(asked, chains, tolerance)


def _nested(asked: Sequence[Mapping[str, int]], chains: Chains, tolerance: float) -> Snapped:
    """Return allocations that take what is asked, or more where nesting or the tolerance says."""
    taken = dict.fromkeys(chains, 0)
    found, notes = [], []
    for profile, indices in enumerate(asked):
        for unit in sorted(chains):
            options, index = chains[unit], indices[unit]
            last = len(options) - 1
            safe = next((i for i in range(index, last) if options[i].drift <= tolerance), last)
            taken[unit] = max(safe, taken[unit])
            mine, drift = options[taken[unit]], options[index].drift
            if mine.drift > tolerance:
                code, drift = SnapCode.TOP_OVER, mine.drift
            elif taken[unit] > safe:
                code = SnapCode.NESTED
            elif safe > index:
                code = SnapCode.RAISED
            else:
                continue
            near = options[index].point
            notes.append(Snap(profile, unit, near, mine.point, code, drift, tolerance))
        found.append(allocation({unit: chains[unit][index] for unit, index in taken.items()}))
    return Snapped(tuple(found), tuple(notes))
