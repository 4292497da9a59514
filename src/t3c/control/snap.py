"""From continuous proposals to nested levels of menus, by the rules of paper D.2."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from t3c.control.knapsack import Allocation, allocation
from t3c.control.menu import Chains
from t3c.errors import SpecError
from t3c.spec import Level, Menu

BITS_WEIGHT = 1.0


@dataclass(frozen=True)
class Wish:
    """What a proposal asks of one unit: near its menu, not yet of it."""

    level: float
    bits: float


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
    wishes: Sequence[Mapping[str, Wish]],
    chains: Chains,
    *,
    tolerance: float | Mapping[str, float] | None = None,
    beta: float = BITS_WEIGHT,
) -> Snapped:
    """Return the levels of each unit's chain for proposals in order of growing budget.

    Each unit takes the nearest level, levels and bits as shares of its top's and bits weighed by
    `beta`; no less than the proposal before it got; and where the drift of that is over the unit's
    `tolerance`, the next level above that is within it, or the top.
    """
    _check(wishes, chains, beta)
    levels = {unit: [option.point for option in options] for unit, options in chains.items()}
    asked = [{unit: nearest(levels[unit], wish[unit], beta) for unit in chains} for wish in wishes]
    return _nested(asked, chains, _limits(chains, tolerance))


def hold(path: Sequence[Allocation], chains: Chains, tolerance: float | None) -> Snapped:
    """Return nested allocations with every unit raised to where it is within the tolerance."""
    if tolerance is None:
        return Snapped(tuple(path), ())
    places = {unit: {o.point: i for i, o in enumerate(mine)} for unit, mine in chains.items()}
    asked = [{unit: places[unit][a.points[unit]] for unit in chains} for a in path]
    return _nested(asked, chains, _limits(chains, tolerance))


def nearest(levels: Sequence[Level], wish: Wish, beta: float = BITS_WEIGHT) -> int:
    """Return which level minimises |k - k^| / k_top + beta |q - q^| / q_top; of equals the last."""
    top = levels[-1]
    # Exact, so that ties are ties and a larger wish never finds a smaller level.
    level, bits, weight = (Fraction(float(value)) for value in (wish.level, wish.bits, beta))
    weight = weight * top.level / top.bits

    def distance(index: int) -> Fraction:
        mine = levels[index]
        return abs(mine.level - level) + weight * abs(mine.bits - bits)

    return min(reversed(range(len(levels))), key=distance)


def _nested(
    asked: Sequence[Mapping[str, int]], chains: Chains, limits: Mapping[str, float]
) -> Snapped:
    """Return the allocations that take what is asked, or more where nesting or a limit needs it."""
    taken = dict.fromkeys(chains, 0)
    found, notes = [], []
    for profile, indices in enumerate(asked):
        for unit in sorted(chains):
            options, index, limit = chains[unit], indices[unit], limits[unit]
            last = len(options) - 1
            safe = next((i for i in range(index, last) if options[i].drift <= limit), last)
            taken[unit] = max(safe, taken[unit])
            level, drift = options[taken[unit]].point, options[index].drift
            if options[taken[unit]].drift > limit:
                code, drift = SnapCode.TOP_OVER, options[taken[unit]].drift
            elif taken[unit] > safe:
                code = SnapCode.NESTED
            elif safe > index:
                code = SnapCode.RAISED
            else:
                continue
            notes.append(Snap(profile, unit, options[index].point, level, code, drift, limit))
        found.append(allocation({unit: chains[unit][index] for unit, index in taken.items()}))
    return Snapped(tuple(found), tuple(notes))


def _check(wishes: Sequence[Mapping[str, Wish]], chains: Chains, beta: float) -> None:
    if not wishes or not chains:
        raise SpecError(f"nothing to snap: no {'chains' if wishes else 'proposals'}")
    if not (math.isfinite(beta) and beta > 0):
        raise SpecError(f"beta must be positive and finite, got {beta}")
    for unit, options in chains.items():
        try:
            Menu(tuple(option.point for option in options))
        except SpecError as error:
            raise SpecError(f"the chain of unit {unit!r}: {error}") from error
        if any(math.isnan(option.cost) or math.isnan(option.squared_drift) for option in options):
            raise SpecError(f"the chain of unit {unit!r}: a cost or a drift is NaN")
    for profile, wish in enumerate(wishes):
        _same_units(f"proposal {profile}", wish, chains)
        for unit, wished in wish.items():
            if not (math.isfinite(wished.level) and math.isfinite(wished.bits)):
                raise SpecError(f"proposal {profile}, unit {unit!r}: {wished} is not finite")


def _limits(
    chains: Mapping[str, object], tolerance: float | Mapping[str, float] | None
) -> Mapping[str, float]:
    """The tolerance of each unit."""
    if not isinstance(tolerance, Mapping):
        tolerance = dict.fromkeys(chains, math.inf if tolerance is None else tolerance)
    _same_units("the tolerance", tolerance, chains)
    for unit, limit in tolerance.items():
        if not limit >= 0:
            raise SpecError(f"the tolerance of unit {unit!r} must be 0 or more, got {limit}")
    return tolerance


def _same_units(what: str, given: Iterable[str], chains: Iterable[str]) -> None:
    given, known = set(given), set(chains)
    if known - given:
        raise SpecError(f"{what} lacks unit {min(known - given)!r}")
    if given - known:
        raise SpecError(f"{what} has unit {min(given - known)!r}, which has no chain")
