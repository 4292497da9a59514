"""Memory: of this process as the system counts it, of a graph's tensors by their lifetimes."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from t3c.errors import SpecError

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt


def rss() -> int | None:
    """Bytes of this process in memory now; None where the system does not tell."""
    return _status_bytes("VmRSS")


def peak_rss() -> int | None:
    """The most bytes of this process in memory since its start or the last `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> bool:
    """Let `peak_rss` start again from now; False where the system does not allow it."""
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def keep_freed() -> bool:
    """Let the allocator keep what this process frees, for all tensors to come; False if it cannot.

    glibc maps each large tensor anew and gives it back: a forward pass of ResNet-50 in batches of
    32 took 86 ms a sample so, and 50 ms without.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))


def available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of memory that are free for use; None where the system does not tell."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def peak_live(
    steps: Sequence[tuple[Sequence[str], Sequence[str]]],
    sizes: Mapping[str, int],
    keep: Collection[str] = (),
) -> int:
    """The most bytes of tensors alive at once when steps (inputs, outputs) run in order.

    A tensor lives from the step that first writes it (from the start if none has before it is
    read) to the last step that names it, one of `keep` to the end.
    """
    born: dict[str, int] = {}
    dies: dict[str, int] = {}
    for at, (inputs, outputs) in enumerate(steps):
        for name in inputs:
            born.setdefault(name, 0)
        for name in outputs:
            born.setdefault(name, at)
        dies |= dict.fromkeys([*inputs, *outputs], at)
    for name in keep:
        born.setdefault(name, 0)
        dies[name] = len(steps)
    if missing := sorted(born.keys() - sizes.keys()):
        raise SpecError(f"no size is given for the tensors {', '.join(missing)}")
    change = [0] * (len(steps) + 2)
    for name, at in born.items():
        change[at] += sizes[name]
        change[dies[name] + 1] -= sizes[name]
    alive = peak = 0
    for step in change:
        alive += step
        peak = max(peak, alive)
    return peak


def _status_bytes(field: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None
