"""Models of a deployed engine's activations, from samples of its own."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from t3c.artifact.shift import LEAST_FIT, ShiftModel
from t3c.engines import Session
from t3c.engines.protocol import Array
from t3c.engines.torch import TorchSession
from t3c.evidence.drifts import Watch
from t3c.evidence.served import Samples, chunks
from t3c.graph.watching import features, monitored_tensors, watched
from t3c.measure.shift import Activations
from t3c.runtime.runtime import Runtime
from t3c.spec import Profile

THRESHOLD = 0.99
OBSERVED = 8  # samples that thresholds are set on
FITTED, COMPARED = 200, 250  # at most so many samples of each slice


def shift_models(
    runtime: Runtime, fitted: Samples, reference: Samples, watch: Watch
) -> dict[str, ShiftModel]:
    """A model of each profile's activations, as its engine gives them one sample at a time."""
    if len(fitted[0]) < LEAST_FIT:
        return {}
    topology, specs = runtime.artifact.graph().graph, runtime.artifact.manifest.specs
    pairs = monitored_tensors(topology, specs, [entry.name for entry in runtime.inputs])
    if not pairs:
        return {}
    found = {}
    for count, profile in enumerate(runtime.chain):
        watch(f"activations of {profile.name}", count, len(runtime.chain))
        thresholds = _thresholds(runtime, profile, [name for name, _ in pairs], fitted)
        graph = watched(runtime.graph(profile), [name for name, _ in pairs], thresholds)
        session = runtime.engine.compile(graph)
        found[profile.name] = ShiftModel.fit(
            seen_features(session, [value[:FITTED] for value in fitted]),
            seen_features(session, [value[:COMPARED] for value in reference]),
            tensors=[name for name, _ in pairs],
            layers=[layer for _, layer in pairs],
            thresholds=thresholds,
        )
    return found


def seen_features(session: Session, samples: Samples) -> Array:
    """Features (n, F) of a watched session, one sample at a time."""
    return features(np.concatenate([session.run(one)[-1] for one in chunks(samples, 1)]))


def _thresholds(
    runtime: Runtime, profile: Profile, tensors: list[str], samples: Samples
) -> dict[str, float]:
    """The 99th percentile of each tensor's size."""
    seen = {name: Activations() for name in tensors}

    def add(name: str, value: Tensor) -> None:
        if name in seen:
            seen[name].add(value.numpy())

    session = TorchSession(runtime.graph(profile))
    for one in chunks([value[:OBSERVED] for value in samples], 1):
        session.observe(one, add)
    return {name: max(found.quantile(THRESHOLD), 1e-6) for name, found in seen.items()}
