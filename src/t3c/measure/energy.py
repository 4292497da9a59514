"""Energy of an inference, from counters of the processor (RAPL) or of a GPU (NVML)."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from t3c.errors import SpecError

POWERCAP = Path("/sys/class/powercap")
POWER_HERTZ = 20
PROBE_SECONDS = 0.05


class EnergyMeter(Protocol):
    """A counter of energy: only differences of its readings mean something."""

    @property
    def name(self) -> str:
        """What is metered."""
        ...

    def joules(self) -> float:
        """The energy used so far."""
        ...


@dataclass(frozen=True)
class Unavailable:
    """There is no meter, and why."""

    reason: str


class RAPL:
    """The energy of all processor packages, from their powercap folders.

    A counter wraps after minutes to hours, depending on the load, and is to be read before it
    has done so twice.
    """

    name = "rapl"

    def __init__(self, packages: list[Path]) -> None:
        self._ranges = {
            package: int((package / "max_energy_range_uj").read_text()) for package in packages
        }
        self._last = {package: _microjoules(package) for package in packages}
        self._total = 0

    def joules(self) -> float:
        for package, last in self._last.items():
            now = _microjoules(package)
            self._total += now - last + (self._ranges[package] if now < last else 0)
            self._last[package] = now
        return self._total / 1e6


class PowerIntegral:
    """The energy under power sampled by a thread, by trapezoids (paper E.3), until closed."""

    def __init__(
        self,
        watts: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
        hertz: float = POWER_HERTZ,
    ) -> None:
        self._watts, self._clock, self._period = watts, clock, 1 / hertz
        self._total = 0.0
        self._last = (clock(), watts())
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="t3c-power", daemon=True)
        self._thread.start()

    def joules(self) -> float:
        """The integral up to now."""
        with self._lock:
            then, before = self._last
            self._last = now, power = self._clock(), self._watts()
            self._total += (now - then) * (before + power) / 2
            return self._total

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._closed.wait(self._period):
            self.joules()


class NVML:
    """The energy of one GPU: its counter or, on those without, its power integrated."""

    def __init__(self, index: int = 0) -> None:
        self._nvml = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._handle: Any = self._nvml.nvmlDeviceGetHandleByIndex(index)
        self.name = f"nvml:{index}"
        self._integral: PowerIntegral | None = None
        try:
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._nvml.NVMLError:
            self._integral = PowerIntegral(self._watts)

    def joules(self) -> float:
        if self._integral:
            return self._integral.joules()
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3

    def close(self) -> None:
        if self._integral:
            self._integral.close()
        self._nvml.nvmlShutdown()

    def _watts(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3


def find_meter(
    root: Path = POWERCAP,
    device: str = "cpu",
    sleep: Callable[[float], object] = time.sleep,
) -> EnergyMeter | Unavailable:
    """The meter of what runs on `device`, "cpu" or "cuda": never that of the other one."""
    if device not in ("cpu", "cuda"):
        raise SpecError(f"energy is metered for cpu and cuda, not {device!r}")
    return _find_rapl(root, sleep) if device == "cpu" else _find_nvml()


def _find_rapl(root: Path, sleep: Callable[[float], object]) -> EnergyMeter | Unavailable:
    try:
        domains = sorted(path.parent for path in root.glob("intel-rapl:*/name"))
        packages = [path for path in domains if (path / "name").read_text().startswith("package")]
        if not packages:
            return Unavailable(f"no RAPL package in {root}")
        meter = RAPL(packages)
        before = meter.joules()
        sleep(PROBE_SECONDS)
        counts = meter.joules() > before
    except OSError as error:
        return Unavailable(f"RAPL cannot be read: {error.strerror}: {error.filename}")
    # Virtual machines may show a counter that stands still; a processor always uses some energy.
    return meter if counts else Unavailable("the RAPL counter stands still")


def _find_nvml() -> EnergyMeter | Unavailable:
    try:
        nvml: ModuleType = importlib.import_module("pynvml")
    except ImportError:
        return Unavailable("pynvml is not installed: pip install nvidia-ml-py")
    try:
        return NVML()
    except nvml.NVMLError as error:
        return Unavailable(f"NVML cannot be read: {error}")


def idle_watts(
    meter: EnergyMeter,
    seconds: float = 1.0,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The power used while this process waits."""
    begin, before = clock(), meter.joules()
    sleep(seconds)
    return (meter.joules() - before) / (clock() - begin)


def energy_per_call(
    meter: EnergyMeter,
    call: Callable[[], object],
    idle: float,
    *,
    seconds: float = 1.0,
    least: int = 10,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Millijoules of one call beyond the `idle` watts, over `seconds` and `least` calls or more."""
    calls = 0
    begin, before = clock(), meter.joules()
    while calls < least or clock() - begin < seconds:
        call()
        calls += 1
    used, passed = meter.joules() - before, clock() - begin
    return max(0.0, used - idle * passed) / calls * 1e3  # paper E.3


def _microjoules(package: Path) -> int:
    return int((package / "energy_uj").read_text())
