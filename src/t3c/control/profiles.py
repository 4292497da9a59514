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
    """Profiles whose drift falls by equal factors, from the first allocation of use to the last.

    Of use is what a first-order estimate puts within `worst_drift` of the original, relative to
    its output; where fewer allocations are than names, the chain is shorter and keeps the last
    names.
    """
    if not names:
        raise SpecError("at least one profile name is needed")
    useful = [a for a in path if a.drift <= worst_drift] or [path[-1]]
    low, high = (max(a.drift, 1e-9) for a in (useful[-1], useful[0]))
    count = min(len(names), len(useful))
    picked: list[Allocation] = [useful[-1]]
    last = len(useful) - 1
    for index in range(1, count):
        target = low * (high / low) ** (index / (count - 1))
        room = range(count - 1 - index, last)  # as many below as are still to be picked
        last = min(room, key=lambda i: abs(math.log(max(useful[i].drift, 1e-9) / target)))
        picked.append(useful[last])
    picked.reverse()
    chosen = names[len(names) - len(picked) :]
    return ProfileChain(
        tuple(Profile(name, a.points) for name, a in zip(chosen, picked, strict=True))
    )
