"""The sessions of a runtime: of each profile a plain one, and one that tells of activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from t3c.device.execution import example_inputs
from t3c.engines import Session
from t3c.errors import SpecError
from t3c.graph.watching import watched
from t3c.runtime.counters import Counters
from t3c.runtime.placed import Placed
from t3c.runtime.pool import Pool
from t3c.runtime.watches import Watch

# What a compiled session takes: copies of its graph's constants, and besides.
COPIES, SESSION_BYTES = 4, 6_000_000


class SessionKey(NamedTuple):
    """A profile, and whether its session also tells of activations."""

    profile: str
    watched: bool = False

    def __str__(self) -> str:
        return f"{self.profile} watched" if self.watched else self.profile


Sessions = Pool[SessionKey, Session]


def open_sessions(
    placed: Placed, watches: Mapping[str, Watch], counters: Counters, memory_mb: float | None
) -> Sessions:
    """Return the pool that compiles sessions when they are first leased."""
    if memory_mb is not None and not 0 < memory_mb < math.inf:
        raise SpecError(f"memory_mb must be positive and finite, got {memory_mb:g}")
    weights: dict[SessionKey, int] = {}

    def compile_session(key: SessionKey) -> Session:
        """Return a session that has answered once: it is warm, and has all kernels it needs."""
        graph = placed.graph(key.profile)
        if key.watched:
            model = watches[key.profile].model
            limits = dict(zip(model.tensors, model.thresholds, strict=True))
            graph = watched(graph, model.tensors, limits)
        session = placed.engine.compile(graph)
        session.run(example_inputs(placed.artifact))
        weights[key] = COPIES * graph.ByteSize() + SESSION_BYTES
        return session

    def count(name: str, fields: Mapping[str, object]) -> None:
        counters.add(name, str(fields["key"]))
        counters.event(name, **{**fields, "key": str(fields["key"])})

    cap = None if memory_mb is None else int(memory_mb * 1e6)
    return Pool(compile_session, weights.__getitem__, cap, count)
