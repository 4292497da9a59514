"""Which of many candidates become profiles: the fastest whose loss is within its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from t3c.errors import SpecError
from t3c.evidence.quality import Array, paired_interval

TINY_TIMES = 5  # as much loss as `med` may have, at `tiny`
FASTER, SMALLER = 0.03, 0.10  # than plain int8, for a profile to be worth shipping
STEP = 0.02  # of time or, twice that, of bytes: what a profile has to save against the next


class Fate(StrEnum):
    """The fate of a candidate."""

    SHIPPED = "shipped"
    SLOWER = "slower than a larger one"
    LOSES = "loses more than tiny may"
    NOT_WORTH = "neither 3% faster nor 10% smaller than plain int8"
    WORSE = "worse than plain int8 and beyond its target"
    BETWEEN = "not needed between its neighbours"


@dataclass(frozen=True)
class Candidate:
    """A profile that could be shipped: its time, its size, and its loss on each sample (n,)."""

    name: str
    p50: float
    size: float
    losses: Array


@dataclass(frozen=True)
class Plain:
    """Plain int8 as measured in turns with the candidates; None where there is no such engine."""

    p50: float
    size: float
    losses: Array


@dataclass(frozen=True)
class Row:
    """A candidate in the record of a placement: `drop` is the paired mean, `upper` its bound."""

    candidate: str
    p50: float
    size: float
    drop: float
    upper: float
    fate: Fate
    profile: str | None = None


@dataclass(frozen=True)
class Placed:
    """Profiles by name, smallest first, each with the candidate it is; and every candidate seen."""

    profiles: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]


def place(
    chain: Sequence[Candidate], reference: Array, limit: float, plain: Plain | None = None
) -> Placed:
    """Choose profiles of a chain, smallest first, by their losses beside a reference's.

    `max` is the last. `med` is the fastest whose paired upper bound of one standard error is
    within `limit`, `tiny` the fastest within five times that, `small` and `large` stand between
    them, evenly in time. Mean losses are first made to fall along the chain (isotonic regression):
    a candidate that was lucky on these samples does not decide.
    """
    if not chain:
        raise SpecError("there is no candidate to place")
    drops = falling([float((c.losses - reference).mean()) for c in chain])
    bounds = [paired_interval(c.losses, reference, errors=1.0) for c in chain]
    uppers = [drop + (high - low) / 2 for drop, (low, high) in zip(drops, bounds, strict=True)]
    fates = [Fate.BETWEEN] * len(chain)
    able = _in_order(chain, fates)
    if plain is not None:
        able = [i for i in able if _worth(i, chain, uppers, limit, plain, fates)]
    top = len(chain) - 1
    within = [i for i in able if uppers[i] <= limit]
    med = within[0] if within else top
    reach = [i for i in able if uppers[i] <= TINY_TIMES * limit]
    for index in able:
        if index not in reach:
            fates[index] = Fate.LOSES
    tiny = min(reach[0] if reach else med, med)
    picked: dict[str, int | None] = {
        "max": top, "med": med, "tiny": tiny,
        "large": _halfway(chain, able, med, top), "small": _halfway(chain, able, tiny, med),
    }  # fmt: skip
    names: dict[int, str] = {}
    for name, chosen in picked.items():
        if chosen is not None:
            names.setdefault(chosen, name)
    for index in names:
        fates[index] = Fate.SHIPPED
    rows = tuple(
        Row(c.name, c.p50, c.size, drop, upper, fate, names.get(index))
        for index, (c, drop, upper, fate) in enumerate(
            zip(chain, drops, uppers, fates, strict=True)
        )
    )
    return Placed(tuple((names[i], chain[i].name) for i in sorted(names)), rows)


def falling(values: Sequence[float]) -> list[float]:
    """Return the nearest values, in squares, that never rise (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] < mean:
            before, size = pools.pop()
            mean = (mean * count + before * size) / (count + size)
            count += size
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _in_order(chain: Sequence[Candidate], fates: list[Fate]) -> list[int]:
    """Return the candidates, smallest first, that are not slower than a larger one."""
    kept, quickest = [len(chain) - 1], chain[-1]
    for index in range(len(chain) - 2, -1, -1):
        mine, above = chain[index], chain[kept[-1]]
        if mine.p50 > quickest.p50 * (1 + STEP / 2):
            fates[index] = Fate.SLOWER
            continue
        saves = mine.p50 < above.p50 * (1 - STEP) or mine.size < above.size * (1 - 2 * STEP)
        if saves:
            kept.append(index)
        if mine.p50 < quickest.p50:
            quickest = mine
    return kept[::-1]


def _worth(
    index: int,
    chain: Sequence[Candidate],
    uppers: Sequence[float],
    limit: float,
    plain: Plain,
    fates: list[Fate],
) -> bool:
    """Return whether a candidate is worth shipping beside plain int8; the last always is."""
    mine = chain[index]
    if index == len(chain) - 1:
        return True
    faster = mine.p50 <= plain.p50 * (1 - FASTER) or mine.size <= plain.size * (1 - SMALLER)
    if not faster:
        fates[index] = Fate.NOT_WORTH
        return False
    worse = mine.losses.mean() > plain.losses.mean() and uppers[index] > TINY_TIMES * limit
    if worse:
        fates[index] = Fate.WORSE
    return not worse


def _halfway(chain: Sequence[Candidate], able: Sequence[int], low: int, high: int) -> int | None:
    """Return the candidate between two whose time is nearest to halfway; None if there is none."""
    between = [index for index in able if low < index < high]
    if not between:
        return None
    middle = np.sqrt(chain[low].p50 * chain[high].p50)
    return min(between, key=lambda index: abs(chain[index].p50 - middle))
