"""What a server has done: seconds of the last minutes, totals, observed drift, events."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from t3c.serve.schema import Event, Observed, Recent, Second

SECONDS = 120  # that are kept one by one
RECENT = 60  # seconds that latencies are told of
EVENTS = 100
OBSERVED = 512  # drifts of a profile that are kept
KEPT = 4096  # latencies of one second
OUTCOMES = ("answered", "refused", "late", "errors")


@dataclass
class Tally:
    """One second: how requests ended, which profiles served, and the milliseconds they took."""

    at: int
    outcomes: Counter[str] = field(default_factory=Counter)
    profiles: Counter[str] = field(default_factory=Counter)
    took: list[float] = field(default_factory=list)

    def summary(self) -> Second:
        """Return the second as it is shown."""
        served = self.profiles.most_common(1)
        return Second(
            t=self.at,
            profile=served[0][0] if served else None,
            requests=self.outcomes["answered"] + self.outcomes["refused"],
            refused=self.outcomes["refused"],
            late=self.outcomes["late"],
            **quantiles(self.took),
        )


class Book:
    """Kept by the event loop alone; memory is bounded whatever comes."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._seconds: deque[Tally] = deque(maxlen=SECONDS)
        self._drifts: dict[str, deque[float]] = {}
        self.totals: Counter[str] = Counter()
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self.started = clock()

    def answered(self, profile: str, ms: float, late: bool) -> None:
        """Take an answer."""
        second = self._second()
        second.profiles[profile] += 1
        if len(second.took) < KEPT:
            second.took.append(ms)
        self._count(second, "answered")
        if late:
            self._count(second, "late")

    def ended(self, outcome: str) -> None:
        """Take a request that was "refused", or ended in "errors"."""
        self._count(self._second(), outcome)

    def drifted(self, profile: str, drifts: Sequence[float]) -> None:
        """Take how far a profile's answers were from the largest one's."""
        self._drifts.setdefault(profile, deque(maxlen=OBSERVED)).extend(drifts)

    def forget_drift(self) -> None:
        """Begin anew with what is observed."""
        self._drifts.clear()

    def event(self, name: str, text: str) -> None:
        """Note something that people should see."""
        self.events.appendleft(Event(t=self._clock(), event=name, text=text))

    def observed(self, profile: str) -> Observed | None:
        """What was seen of a profile's drift from the largest one."""
        seen = self._drifts.get(profile)
        if not seen:
            return None
        return Observed(mean=float(np.mean(seen)), largest=max(seen), rows=len(seen))

    def series(self) -> list[Second]:
        """The last seconds, oldest first; the one that is not over yet is left out."""
        now = int(self._clock())
        return [second.summary() for second in self._seconds if second.at < now]

    def latency(self) -> Recent:
        """Quantiles of the last minute."""
        since = int(self._clock()) - RECENT
        took = [ms for second in self._seconds if second.at >= since for ms in second.took]
        return Recent(**quantiles(took), requests=len(took))

    def _second(self) -> Tally:
        now = int(self._clock())
        if not self._seconds or self._seconds[-1].at < now:
            # Seconds in which nothing came are there too: time goes on in pictures.
            first = max(self._seconds[-1].at + 1 if self._seconds else now, now - SECONDS + 1)
            self._seconds.extend(Tally(at) for at in range(first, now + 1))
        return self._seconds[-1]

    def _count(self, second: Tally, outcome: str) -> None:
        second.outcomes[outcome] += 1
        self.totals[outcome] += 1

    def tick(self) -> None:
        """Let time go on where no request comes."""
        self._second()


def quantiles(took: Sequence[float]) -> dict[str, float]:
    """Return p50, p90 and p99 of milliseconds; nothing if there are none."""
    if not took:
        return {}
    return dict(zip(("p50", "p90", "p99"), np.percentile(took, [50, 90, 99]).tolist(), strict=True))
