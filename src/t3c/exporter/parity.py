"""Whether what was written, and what engines make of it, is what the model computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn

from t3c.artifact.ledger import ParityEntry
from t3c.artifact.reader import Artifact
from t3c.errors import EngineError, MissingExtraError
from t3c.evidence.drifts import arrays, session_outputs
from t3c.exporter.content import BATCH, float_session
from t3c.nn.inputs import Inputs, batches_of, call
from t3c.nn.view import at
from t3c.runtime.engines import ENGINES
from t3c.runtime.engines.protocol import Array
from t3c.runtime.engines.torch import TorchSession
from t3c.runtime.runtime import Runtime

STORED_TOLERANCE, ENGINE_TOLERANCE = 1e-3, 0.02
REFERENCE = "torch"


@torch.no_grad()
def model_outputs(model: nn.Module, samples: Inputs) -> Array:
    """Outputs of a torch model."""
    return np.concatenate([call(model, b).numpy() for b in batches_of(samples, BATCH)])


def stored_differences(model: nn.Module, artifact: Artifact, samples: Inputs) -> dict[str, float]:
    """How far each profile as it is stored, in float, is from the model."""
    given, found = arrays(samples), {}
    for profile in artifact.manifest.chain:
        with at(model, profile):
            wanted = model_outputs(model, samples)
        stored = session_outputs(float_session(artifact, profile), given)
        found[profile.name] = difference(stored, wanted)
    return found


def engine_parity(
    runtime: Runtime, samples: Inputs, stored: Mapping[str, float]
) -> list[ParityEntry]:
    """Each profile on an engine against torch on the same graph; what is too far has a reason."""
    return [_row(runtime, name, arrays(samples), stored[name]) for name in stored]


def other_engines(runtime: Runtime) -> Iterator[Runtime]:
    """The artifact on the engines that are installed here, besides the runtime's own."""
    for name in ENGINES:
        if name in (REFERENCE, runtime.engine.name):
            continue
        try:
            yield Runtime(runtime.artifact, name, runtime.engine.threads)
        except MissingExtraError:
            continue


def _row(runtime: Runtime, profile: str, given: list[Array], stored: float) -> ParityEntry:
    rounded = largest = None
    reason = ""
    if not stored <= STORED_TOLERANCE:
        reason = f"stored weights differ from the model's by {stored:.3g}"
    else:
        graph = runtime.graph(runtime.chain[profile])
        reference = session_outputs(TorchSession(graph), given)
        try:
            outputs = session_outputs(runtime.session(profile), given)
        except EngineError as error:
            reason = str(error)
        else:
            rounded = difference(outputs, reference)
            size = max(float(np.abs(reference).max()), 1e-12)
            largest = float(np.abs(outputs - reference).max()) / size
            if not rounded <= ENGINE_TOLERANCE:
                reason = f"differs from torch by {rounded:.3g}, more than {ENGINE_TOLERANCE:g}"
    return ParityEntry(
        engine=runtime.engine.name, engine_version=runtime.engine.version,
        weight_bits=runtime.device.weight_bits, profile=profile, samples=len(given[0]),
        stored=_finite(stored), rounded=_finite(rounded), largest=_finite(largest), reason=reason,
    )  # fmt: skip


def difference(a: Array, b: Array) -> float:
    """How far `a` is from `b`, relative to the norm of `b`."""
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-12))


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None
