"""One version of an artifact, loaded, warmed and tried, before anything depends on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from t3c.artifact.manifest import ModelEntry, TensorEntry
from t3c.device.execution import example_inputs
from t3c.errors import ArtifactError, EngineError, SpecError
from t3c.runtime.monitor import MonitorConfig
from t3c.runtime.runtime import Runtime, load
from t3c.runtime.signals import Battery, CpuPressure, Source, ThermalZones
from t3c.runtime.tokens import Tokenizer
from t3c.serve.config import ServeConfig
from t3c.serve.pace import Pace, measure_pace

# What can be watched, by the name it has on the command line.
SOURCES: dict[str, Callable[[], Source]] = {
    "thermal": ThermalZones, "cpu": CpuPressure, "battery": Battery,
}  # fmt: skip
OBJECTIVE = 10.0  # times what the largest profile takes, where no objective is named
LEAST_OBJECTIVE_MS = 50.0

Watch = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Origin:
    """Where versions come from, and what they run on."""

    path: Path
    engine: str = "openvino"
    threads: int | None = None
    memory_mb: float | None = None
    monitor: MonitorConfig | None = None


@dataclass(frozen=True)
class Version:
    """A runtime that is warm, how long it takes, and what it is asked to hold."""

    runtime: Runtime
    pace: Pace
    objective_ms: float
    tokenizer: Tokenizer | None
    watching: ExitStack

    @property
    def name(self) -> str:
        return self.runtime.artifact.content[:12]

    @property
    def model(self) -> ModelEntry:
        return self.runtime.artifact.manifest.model


def open_version(
    source: Origin, config: ServeConfig, watch: Watch = lambda what, done, total: None
) -> Version:
    """Load an artifact, compile and time its profiles, and see that each answers with numbers."""
    unknown = [name for name in config.watch if name not in SOURCES]
    if unknown:
        raise SpecError(
            f"nothing to watch is called {unknown[0]!r}: there are {', '.join(SOURCES)}"
        )
    runtime = load(
        source.path, source.engine, source.threads,
        monitor=source.monitor, memory_mb=source.memory_mb,
    )  # fmt: skip
    watching = ExitStack()
    try:
        pace = _tried(runtime, config, watch)
        top = pace.expected(runtime.candidates[-1].profile, 1)
        objective = config.objective_ms or max(LEAST_OBJECTIVE_MS, OBJECTIVE * top)
        for name in config.watch:
            watching.enter_context(runtime.signals.watching(SOURCES[name]()))
        words = Tokenizer.of(runtime.artifact) if runtime.artifact.tokenizer else None
        return Version(runtime, pace, objective, words, watching)
    except BaseException:
        watching.close()
        runtime.close()
        raise


def _tried(runtime: Runtime, config: ServeConfig, watch: Watch) -> Pace:
    """How long profiles take, once all are warm and each has answered with numbers."""
    inputs = example_inputs(runtime.artifact)
    runtime.warm()
    names = [candidate.profile for candidate in runtime.candidates]
    if config.fixed is not None and config.fixed not in names:
        raise SpecError(f"no profile {config.fixed!r} runs here: there are {', '.join(names)}")
    pace = measure_pace(runtime, inputs, config.batch, watch)
    for profile in pace.times:
        outputs = runtime.session(profile).run(inputs)
        if not all(np.isfinite(output).all() for output in outputs):
            raise EngineError(f"{profile} answers with NaN or infinite values: it is not served")
    return pace


def refuse_other_face(old: ModelEntry, new: ModelEntry) -> None:
    """Refuse a version that clients of the old one could not talk to."""

    def face(entries: tuple[TensorEntry, ...]) -> list[tuple[object, ...]]:
        return [(entry.name, entry.dtype, entry.shape) for entry in entries]

    for what in ("inputs", "outputs"):
        if face(getattr(old, what)) != face(getattr(new, what)):
            raise ArtifactError(f"the new version has other {what}: serve it beside this one")
