"""Proposals that need no measurement: the cross-model templates of paper D.2, as shares of rank.

A unit that deserves more than others takes `share ** exponent` with an exponent under 1: more
than `share` below 1, rising with it, and 1 at 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from t3c.errors import SpecError

ROLES = ("projection", "linear", "convolution", "depthwise", "embedding")
LOWEST = 1 / 8  # the share the smallest of several profiles is proposed at
FIRST, CLASSIFIER = 0.5, 0.5  # exponents of a first convolution and of the final classifier
EARLY = 1 / 3  # the part of the depth over which the exponent of convolutions rises to 1
MLP = 0.9  # the exponent of a transformer's linear layers outside attention


@dataclass(frozen=True)
class Place:
    """Where a unit stands in its network: `depth` from 0 to 1, `last` if it is the classifier."""

    name: str
    role: str
    depth: float
    last: bool = False

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise SpecError(f"role of {self.name!r} is one of {', '.join(ROLES)}, got {self.role}")
        if not 0 <= self.depth <= 1:
            raise SpecError(f"depth of {self.name!r} must be in 0..1, got {self.depth}")


def template(places: Sequence[Place], share: float) -> dict[str, float]:
    """The share of full rank for each unit: a transformer's if any unit is a projection."""
    if not 0 < share <= 1:
        raise SpecError(f"share must be above 0 and at most 1, got {share}")
    names = [place.name for place in places]
    if not names or len(set(names)) < len(names):
        raise SpecError(f"a template needs places of different names, got {names}")
    transformer = any(place.role == "projection" for place in places)
    exponent = _transformer if transformer else _convolutional
    return {place.name: share ** exponent(place) for place in places}


def ladder(count: int) -> list[float]:
    """The shares `count` profiles are proposed at, geometric from 1/8 to 1."""
    if count < 1:
        raise SpecError(f"at least one profile is needed, got {count}")
    steps = max(count - 1, 1)
    return [LOWEST ** (step / steps) for step in reversed(range(count))]


def _convolutional(place: Place) -> float:
    """More for early convolutions and the final classifier."""
    if place.last:
        return CLASSIFIER
    if place.role in ("convolution", "depthwise"):
        return min(1.0, FIRST + (1 - FIRST) * place.depth / EARLY)
    return 1.0


def _transformer(place: Place) -> float:
    """One share for all projections, slightly more for the MLP."""
    return MLP if place.role == "linear" else 1.0
