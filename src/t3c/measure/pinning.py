"""Keeping to the same cores while measuring."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from t3c.errors import SpecError
from t3c.measure.quiet import core_times

SAMPLE_SECONDS = 0.1
CPUS = Path("/sys/devices/system/cpu")


@contextmanager
def pinned(threads: int) -> Iterator[tuple[int, ...]]:
    """Keep the calling thread, and those it starts, to `threads` of its cores; yields these.

    Yields () and changes nothing if all its cores are asked for or the system does not allow it.
    """
    if threads < 1:
        raise SpecError(f"at least 1 thread has to run, got {threads}")
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()
    cores: tuple[int, ...] = ()
    if threads < len(allowed):
        cores = choose_cores(allowed, threads, _busy_now(), _physical(allowed))
        try:
            os.sched_setaffinity(0, cores)
        except OSError:
            cores = ()
    try:
        yield cores
    finally:
        if cores:
            os.sched_setaffinity(0, allowed)


def choose_cores(
    allowed: Collection[int],
    threads: int,
    busy: Mapping[int, float],
    physical: Mapping[int, str],
) -> tuple[int, ...]:
    """The least busy cores, two of one physical core only where there are no others.

    Among equals the highest numbers, as interrupts fall on the lowest.
    """
    chosen: list[int] = []
    for _ in range(threads):
        taken = {physical.get(core, str(core)) for core in chosen}
        left = [core for core in allowed if core not in chosen]
        chosen.append(
            min(left, key=lambda c: (physical.get(c, str(c)) in taken, busy.get(c, 0.0), -c))
        )
    return tuple(sorted(chosen))


def _busy_now() -> dict[int, float]:
    before = core_times()
    time.sleep(SAMPLE_SECONDS)
    after = core_times()
    return {
        int(name.removeprefix("cpu")): after[name][0] - before[name][0]
        for name in before.keys() & after.keys() - {"cpu"}
    }


def _physical(cores: Collection[int]) -> dict[int, str]:
    """The hardware threads that share each core's physical core, as the system writes them."""
    found = {}
    for core in cores:
        path = CPUS / f"cpu{core}" / "topology" / "thread_siblings_list"
        if path.exists():
            found[core] = path.read_text().strip()
    return found
