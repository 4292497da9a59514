"""A controller over the profiles an artifact ships: from a budget's limits to one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from t3c.control.policy import Policy, nearest_profile
from t3c.control.token import RESOURCES, Array, Token
from t3c.errors import SpecError
from t3c.spec import LayerPoint


@dataclass(frozen=True)
class Controlled:
    """A policy, the shipped profiles as points of its units, smallest first, and their shares.

    `shares` are what each profile's layers take of latency, size and energy, next to all layers at
    their top; None where it is not known.
    """

    policy: Policy
    profiles: Mapping[str, Mapping[str, LayerPoint]]
    shares: Mapping[str, tuple[float | None, float | None, float | None]]

    def __post_init__(self) -> None:
        if not self.profiles or self.profiles.keys() != self.shares.keys():
            raise SpecError("a controller needs profiles, and shares of the same profiles")
        for name, points in self.profiles.items():
            if points.keys() != self.policy.about.units.keys():
                raise SpecError(f"profile {name!r} does not have the controller's units")

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
        rows = zip(taken, (s[resource] for s in self.shares.values()), strict=True)
        known = [(mine, share) for mine, share in rows if mine is not None and share is not None]
        if not known:
            return None
        # A profile that was measured faster than a smaller one counts as slow as that.
        mine, share = (np.maximum.accumulate(column) for column in zip(*known, strict=True))
        if limit < mine[0]:
            return float(share[0] * limit / mine[0])
        return float(np.interp(limit, mine, share))
