"""Whether the machine is quiet enough to be measured: what others take of it, what it slows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from t3c.errors import DisturbedError, SpecError

STAT = Path("/proc/stat")
TICK_SECONDS = 0.01
LEAST_SECONDS = 0.1
LEAST_SAMPLES = 5
PAUSE_SECONDS = 0.2
LOOKS = 3
Name = TypeVar("Name")
WAY_OUT = "stop what else runs, or measure anyway with --busy"


@dataclass(frozen=True)
class Reading:
    """Clocks at one moment, in seconds; `busy` is of all cores and holds `stolen` and `own`."""

    wall: float
    own: float
    busy: float | None = None
    stolen: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What a stretch of time was like; `foreign` is in cores, None where it cannot be known."""

    disturbed: bool
    foreign: float | None
    reason: str = ""
    by_others: bool = False


@dataclass(frozen=True)
class Conditions:
    """What a measurement was made under: the most foreign cores of a kept stretch, the stretches
    repeated, whether a disturbed one was kept, and why it was disturbed."""

    foreign: float | None
    repeated: int
    disturbed: bool
    reason: str


def combined(earlier: Conditions | None, later: Conditions) -> Conditions:
    """The conditions of a measurement that was stopped and taken up again."""
    if earlier is None:
        return later
    known = [c.foreign for c in (earlier, later) if c.foreign is not None]
    return Conditions(
        foreign=max(known, default=None),
        repeated=earlier.repeated + later.repeated,
        disturbed=earlier.disturbed or later.disturbed,
        reason=earlier.reason or later.reason,
    )


def core_times(stat: Path = STAT) -> dict[str, tuple[float, float]]:
    """Seconds (busy, stolen of that) of "cpu0", "cpu1" .. and of all, "cpu"; {} if unknown."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, *fields = line.split() or [""]
        if name.startswith("cpu") and any(int(value) for value in fields):
            # Guest time, after these eight, is part of user and nice time.
            user, nice, system, _, _, irq, softirq, stolen = [*map(int, fields), *[0] * 8][:8]
            hertz = os.sysconf("SC_CLK_TCK")
            busy = user + nice + system + irq + softirq + stolen
            found[name] = (busy / hertz, stolen / hertz)
    return found


def read_machine() -> Reading:
    """The clocks now; `busy` is None where the system does not tell."""
    busy, stolen = core_times().get("cpu", (None, 0.0))
    own = os.times()
    return Reading(time.perf_counter(), own.user + own.system, busy, stolen)


@dataclass
class Quiet:
    """Judges stretches of time, and remembers which it threw away and which it kept.

    A stretch is disturbed if others used more than `most_foreign` cores, or if all that was
    measured ran more than `most_slowdown` times slower than before. Up to `retries` disturbed
    stretches of a run are thrown away; the next one is refused or, without `refuse`, kept. A
    machine that is slower for good though others leave it alone is not refused either.
    """

    most_foreign: float = 0.15
    retries: int = 6
    refuse: bool = True
    most_slowdown: float = 1.15
    read: Callable[[], Reading] = field(default=read_machine, repr=False)
    sleep: Callable[[float], object] = field(default=time.sleep, repr=False)
    thrown: list[Verdict] = field(default_factory=list, init=False)
    kept: list[Verdict] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.most_foreign < 0 or self.retries < 0 or self.most_slowdown < 1:
            raise SpecError(f"a quiet machine cannot be quieter than idle, got {self}")

    def judge(self, start: Reading, slowdown: float | None = None) -> Verdict:
        """The stretch from `start` until now, in which all ran `slowdown` times slower."""
        end = self.read()
        seconds = end.wall - start.wall
        foreign = None
        if start.busy is not None and end.busy is not None and seconds >= LEAST_SECONDS:
            foreign = max(0.0, end.busy - start.busy - (end.own - start.own)) / seconds
            # A tick more or less is how the system counts, not what others did.
            if foreign > self.most_foreign + TICK_SECONDS / seconds:
                stolen = (end.stolen - start.stolen) / seconds
                who = "the host of this machine" if stolen > foreign / 2 else "other processes"
                unit = "of a core" if foreign < 1 else "cores"
                return Verdict(True, foreign, f"{who} used {foreign:.2f} {unit}", by_others=True)
        if slowdown is not None and slowdown > self.most_slowdown:
            return Verdict(True, foreign, f"all that is measured ran {slowdown:.2f} times slower")
        return Verdict(False, foreign)

    def keeps(self, verdict: Verdict, repeated: int) -> bool:
        """Whether a stretch counts, in a run that has `repeated` some; pauses if it does not."""
        gave_up = not self.refuse and self.conditions.disturbed
        if verdict.disturbed and repeated < self.retries and not gave_up:
            self.thrown.append(verdict)
            self.sleep(PAUSE_SECONDS * 2**repeated)
            return False
        if verdict.disturbed and self.refuse and not self._of_itself(verdict):
            what = f"{verdict.reason}, after {repeated} repeats"
            raise DisturbedError(f"the machine is busy: {what}: {WAY_OUT}")
        self.kept.append(verdict)
        return True

    def _of_itself(self, verdict: Verdict) -> bool:
        """Whether the machine became slower without others taking any of it: that is how it is."""
        return verdict.foreign is not None and not verdict.by_others

    @property
    def conditions(self) -> Conditions:
        """What has been kept and thrown away so far."""
        foreign = [verdict.foreign for verdict in self.kept if verdict.foreign is not None]
        reasons = [verdict.reason for verdict in self.kept if verdict.disturbed]
        return Conditions(
            foreign=max(foreign, default=None),
            repeated=len(self.thrown),
            disturbed=bool(reasons),
            reason=reasons[0] if reasons else "",
        )


def watchful(busy: bool) -> Quiet:
    """A judge that refuses a machine that is not quiet, or one that lets a busy machine pass."""
    return Quiet(retries=1, refuse=False) if busy else Quiet()


def settle(quiet: Quiet, seconds: float = 0.5) -> None:
    """Refuse to start on a busy machine: one that is busy each time it is looked at, idling."""
    if not quiet.refuse:
        return
    for _ in range(LOOKS):
        start = quiet.read()
        quiet.sleep(seconds)
        verdict = quiet.judge(start)
        if not verdict.disturbed:
            return
    raise DisturbedError(f"the machine is busy: {verdict.reason}: {WAY_OUT}")


def slowdown(
    block: Mapping[Name, Sequence[float]],
    earlier: Sequence[Mapping[Name, Sequence[float]]],
) -> float | None:
    """How many times slower the candidates of a block ran than in earlier blocks, in the median.

    None where there are too few samples to tell from noise.
    """
    if not earlier or sum(map(len, block.values())) < LEAST_SAMPLES:
        return None
    before = {name: np.concatenate([past[name] for past in earlier]) for name in block}
    return float(np.median([np.median(block[name]) / np.median(before[name]) for name in block]))
