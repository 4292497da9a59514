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
    """A profile that could be shipped: its time, its size, and its loss on each sample (n,).

    Losses are None where it was not judged: it is slower than a larger one, or smaller than two
    that lose too much.
    """

    name: str
    p50: float
    size: float
    losses: Array | None = None


@dataclass(frozen=True)
class Plain:
    """Plain int8 as measured in turns with the candidates; None where there is no such engine."""

    p50: float
    size: float
    losses: Array


@dataclass(frozen=True)
class Row:
    """A candidate in the record of a placement: `drop` is the paired mean, `upper` its bound; None
    of what was not judged."""

    candidate: str
    p50: float
    size: float
    drop: float | None
    upper: float | None
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
    if not chain or chain[-1].losses is None:
        raise SpecError("there is no candidate to place, or the largest was not judged")
    fates = [Fate.LOSES if c.losses is None else Fate.BETWEEN for c in chain]
    ordered = in_order(chain)
    for index in set(range(len(chain))) - set(ordered):
        slower = chain[index].p50 > min(c.p50 for c in chain[index + 1 :])
        fates[index] = Fate.SLOWER if slower else Fate.BETWEEN
    judged = [(index, c.losses) for index, c in enumerate(chain) if c.losses is not None]
    drops = falling([float((losses - reference).mean()) for _, losses in judged])
    dropped, uppers = dict[int, float](), dict[int, float]()
    for (index, losses), drop in zip(judged, drops, strict=True):
        low, high = paired_interval(losses, reference, errors=1.0)
        dropped[index], uppers[index] = drop, drop + (high - low) / 2
    able = [index for index in ordered if index in uppers]
    if plain is not None:
        able = [i for i in able if _worth(i, chain, uppers[i], limit, plain, fates)]
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
        Row(c.name, c.p50, c.size, dropped.get(i), uppers.get(i), fates[i], names.get(i))
        for i, c in enumerate(chain)
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


def in_order(chain: Sequence[Candidate]) -> list[int]:
    """Return the candidates, smallest first, that are not slower than a larger one.

    One that saves many bytes may be as much slower as does not count against plain int8: decoders
    are bound by what is not compressed, and all of theirs take the same time but for noise.
    """
    kept, quickest = [len(chain) - 1], chain[-1]
    for index in range(len(chain) - 2, -1, -1):
        mine, above = chain[index], chain[kept[-1]]
        smaller = mine.size < above.size * (1 - SMALLER)
        if mine.p50 > quickest.p50 * (1 + (FASTER if smaller else STEP / 2)):
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
    upper: float,
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
    assert mine.losses is not None
    worse = mine.losses.mean() > plain.losses.mean() and upper > TINY_TIMES * limit
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
