"""Which profiles are watched, and which of their calls."""

from __future__ import annotations

import itertools

from t3c.artifact.shift import ShiftModel
from t3c.errors import SpecError
from t3c.runtime.monitor import Monitor, MonitorConfig
from t3c.runtime.placed import Placed


class Watch:
    """What watches the activations of a profile, and which calls it sees."""

    def __init__(self, model: ShiftModel, config: MonitorConfig) -> None:
        self.model = model
        self.monitor = Monitor(model, rate=config.rate, seed=config.seed)
        self._calls, self._every = itertools.count(), config.every

    def turn(self) -> bool:
        """Whether this call is one to watch."""
        return next(self._calls) % self._every == 0


def find_watches(placed: Placed, config: MonitorConfig) -> dict[str, Watch]:
    """What watches each profile whose certification has a model of its activations."""
    models = {
        name: certification.monitors[name]
        for name, (_, certification) in placed.certified.items()
        if name in certification.monitors
    }
    if not models:
        raise SpecError(
            f"{placed.artifact.path}: nothing to monitor by: certify it on {placed.engine.name} "
            "with t3c certify --monitor"
        )
    return {name: Watch(model, config) for name, model in models.items()}
