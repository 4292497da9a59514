"""Whether the activations of a deployed engine are still those it was calibrated with."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from t3c.artifact.shift import Floats, ShiftModel
from t3c.errors import SpecError
from t3c.measure.shift import Detector

NAMED = 3  # layers that an event names


@dataclass(frozen=True)
class MonitorConfig:
    """How a runtime watches activations.

    On average at most `rate` false alarms come with each sample that is watched; one call in
    `every` is. Each profile has its own monitor, which sees only what that profile answers. After
    an alarm larger profiles serve, until `hold` watched samples came without another.
    """

    rate: float = 1e-4
    every: int = 1
    seed: int = 0
    hold: int = 1000

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise SpecError(f"rate must be between 0 and 1, got {self.rate:g}")
        if self.every < 1:
            raise SpecError(f"every must be at least 1, got {self.every}")
        if self.hold < 1:
            raise SpecError(f"hold must be at least 1, got {self.hold}")


@dataclass(frozen=True)
class Shift:
    """The event that activations are no longer the calibrated ones.

    `since` is how many of the samples `seen` came after the likeliest change; `evidence` is what
    the test had gathered, `layers` those that deviate most, in calibrated units.
    """

    seen: int
    since: int
    evidence: float
    layers: tuple[tuple[str, float], ...]
    message: str

    def __str__(self) -> str:
        return self.message


class Monitor:
    """Watches features sample by sample; false alarms are at most `rate` a sample on average.

    Two tests, each at half of the rate: one of the distance, one of the level in both directions.
    The rate is for samples that come as the calibration samples did, in no order: neighbouring
    frames of a video are not that. Calls from several threads are taken one after the other.
    """

    def __init__(
        self, model: ShiftModel, *, rate: float = 1e-4, window: int = 64, seed: int = 0
    ) -> None:
        if window < 1:
            raise SpecError(f"window must be positive, got {window}")
        self.model = model
        self.seen = 0
        self._detectors = [
            Detector(model.distances, rate=rate / 2, seed=seed),
            Detector(model.levels, rate=rate / 2, two_sided=True, seed=seed + 1),
        ]
        self._recent: deque[Floats] = deque(maxlen=window)
        self._lock = threading.Lock()

    @property
    def evidence(self) -> float:
        """What the tests have gathered, 1 where an alarm is raised."""
        with self._lock:
            return max(d.evidence * d.rate for d in self._detectors)

    def observe(self, features: npt.ArrayLike) -> Shift | None:
        """Take the features (n, F) of n samples; the first shift that they give rise to, if any."""
        given = self.model.checked(features)
        distances, levels = self.model.scores(given)
        event = None
        with self._lock:
            for row, *scores in zip(given, distances.tolist(), levels.tolist(), strict=True):
                self.seen += 1
                self._recent.append(row.copy())
                alarms = [d.step(s) for d, s in zip(self._detectors, scores, strict=True)]
                if any(alarms):
                    event = event or self._shift()
                    for detector in self._detectors:
                        detector.restart()
        return event

    def _shift(self) -> Shift:
        best = max(self._detectors, key=lambda d: d.evidence * d.rate)
        rows = np.stack(list(self._recent)[-best.since :])
        layers = tuple(self.model.blame(rows)[:NAMED])
        named = ", ".join(self.model.describe(name, rows) for name, _ in layers)
        plural = "s" if best.since > 1 else ""
        message = f"activations have moved since about {best.since} sample{plural}: {named}"
        return Shift(self.seen, best.since, best.evidence, layers, message)
