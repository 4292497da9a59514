"""From continuous proposals to nested points of menus, by the rules of paper D.2."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from t3c.control.knapsack import Allocation, allocation
from t3c.control.menu import Option
from t3c.errors import SpecError
from t3c.spec import LayerPoint, Menu

BITS_WEIGHT = 1.0


@dataclass(frozen=True)
class Wish:
    """What a proposal asks of one unit: near its menu, not yet of it."""

    rank: float
    bits: float


@dataclass(frozen=True)
class Snap:
    """A point that is not simply the nearest, or is over the tolerance, and why."""

    profile: int
    unit: str
    wished: Wish
    point: LayerPoint
    reason: str


@dataclass(frozen=True)
class Snapped:
    """Nested allocations, smallest first, and the decisions worth telling."""

    allocations: tuple[Allocation, ...]
    notes: tuple[Snap, ...]


def snap(
    wishes: Sequence[Mapping[str, Wish]],
    chains: Mapping[str, Sequence[Option]],
    *,
    tolerance: float | Mapping[str, float] | None = None,
    beta: float = BITS_WEIGHT,
) -> Snapped:
    """The points of each unit's chain for proposals that come in order of growing budget.

    Each unit takes the nearest point, ranks and bits as shares of its top's and bits weighed by
    `beta`; no less than the proposal before it got; and where the drift of that is over the unit's
    `tolerance`, the next point above that is within it, or the top.
    """
    _check(wishes, chains, beta)
    limits = _limits(chains, tolerance)
    taken = dict.fromkeys(chains, 0)
    found, notes = [], []
    for profile, wish in enumerate(wishes):
        for unit in sorted(chains):
            options = chains[unit]
            near = nearest(options, wish[unit], beta)
            taken[unit], reason = _settle(options, near, taken[unit], limits[unit])
            if reason:
                notes.append(Snap(profile, unit, wish[unit], options[taken[unit]].point, reason))
        found.append(allocation({unit: chains[unit][index] for unit, index in taken.items()}))
    return Snapped(tuple(found), tuple(notes))


def nearest(options: Sequence[Option], wish: Wish, beta: float) -> int:
    """Which option minimises |k - k^| / k_top + beta |q - q^| / q_top; of equals the largest."""
    top = options[-1].point
    # Exact, so that ties are ties and a larger wish never finds a smaller point.
    rank, bits, weight = (Fraction(float(value)) for value in (wish.rank, wish.bits, beta))
    weight = weight * top.rank / top.bits

    def distance(index: int) -> Fraction:
        point = options[index].point
        return abs(point.rank - rank) + weight * abs(point.bits - bits)

    return min(reversed(range(len(options))), key=distance)


def _settle(
    options: Sequence[Option], nearest: int, least: int, tolerance: float
) -> tuple[int, str]:
    """Which option is taken, and why if it is not the nearest or not within the tolerance."""
    last = len(options) - 1
    within = (i for i in range(nearest, last) if _drift(options[i]) <= tolerance)
    safe = next(within, last)
    index = max(safe, least)
    if _drift(options[index]) > tolerance:
        drift = _drift(options[index])
        return index, f"even the top drifts {drift:.3g}, over the tolerance {tolerance:.3g}"
    if index > safe:
        return index, f"the proposal before has {_text(options[index].point)}"
    if index > nearest:
        drift, near = _drift(options[nearest]), _text(options[nearest].point)
        return index, f"{near} drifts {drift:.3g}, over the tolerance {tolerance:.3g}"
    return index, ""


def _drift(option: Option) -> float:
    return math.sqrt(max(option.squared_drift, 0.0))


def _text(point: LayerPoint) -> str:
    return f"rank {point.rank} at {point.bits} bits"


def _check(
    wishes: Sequence[Mapping[str, Wish]], chains: Mapping[str, Sequence[Option]], beta: float
) -> None:
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
            if not (math.isfinite(wished.rank) and math.isfinite(wished.bits)):
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
