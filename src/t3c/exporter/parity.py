"""Whether what was written, and what an engine makes of it, is what the model computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from t3c.errors import EngineError
from t3c.evidence.drifts import arrays, session_outputs
from t3c.exporter.content import BATCH, float_session
from t3c.nn.inputs import Inputs, batches_of, call
from t3c.nn.view import at
from t3c.runtime.engines.protocol import Array
from t3c.runtime.engines.torch import TorchSession
from t3c.runtime.runtime import Runtime

STORED_TOLERANCE, ENGINE_TOLERANCE = 1e-3, 0.02


@dataclass(frozen=True)
class Parity:
    """Relative differences of outputs: stored weights to the torch model, engine to reference."""

    profile: str
    stored: float
    engine: float


@torch.no_grad()
def model_outputs(model: nn.Module, samples: Inputs) -> Array:
    """Outputs of a torch model."""
    return np.concatenate([call(model, b).numpy() for b in batches_of(samples, BATCH)])


def check_parity(model: nn.Module, runtime: Runtime, samples: Inputs) -> list[Parity]:
    """Each profile against torch: what is stored, and what the engine makes of it."""
    checked = []
    given = arrays(samples)
    for profile in runtime.chain:
        with at(model, profile):
            wanted = model_outputs(model, samples)
        stored_session = float_session(runtime.artifact, profile)
        stored = _difference(session_outputs(stored_session, given), wanted)
        if not stored <= STORED_TOLERANCE:
            raise EngineError(
                f"profile {profile.name!r}: stored weights differ from the model's by {stored:.3g}"
            )
        reference = session_outputs(TorchSession(runtime.graph(profile)), given)
        engine = _difference(session_outputs(runtime.session(profile.name), given), reference)
        if not engine <= ENGINE_TOLERANCE:
            raise EngineError(
                f"profile {profile.name!r}: {runtime.engine.name} differs from the reference by "
                f"{engine:.3g}, more than {ENGINE_TOLERANCE:g}"
            )
        checked.append(Parity(profile.name, stored, engine))
    return checked


def _difference(a: Array, b: Array) -> float:
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-12))
