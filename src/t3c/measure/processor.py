"""The processor this process runs on, as the system tells of it."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

# What decides which kernels an engine picks, on x86 and on Arm; clocks and the like do not.
TELLING = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",
    "isa",
)  # fmt: skip

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cpu_fields() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo by name; none where there is no such file."""
    info = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    for line in info.read_text().splitlines() if info.exists() else []:
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields


@cache
def cpu_identity() -> str:
    """The processor's name and every instruction set it offers, in one line."""
    fields = cpu_fields()
    known = [
        f"{name}={' '.join(sorted(fields[name].split()))}" for name in TELLING if name in fields
    ]
    return "; ".join([platform.machine(), platform.processor(), *known])


@cache
def cache_bytes(folder: Path = CACHES) -> int:
    """Return the bytes of the processor's largest cache; 0 where they are not known."""
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]
    return max(
        (int(size[:-1]) * UNITS[size[-1]] for size in sizes if size[-1:] in UNITS), default=0
    )
