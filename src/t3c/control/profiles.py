"""From a path of nested allocations to the few profiles an artifact ships."""

from __future__ import annotations

import math
from collections.abc import Sequence

from t3c.control.knapsack import Allocation
from t3c.errors import SpecError
from t3c.spec import Profile, ProfileChain

NAMES = ("tiny", "small", "med", "large", "max")


def pick_profiles(
    path: Sequence[Allocation], worst_drift: float, names: Sequence[str] = NAMES
) -> ProfileChain:
    """Profiles spread evenly in cost, from the first allocation of use to the last.

    Of use is what a first-order estimate puts within `worst_drift` of the original, relative to
    its output; where only the end of the path is, the chain starts there and is shorter.
    """
    if not names:
        raise SpecError("at least one profile name is needed")
    useful = [a for a in path if math.sqrt(max(a.squared_drift, 0.0)) <= worst_drift] or [path[-1]]
    low, high = useful[0].cost, useful[-1].cost
    picked: list[Allocation] = []
    for index in range(len(names)):
        target = high if len(names) == 1 else low + (high - low) * index / (len(names) - 1)
        nearest = min(useful, key=lambda a: abs(a.cost - target))
        if not picked or nearest.points != picked[-1].points:
            picked.append(nearest)
    chosen = names[len(names) - len(picked) :]
    return ProfileChain(
        tuple(Profile(name, a.points) for name, a in zip(chosen, picked, strict=True))
    )
