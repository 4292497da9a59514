"""A controller over the profiles an artifact ships: from a budget's limits to one of them."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from t3c.control.policy import Policy, nearest_profile
from t3c.control.token import RESOURCES, Array, Token
from t3c.errors import SpecError
from t3c.spec import Level


@dataclass(frozen=True)
class Controlled:
    """A policy, the shipped profiles as points of its units, smallest first, and their shares.

    `shares` are what each profile's layers take of latency, size and energy, next to all layers at
    their top; None where it is not known.
    """

    policy: Policy
    profiles: Mapping[str, Mapping[str, Level]]
    shares: Mapping[str, tuple[float | None, float | None, float | None]]

    def __post_init__(self) -> None:
        if not self.profiles or self.profiles.keys() != self.shares.keys():
            raise SpecError("a controller needs profiles, and shares of the same profiles")
        for name, points in self.profiles.items():
            if points.keys() != self.policy.about.units.keys():
                raise SpecError(f"profile {name!r} does not have the controller's units")
            if any(share is not None and not 0 <= share < math.inf for share in self.shares[name]):
                raise SpecError(f"profile {name!r} has shares that are negative or not finite")
        for below, above in itertools.pairwise(self.profiles):
            mine, larger = self.profiles[below], self.profiles[above]
            if not all(mine[unit] <= larger[unit] for unit in mine):
                raise SpecError(f"profile {above!r} is not above profile {below!r}")

    def propose(
        self,
        limits: Sequence[float | None],
        taken: Sequence[Sequence[float | None]],
        summary: Array | None = None,
    ) -> str:
        """The shipped profile nearest to what the policy wants within limits, one a resource.

        `taken` says what each profile takes, in the unit of its limit. More is never less.
        """
        columns = zip(*taken, strict=True)
        shares = [
            None if limit is None else self._share(resource, limit, column)
            for resource, (limit, column) in enumerate(zip(limits, columns, strict=True))
        ]
        token = Token(**dict(zip(RESOURCES, shares, strict=True)))
        points = self.policy.points(token, None, summary)
        return list(self.profiles)[nearest_profile(points, list(self.profiles.values()))]

    def _share(self, resource: int, limit: float, taken: Sequence[float | None]) -> float | None:
        """A limit as a share of what all layers take, read off the profiles: rising with it."""
        rows = zip(taken, (self.shares[name][resource] for name in self.profiles), strict=True)
        known = [(mine, share) for mine, share in rows if mine is not None and share is not None]
        if not known:
            return None
        # A profile that was measured faster than a smaller one counts as slow as that. Exact, so
        # that no rounding turns a larger limit, or one of a lower quantile, into a smaller share.
        times, shares = (
            list(itertools.accumulate(column, max)) for column in zip(*known, strict=True)
        )
        above = bisect_right(times, limit)
        if above == len(times):
            return float(shares[-1])
        low, share = (times[above - 1], shares[above - 1]) if above else (0, 0)
        start, end, lowest, highest = map(Fraction, (low, times[above], share, shares[above]))
        return float(lowest + (Fraction(limit) - start) / (end - start) * (highest - lowest))
