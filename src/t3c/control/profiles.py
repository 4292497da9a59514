"""From candidates to the few profiles an artifact ships: by drift, and by what was measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from t3c.control.knapsack import Allocation
from t3c.errors import SpecError

NAMES = ("tiny", "small", "med", "large", "max")
_FEW = {
    1: ("max",),
    2: ("tiny", "max"),
    3: ("tiny", "med", "max"),
    4: ("tiny", "small", "large", "max"),
}


@dataclass(frozen=True)
class Measured:
    """A profile as measured: the p50 in ms, its interval, the size, the drift."""

    name: str
    p50: float
    low: float
    high: float
    size: float
    drift: float

    def __post_init__(self) -> None:
        if not (0 < self.p50 < math.inf and 0 < self.low <= self.high < math.inf):
            raise SpecError(
                f"profile {self.name!r}: a p50 and its interval must be positive, "
                f"got {self.p50} in {self.low}..{self.high}"
            )
        if not 0 < self.size < math.inf or not self.drift >= 0:
            raise SpecError(
                f"profile {self.name!r}: size must be positive and drift 0 or more, "
                f"got {self.size} and {self.drift}"
            )


class PruneCode(StrEnum):
    """Why a profile is not shipped."""

    SLOWER = "slower"
    NO_GAIN = "no gain"
    SURPLUS = "surplus"
    INEXACT = "inexact"


@dataclass(frozen=True)
class Pruned:
    """A profile that is not shipped, and why.

    SLOWER: `than` a profile above it, `figures` are the p50 of both in ms. NO_GAIN: over the next
    above it, `figures` are the least gains in time and in size, as shares. SURPLUS: `figures` is
    how many are shipped. INEXACT: an engine does not compute what torch does, as `detail` says.
    """

    name: str
    code: PruneCode
    than: str = ""
    figures: tuple[float, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        match self.code, self.figures:
            case PruneCode.SLOWER, (own, other):
                times = f"{own:.4g} ms against {other:.4g}"
                return f"slower than {self.than} ({times}) though below it"
            case PruneCode.NO_GAIN, (faster, smaller):
                gains = f"neither {100 * faster:g}% faster nor {100 * smaller:g}% smaller"
                return f"{gains} than {self.than}"
            case PruneCode.SURPLUS, (count,):
                return f"more than {count:g} are worth it"
        return self.detail


def names_for(count: int) -> tuple[str, ...]:
    """The names of `count` profiles, smallest first."""
    if count < 1:
        raise SpecError(f"at least one profile is needed, got {count}")
    if count > len(NAMES):
        steps = len(NAMES) - 1
        known = {round(step * (count - 1) / steps): name for step, name in enumerate(NAMES)}
        return tuple(known.get(index, f"p{index + 1}") for index in range(count))
    return _FEW.get(count, NAMES)


def spread(path: Sequence[Allocation], worst_drift: float, count: int) -> list[Allocation]:
    """Allocations whose cost rises by equal factors, from the first of use to the last.

    Of use is what a first-order estimate puts within `worst_drift` of the original, relative to
    its output; fewer than `count` where fewer are of use, smallest first.
    """
    if not path or count < 1:
        raise SpecError(f"cannot choose {count} of {len(path)} allocations")
    useful = [a for a in path if a.drift <= worst_drift] or [path[-1]]
    return [useful[i] for i in _evenly([math.log(max(a.cost, 1e-9)) for a in useful], count)]


def prune(
    measured: Sequence[Measured], *, faster: float = 0.02, smaller: float = 0.05
) -> tuple[list[str], list[Pruned]]:
    """Return the profiles of a chain worth shipping, smallest first, and the others with why.

    From the top, which always stays, down: a profile stays if its p50 is not above that of any
    kept one beyond their intervals, and it is at least `faster` or `smaller`, as shares, than the
    kept one next above. So what is kept is ordered by p50, and by size where times are alike.
    """
    _check_chain(measured)
    if not (0 <= faster < 1 and 0 <= smaller < 1):
        raise SpecError(f"faster and smaller must be in 0..1, got {faster} and {smaller}")
    kept: list[Measured] = [measured[-1]]
    pruned: list[Pruned] = []
    for mine in reversed(measured[:-1]):
        above = kept[-1]
        quickest = min(kept, key=lambda m: m.high)
        if mine.low > quickest.high:
            times = mine.p50, quickest.p50
            pruned.append(Pruned(mine.name, PruneCode.SLOWER, quickest.name, times))
        elif mine.p50 > above.p50 * (1 - faster) and mine.size > above.size * (1 - smaller):
            gains = faster, smaller
            pruned.append(Pruned(mine.name, PruneCode.NO_GAIN, above.name, gains))
        else:
            kept.append(mine)
    return [m.name for m in reversed(kept)], pruned[::-1]


def thin(kept: Sequence[Measured], count: int) -> list[str]:
    """`count` of the profiles of a chain, the first and the last among them, evenly in what they
    take: the logs of time and size, added up. One profile alone is the last.
    """
    _check_chain(kept)
    if count < 1:
        raise SpecError(f"at least one profile is needed, got {count}")
    taken = [math.log(m.p50) + math.log(m.size) for m in kept]
    return [kept[i].name for i in _evenly(taken, count)]


def fitting(kept: Sequence[Measured], budgets: Sequence[float]) -> list[str]:
    """For each budget, a share of the last profile's p50, the largest profile within it; the last.

    No profile serves two budgets: the smaller one has the largest that is left. A budget that
    nothing is within has the first, unless that is taken.
    """
    _check_chain(kept)
    taken = [len(kept) - 1]
    for budget in sorted(budgets, reverse=True):
        left = range(taken[-1])
        within = [i for i in left if kept[i].p50 <= budget * kept[-1].p50]
        if left:
            taken.append(within[-1] if within else 0)
    return [kept[i].name for i in reversed(taken)]


def _evenly(values: Sequence[float], count: int) -> list[int]:
    """Places of `count` values, or of all there are, in equal steps from the first to the last.

    They come in order and the last is always there.
    """
    last = len(values) - 1
    count = min(count, len(values))
    picked = [0] if count > 1 else []
    for step in range(1, count - 1):
        target = values[0] + (values[-1] - values[0]) * step / (count - 1)
        room = range(picked[-1] + 1, last - (count - 2 - step))  # leaves as many as are to follow
        picked.append(min(room, key=lambda i: abs(values[i] - target)))
    return [*picked, last]


def _check_chain(measured: Sequence[Measured]) -> None:
    names = [m.name for m in measured]
    if not names or len(set(names)) < len(names):
        raise SpecError(f"a chain needs profiles of different names, got {names}")
    for below, above in itertools.pairwise(measured):
        if below.size > above.size:
            raise SpecError(
                f"profiles come smallest first, but {below.name!r} of size {below.size:g} comes "
                f"before {above.name!r} of size {above.size:g}"
            )
