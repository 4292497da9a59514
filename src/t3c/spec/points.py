"""Layer points and levels of units, and what is made of them: menus, profiles, chains."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from t3c.errors import SpecError

MIN_BITS, MAX_BITS = 2, 8
MAX_RANK = 2**31 - 1


@dataclass(frozen=True)
class LayerPoint:
    """The rank and the bits of one layer; `a <= b` componentwise."""

    rank: int
    bits: int

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise SpecError(f"rank must be at least 1, got {self.rank}")
        if self.rank > MAX_RANK:
            raise SpecError(f"rank must be at most {MAX_RANK}, got {self.rank}")
        _check_bits(self.bits)

    def __le__(self, other: LayerPoint) -> bool:
        return self.rank <= other.rank and self.bits <= other.bits


@dataclass(frozen=True)
class Level:
    """The level, from 1, and the bits of one unit of layers; `a <= b` componentwise.

    `share` is the share of full rank that the level stands for, where it is known.
    """

    level: int
    bits: int
    share: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.level < 1:
            raise SpecError(f"level must be at least 1, got {self.level}")
        _check_bits(self.bits)

    def __le__(self, other: Level) -> bool:
        return self.level <= other.level and self.bits <= other.bits

    def __str__(self) -> str:
        rank = f"level {self.level}" if self.share is None else f"{self.share:.3g} of full rank"
        return f"{rank} at {self.bits} bits"


def _check_bits(bits: int) -> None:
    if not MIN_BITS <= bits <= MAX_BITS:
        raise SpecError(f"bits must be in {MIN_BITS}..{MAX_BITS}, got {bits}")


Point = TypeVar("Point", LayerPoint, Level)


def check_menu(points: Sequence[Point]) -> None:
    """Raise unless the points of a menu are a chain, each componentwise >= the one before."""
    if not points:
        raise SpecError("a menu needs at least one point")
    for below, above in itertools.pairwise(points):
        if below == above or not below <= above:
            raise SpecError(f"a menu is a chain, but {above} does not stand above {below}")


@dataclass(frozen=True)
class Profile:
    """One point per layer, by layer name; `a <= b` when it holds for every layer."""

    name: str
    points: Mapping[str, LayerPoint]

    def __post_init__(self) -> None:
        if not self.points:
            raise SpecError(f"profile {self.name!r} has no layers")
        object.__setattr__(self, "points", MappingProxyType(dict(self.points)))

    def __le__(self, other: Profile) -> bool:
        if self.points.keys() != other.points.keys():
            raise SpecError(f"profiles {self.name!r} and {other.name!r} have different layers")
        return all(point <= other.points[name] for name, point in self.points.items())

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted((n, p.rank, p.bits) for n, p in self.points.items()))))


@dataclass(frozen=True)
class ProfileChain:
    """The profiles of an artifact, smallest first, each <= the next."""

    profiles: tuple[Profile, ...]

    def __post_init__(self) -> None:
        if not self.profiles:
            raise SpecError("an artifact needs at least one profile")
        names = [profile.name for profile in self.profiles]
        if len(set(names)) != len(names):
            raise SpecError(f"profile names repeat: {', '.join(names)}")
        for below, above in zip(self.profiles, self.profiles[1:], strict=False):
            if not below <= above:
                raise SpecError(f"profile {below.name!r} does not stand below {above.name!r}")

    def __iter__(self) -> Iterator[Profile]:
        return iter(self.profiles)

    def __len__(self) -> int:
        return len(self.profiles)

    def __getitem__(self, name: str) -> Profile:
        for profile in self.profiles:
            if profile.name == name:
                return profile
        raise SpecError(f"no profile {name!r}: there are {', '.join(p.name for p in self)}")

    @property
    def top(self) -> Profile:
        return self.profiles[-1]
