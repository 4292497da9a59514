"""How long profiles take on this server: measured before it is ready, then as they are seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from t3c.engines.protocol import Array
from t3c.runtime.calls import part_sizes
from t3c.runtime.runtime import Runtime
from t3c.runtime.sessions import SessionKey

CALLS = 7  # timed calls of a profile and a batch size
MOST = 32  # samples that are tried as one batch
HELPS = 0.9  # of the time per sample at half the size, from which on a larger batch is worth it
SLOW_MS = 2000.0  # of a call: what takes longer is timed once
HICCUP = 4.0  # times what is expected: more than that is not believed at once
LEARN, LEARN_SPREAD = 1 / 16, 1 / 8
BEST = 0.5  # of what was measured, when the machine may have been busy
CAREFUL = 3.0  # spreads above the mean

Times = Mapping[str, Mapping[int, float]]  # milliseconds by profile and batch size


class Pace:
    """Milliseconds of a profile for some samples.

    Profiles keep their ratios while the machine becomes slower or faster, so what is learnt of the
    one that serves holds for the others.

    >>> pace = Pace({"low": {1: 2.0, 2: 3.0}})
    >>> pace.expected("low", 3)
    5.0
    """

    def __init__(self, times: Times) -> None:
        self.times = times
        self.largest = max(next(iter(times.values())))
        self.factor, self.spread = 1.0, 0.1

    def expected(self, profile: str, rows: int) -> float:
        """What it takes on average."""
        return self._measured(profile, rows) * self.factor

    def possible(self, profile: str, rows: int) -> float:
        """What it may take at best: less than was measured, whatever was learnt since."""
        return self._measured(profile, rows) * min(self.factor, BEST)

    def careful(self, profile: str, rows: int) -> float:
        """What it hardly ever exceeds."""
        return self._measured(profile, rows) * (self.factor + CAREFUL * self.spread)

    def per_row(self, profile: str) -> float:
        """What a sample takes among many."""
        times = self.times[profile]
        return min(ms / size for size, ms in times.items()) * self.factor

    def saw(self, profile: str, rows: int, ms: float) -> None:
        """Take what a lot took."""
        ratio = min(ms / self._measured(profile, rows), HICCUP * self.factor)
        self.spread += (abs(ratio - self.factor) - self.spread) * LEARN_SPREAD
        self.factor += (ratio - self.factor) * LEARN

    def _measured(self, profile: str, rows: int) -> float:
        times = self.times[profile]
        whole, rest = divmod(rows, self.largest)
        return whole * times[self.largest] + sum(times[s] for s in part_sizes(rest, self.largest))


def measure_pace(
    runtime: Runtime,
    inputs: Sequence[Array],
    batch: int | None = None,
    watch: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> Pace:
    """Warm every profile that runs here, at every batch size that is of use.

    Larger batches help where their time per sample falls: found out on the smallest profile, whose
    calls are the shortest. `batch` says how large they are instead.
    """
    names = [candidate.profile for candidate in runtime.candidates]
    sizes = _sizes_to(batch) if batch else _useful(runtime, names[0], inputs)
    times: dict[str, dict[int, float]] = {}
    for index, name in enumerate(names):
        watch(f"warming {name}", index, len(names))
        times[name] = {size: _time(runtime, name, inputs, size) for size in sizes}
    watch("warm", len(names), len(names))
    return Pace(times)


def _useful(runtime: Runtime, name: str, inputs: Sequence[Array]) -> list[int]:
    before, size = _time(runtime, name, inputs, 1), 2
    while size <= MOST:
        each = _time(runtime, name, inputs, size) / size
        if each > HELPS * before:
            break
        before, size = each, size * 2
    return _sizes_to(size // 2)


def _sizes_to(largest: int) -> list[int]:
    return [1 << bit for bit in range(largest.bit_length())]


def _time(runtime: Runtime, name: str, inputs: Sequence[Array], size: int) -> float:
    """The median of a few calls, after one that may have to compile; of what is watched, of the
    session that tells of activations."""
    rows = [np.repeat(array[:1], size, axis=0) for array in inputs]
    taken: list[float] = []
    with runtime.pool.lease(SessionKey(name, name in runtime.watches)) as session:
        session.run(rows)
        while len(taken) < CALLS and sum(taken) < SLOW_MS:
            start = time.perf_counter()
            session.run(rows)
            taken.append((time.perf_counter() - start) * 1e3)
    return median(taken)
