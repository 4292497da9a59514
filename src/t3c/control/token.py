"""What a controller is asked, and what it decides on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from t3c.errors import BudgetError, SpecError
from t3c.spec import Level, check_menu

Array: TypeAlias = NDArray[Any]
RESOURCES = ("latency", "size", "energy")
TOKENS = ("tuple", "scalar")


@dataclass(frozen=True)
class Token:
    """A budget: limits as shares of what the largest profile takes, none where not given."""

    latency: float | None = None
    size: float | None = None
    energy: float | None = None

    def __post_init__(self) -> None:
        for name in RESOURCES:
            limit = getattr(self, name)
            if limit is not None and not limit >= 0:
                raise BudgetError(f"the share of {name} must be 0 or more, got {limit}")

    def limits(self) -> Array:
        """The limits in the order of RESOURCES, in 0..1; no limit is 1."""
        given = (getattr(self, name) for name in RESOURCES)
        return np.array([1.0 if limit is None else min(float(limit), 1.0) for limit in given])


@dataclass(frozen=True)
class About:
    """What a policy decides on: units with their chains, devices, units that see the input."""

    units: Mapping[str, tuple[Level, ...]]
    devices: tuple[str, ...]
    summarized: tuple[str, ...] = ()
    token: Literal["tuple", "scalar"] = "tuple"

    def __post_init__(self) -> None:
        if not self.units:
            raise SpecError("a policy needs at least one unit")
        for unit, points in self.units.items():
            try:
                check_menu(points)
            except SpecError as error:
                raise SpecError(f"the chain of unit {unit!r}: {error}") from error
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise SpecError(f"a policy needs devices of different names, got {self.devices}")
        unknown = [unit for unit in self.summarized if unit not in self.units]
        if unknown or len(set(self.summarized)) < len(self.summarized):
            raise SpecError(f"summarized units are units of the policy, got {self.summarized}")
        if self.token not in TOKENS:
            raise SpecError(f"token is one of {', '.join(TOKENS)}, got {self.token!r}")

    @cached_property
    def rows(self) -> dict[str, slice]:
        """Which rows of the step arrays are those of each unit."""
        rows, start = {}, 0
        for unit, points in self.units.items():
            rows[unit] = slice(start, start + len(points) - 1)
            start += len(points) - 1
        return rows

    @property
    def steps(self) -> int:
        """How many steps all chains have together."""
        return sum(len(points) - 1 for points in self.units.values())

    @property
    def summary_rows(self) -> list[int]:
        """The rows of the summarized units, in the order of the units."""
        chosen = [self.rows[unit] for unit in self.units if unit in self.summarized]
        return [row for rows in chosen for row in range(rows.start, rows.stop)]
