"""Heat, charge and load: what asks a runtime to serve smaller profiles for a while."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from t3c.errors import SpecError

log = logging.getLogger("t3c.runtime")

PATIENCE = 1.0  # seconds that leaving waits for a source that is being read


@dataclass(frozen=True)
class Pressure:
    """A source asks to stay `steps` profiles below what would be served else, and to serve none
    above `ceiling`; 0 and None withdraw."""

    source: str
    steps: int
    reason: str
    ceiling: str | None = None

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise SpecError(f"{self.source}: steps must not be negative, got {self.steps}")


class Source(Protocol):
    """Something to poll, by one thread; what it says bears its name."""

    @property
    def name(self) -> str: ...

    def read(self) -> Pressure: ...


class Asked(NamedTuple):
    """What all sources together ask for: the most of their steps, and why, the most first; and the
    profiles that are to serve at most, with the reason for each."""

    steps: int
    reasons: tuple[str, ...]
    ceilings: tuple[tuple[str, str], ...] = ()


class Signals:
    """The last word of every source. Reading it takes no lock: `asked` is replaced as a whole.

    >>> signals = Signals()
    >>> signals.post(Pressure("battery", 2, "battery at 9%"))
    True
    >>> signals.steps, signals.reasons
    (2, ('battery at 9%',))
    """

    def __init__(self) -> None:
        self.asked = Asked(0, ())
        self._active: dict[str, Pressure] = {}
        self._watched: set[str] = set()
        self._lock = threading.Lock()

    @property
    def steps(self) -> int:
        return self.asked.steps

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.asked.reasons

    def post(self, pressure: Pressure) -> bool:
        """Take what a source says in place of what it said before; whether what is asked for
        changed."""
        with self._lock:
            before = self.asked.steps, self.asked.ceilings
            self._active.pop(pressure.source, None)
            if pressure.steps or pressure.ceiling is not None:
                self._active[pressure.source] = pressure
            active = sorted(self._active.values(), key=lambda p: (-p.steps, p.source))
            self.asked = Asked(
                active[0].steps if active else 0,
                tuple(p.reason for p in active),
                tuple((p.ceiling, p.reason) for p in active if p.ceiling is not None),
            )
            return (self.asked.steps, self.asked.ceilings) != before

    @contextmanager
    def watching(self, source: Source, every: float = 1.0) -> Iterator[None]:
        """Poll a source within the block, at once and then every so many seconds.

        A source that raises OSError says nothing for that time, which is logged once.
        """
        if not 0 < every < math.inf:
            raise SpecError(f"every must be positive, got {every:g}")
        with self._lock:
            if source.name in self._watched:
                raise SpecError(f"{source.name} is watched already")
            self._watched.add(source.name)
        watch = _Watch(self, source, every)
        thread = threading.Thread(target=watch.run, name=f"t3c-{source.name}", daemon=True)
        try:
            thread.start()
            yield
        finally:
            watch.stop()
            if thread.ident is not None:
                thread.join(PATIENCE)
            with self._lock:
                self._watched.discard(source.name)


class _Watch:
    """One source polled. After `stop` nothing is posted, even by a read that is under way."""

    def __init__(self, signals: Signals, source: Source, every: float) -> None:
        self._signals, self._source, self._every = signals, source, every
        self._stopped = threading.Event()
        self._gate = threading.Lock()

    def run(self) -> None:
        logged = False
        try:
            while not self._stopped.is_set():
                try:
                    pressure = self._source.read()
                except OSError as error:
                    pressure = Pressure(self._source.name, 0, str(error))
                    if not logged:
                        log.warning("%s cannot be read: %s", self._source.name, error)
                    logged = True
                self._post(pressure)
                self._stopped.wait(self._every)
        finally:
            self.stop()  # a source that breaks must not hold the runtime down for good

    def stop(self) -> None:
        self._post(Pressure(self._source.name, 0, "not watched"), last=True)

    def _post(self, pressure: Pressure, last: bool = False) -> None:
        with self._gate:
            if not self._stopped.is_set():
                self._signals.post(pressure)
            if last:
                self._stopped.set()


class Hysteresis:
    """Steps that go up while a value is above `high`, down while it is below `low`, from 0 to most.

    It takes `again` values in a row for a step, and `dwell` seconds from one step to the next.
    """

    def __init__(
        self,
        high: float,
        low: float,
        *,
        again: int = 2,
        dwell: float = 5.0,
        most: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not low <= high:
            raise SpecError(f"low must not be above high, got low {low:g} and high {high:g}")
        if again < 1 or most < 1 or not dwell >= 0:
            raise SpecError(
                f"again and most must be positive and dwell not negative, "
                f"got again {again}, most {most}, dwell {dwell:g}"
            )
        self.high, self.low = high, low
        self.steps = 0
        self._again, self._dwell, self._most, self._clock = again, dwell, most, clock
        self._row = 0  # how many values in a row were above, or below where negative
        self._since = -math.inf

    def take(self, value: float) -> int:
        """The steps after one more value."""
        side = (value > self.high) - (value < self.low)
        self._row = self._row + side if side and self._row * side >= 0 else side
        wanted = min(max(self.steps + side, 0), self._most)
        now = self._clock()
        due = abs(self._row) >= self._again and now - self._since >= self._dwell
        if due and wanted != self.steps:
            self.steps, self._since, self._row = wanted, now, 0
        return self.steps


class ThermalZones:
    """The hottest of the kernel's thermal zones, in degrees Celsius."""

    name = "thermal"

    def __init__(
        self, root: Path = Path("/sys/class/thermal"), state: Hysteresis | None = None
    ) -> None:
        self.root, self._state = root, state or Hysteresis(85.0, 75.0)

    def read(self) -> Pressure:
        """Zones that cannot be read are left out; where none is left, no steps are asked for."""
        found = {zone.name: _degrees(zone) for zone in sorted(self.root.glob("thermal_zone*"))}
        degrees = {name: value for name, value in found.items() if value is not None}
        if not degrees:
            return Pressure(self.name, 0, f"{self.root} has no thermal zone that can be read")
        hottest = max(degrees, key=degrees.__getitem__)
        steps = self._state.take(degrees[hottest])
        bounds = f"hot above {self._state.high:g}, cool below {self._state.low:g}"
        return Pressure(self.name, steps, f"{hottest} is at {degrees[hottest]:.1f} C ({bounds})")


