from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from t3c.errors import SpecError
from t3c.measure.energy import (
    NVML,
    RAPL,
    PowerIntegral,
    Unavailable,
    energy_per_call,
    find_meter,
    idle_watts,
)

RANGE = 1_000_000


class Sysfs:
    """A powercap folder with two packages, a core domain in one, and a platform domain."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for domain, name in [
            ("intel-rapl:0", "package-0"),
            ("intel-rapl:1", "package-1"),
            ("intel-rapl:0:0", "core"),
            ("intel-rapl:2", "psys"),
        ]:
            (root / domain).mkdir(parents=True)
            (root / domain / "name").write_text(f"{name}\n")
            (root / domain / "max_energy_range_uj").write_text(f"{RANGE}\n")
            self.set(domain, 900_000)
        (root / "intel-rapl").mkdir()

    def set(self, domain: str, microjoules: int) -> None:
        (self.root / domain / "energy_uj").write_text(f"{microjoules}\n")

    def count(self, seconds: float) -> None:
        """Time passes: the counters rise."""
        self.set("intel-rapl:0", 910_000)


def test_rapl_adds_packages_and_survives_their_wrap(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path)
    meter = find_meter(tmp_path, sleep=sysfs.count)
    assert isinstance(meter, RAPL)
    before = meter.joules()
    sysfs.set("intel-rapl:0", 960_000)
    sysfs.set("intel-rapl:1", 900_500)
    for ignored in ("intel-rapl:0:0", "intel-rapl:2"):
        sysfs.set(ignored, 990_000)
    assert meter.joules() - before == pytest.approx(0.0505)
    sysfs.set("intel-rapl:0", 20_000)
    assert meter.joules() - before == pytest.approx(0.0505 + 0.06)
    sysfs.set("intel-rapl:0", 10_000)
    assert meter.joules() - before == pytest.approx(0.0505 + 0.06 + 0.99)
    assert meter.joules() - before == pytest.approx(0.0505 + 0.06 + 0.99)


def test_what_cannot_be_read_is_unavailable(tmp_path: Path) -> None:
    assert find_meter(tmp_path / "missing") == Unavailable(
        f"no RAPL package in {tmp_path / 'missing'}"
    )
    sysfs = Sysfs(tmp_path)
    still = find_meter(tmp_path, sleep=lambda seconds: None)
    assert still == Unavailable("the RAPL counter stands still")
    # A folder stands for a file without permission: root may read every file.
    counter = tmp_path / "intel-rapl:1" / "energy_uj"
    counter.unlink()
    counter.mkdir()
    found = find_meter(tmp_path, sleep=sysfs.count)
    assert isinstance(found, Unavailable)
    assert str(counter) in found.reason
    with pytest.raises(SpecError, match="tpu"):
        find_meter(device="tpu")


class NVMLError(Exception):
    pass


class FakeNVML(SimpleNamespace):
    """pynvml of one GPU with a counter in millijoules, or without one."""

    NVMLError = NVMLError

    def __init__(self, *, present: bool = True, counter: bool = True) -> None:
        super().__init__(present=present, counter=counter, millijoules=5000, milliwatts=30_000)
        self.down = False

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.present:
            raise NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.down = True

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"gpu {index}"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        assert handle == "gpu 0"
        if not self.counter:
            raise NVMLError("Not Supported")
        return self.millijoules

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        assert handle == "gpu 0"
        return self.milliwatts


def test_nvml_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = find_meter(device="cuda")
    assert isinstance(meter, NVML)
    assert meter.name == "nvml:0"
    before = meter.joules()
    nvml.millijoules += 2500
    assert meter.joules() - before == pytest.approx(2.5)
    meter.close()
    assert nvml.down


def test_nvml_without_a_counter_integrates_power(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNVML(counter=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    threads = threading.active_count()
    meter = find_meter(device="cuda")
    assert isinstance(meter, NVML)
    assert threading.active_count() == threads + 1
    nvml.milliwatts = 0
    meter.joules()
    used = meter.joules()
    assert meter.joules() == used > 0
    nvml.milliwatts = 30_000
    assert meter.joules() > used
    meter.close()
    assert threading.active_count() == threads


def test_nvml_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = find_meter(device="cuda")
    assert isinstance(found, Unavailable)
    assert "pip install" in found.reason
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(present=False))
    assert find_meter(device="cuda") == Unavailable("NVML cannot be read: Driver Not Loaded")


def test_power_is_integrated_by_trapezoids() -> None:
    now, power = 0.0, 10.0
    integral = PowerIntegral(lambda: power, clock=lambda: now, hertz=1e-3)
    expected = 0.0
    for step, (seconds, following) in enumerate([(1.0, 20.0), (0.5, 20.0), (2.0, 0.0)]):
        expected += seconds * (power + following) / 2
        now, power = now + seconds, following
        assert integral.joules() == pytest.approx(expected), step
    assert integral.joules() == pytest.approx(15 + 10 + 20)
    integral.close()


def test_power_is_sampled_between_readings() -> None:
    sampled = threading.Event()
    asked = 0

    def watts() -> float:
        nonlocal asked
        asked += 1
        if asked == 4:
            sampled.set()
        return 1.0

    integral = PowerIntegral(watts, hertz=200)
    assert sampled.wait(10)
    integral.close()


class Bench:
    """A machine that uses 20 W idle and `work` joules more in each call of 1 ms."""

    name = "bench"

    def __init__(self, work: float, seconds: float = 0.001) -> None:
        self.now, self.used, self.work, self.seconds, self.calls = 0.0, 3.0, work, seconds, 0

    def joules(self) -> float:
        return self.used

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.used += 20 * seconds

    def call(self) -> None:
        self.calls += 1
        self.sleep(self.seconds)
        self.used += self.work

    def clock(self) -> float:
        return self.now


def test_the_idle_power_is_subtracted() -> None:
    bench = Bench(work=0.005)
    idle = idle_watts(bench, sleep=bench.sleep, clock=bench.clock)
    assert idle == pytest.approx(20)
    found = energy_per_call(bench, bench.call, idle, clock=bench.clock)
    assert found == pytest.approx(5.0)
    assert bench.calls == pytest.approx(1000, abs=1)
    assert energy_per_call(bench, bench.call, 0.0, clock=bench.clock) == pytest.approx(25.0)
    assert energy_per_call(bench, bench.call, 100.0, clock=bench.clock) == 0


def test_slow_calls_are_metered_often_enough() -> None:
    bench = Bench(work=0.5, seconds=2.0)
    assert energy_per_call(bench, bench.call, 20, least=7, clock=bench.clock) == pytest.approx(500)
    assert bench.calls == 7