class CpuPressure:
    """The share of time, in %, that work waits for a processor: the kernel's average of 10 s."""

    name = "cpu"

    def __init__(
        self, path: Path = Path("/proc/pressure/cpu"), state: Hysteresis | None = None
    ) -> None:
        self.path, self._state = path, state or Hysteresis(60.0, 30.0, dwell=10.0)

    def read(self) -> Pressure:
        """Raises OSError where the kernel does not tell."""
        share = _waiting(self.path.read_text())
        if share is None:
            return Pressure(self.name, 0, f"{self.path} has no `some avg10`")
        bounds = f"high above {self._state.high:g}, low below {self._state.low:g}"
        steps = self._state.take(share)
        return Pressure(self.name, steps, f"work waits for a cpu {share:.1f}% of time ({bounds})")


class Battery:
    """How full the emptiest battery is that is being drained, in %; mains asks for nothing."""

    name = "battery"

    def __init__(
        self, root: Path = Path("/sys/class/power_supply"), state: Hysteresis | None = None
    ) -> None:
        # What is asked for rises as the charge falls: bounds are negative.
        self.root, self._state = root, state or Hysteresis(-20.0, -40.0, dwell=60.0)

    def read(self) -> Pressure:
        """Batteries that cannot be read are left out; where none is drained, steps are let go."""
        found = {supply.name: _drained(supply) for supply in sorted(self.root.glob("*"))}
        shares = {name: value for name, value in found.items() if value is not None}
        if not shares:
            steps = self._state.take(-100.0)
            return Pressure(self.name, steps, f"{self.root} has no battery that is being drained")
        emptiest = min(shares, key=shares.__getitem__)
        steps = self._state.take(-shares[emptiest])
        bounds = f"low below {-self._state.high:g}, full above {-self._state.low:g}"
        return Pressure(self.name, steps, f"{emptiest} is at {shares[emptiest]:.0f}% ({bounds})")


def _drained(supply: Path) -> float | None:
    """The charge of a battery that feeds the machine."""
    try:
        if (supply / "type").read_text().strip() != "Battery":
            return None
        if (supply / "status").read_text().strip() != "Discharging":
            return None
        return float((supply / "capacity").read_text())
    except (OSError, ValueError):
        return None


def _degrees(zone: Path) -> float | None:
    try:
        return int((zone / "temp").read_text()) / 1000
    except (OSError, ValueError):
        return None


def _waiting(text: str) -> float | None:
    """The `avg10` of the line `some avg10=1.23 avg60=... total=...`."""
    for line in text.splitlines():
        kind, *pairs = line.split() or [""]
        values = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if kind == "some" and "avg10" in values:
            try:
                return float(values["avg10"])
            except ValueError:
                return None
    return None
