"""What is shown of an artifact on the engine that serves it: parity and certificates."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from t3c.artifact.devices import Ledger, forms_key
from t3c.certify.conformal import simultaneous_bounds
from t3c.certify.drift import absolute_drift, relative_drift
from t3c.certify.first_order import first_order_drift
from t3c.errors import EngineError
from t3c.exporter.content import BATCH, float_session
from t3c.nn.inputs import Inputs, batches_of, call, select, tensors
from t3c.nn.view import at
from t3c.runtime.engines import Session
from t3c.runtime.engines.protocol import Array
from t3c.runtime.engines.torch import TorchSession
from t3c.runtime.runtime import Runtime
from t3c.spec import Certificate

STORED_TOLERANCE, ENGINE_TOLERANCE = 1e-3, 0.02
ASSUMPTION = (
    "a new sample is exchangeable with the certificate samples; the bound holds for all profiles "
    "of the artifact at once, on this engine executing these forms"
)


@dataclass(frozen=True)
class Parity:
    """Relative differences of outputs: stored weights to the torch model, engine to reference."""

    profile: str
    stored: float
    engine: float


def session_outputs(session: Session, samples: Inputs) -> Array:
    """Outputs of a session, one sample at a time, as it is served."""
    rows = [
        session.run([value.numpy() for value in tensors(batch)])[0]
        for batch in batches_of(samples, 1)
    ]
    return np.concatenate(rows)


@torch.no_grad()
def model_outputs(model: nn.Module, samples: Inputs) -> Array:
    """Outputs of a torch model."""
    return np.concatenate([call(model, b).numpy() for b in batches_of(samples, BATCH)])


def check_parity(model: nn.Module, runtime: Runtime, samples: Inputs) -> list[Parity]:
    """Each profile against torch: what is stored, and what the engine makes of it."""
    checked = []
    for profile in runtime.chain:
        with at(model, profile):
            wanted = model_outputs(model, samples)
        stored_session = float_session(runtime.artifact, profile)
        stored = _difference(session_outputs(stored_session, samples), wanted)
        if not stored <= STORED_TOLERANCE:
            raise EngineError(
                f"profile {profile.name!r}: stored weights differ from the model's by {stored:.3g}"
            )
        reference = session_outputs(TorchSession(runtime.graph(profile)), samples)
        engine = _difference(session_outputs(runtime.session(profile.name), samples), reference)
        if not engine <= ENGINE_TOLERANCE:
            raise EngineError(
                f"profile {profile.name!r}: {runtime.engine.name} differs from the reference by "
                f"{engine:.3g}, more than {ENGINE_TOLERANCE:g}"
            )
        checked.append(Parity(profile.name, stored, engine))
    return checked


def certify(
    model: nn.Module,
    original: nn.Module,
    runtime: Runtime,
    scaling: Inputs,
    scores: Inputs,
    delta: float,
) -> Ledger:
    """Certificates of all profiles from two disjoint slices, on the engine and forms deployed."""
    truth = [model_outputs(original, part) for part in (scaling, scores)]
    relative: list[list[Array]] = [[], []]
    absolute: list[list[Array]] = [[], []]
    for profile in runtime.chain:
        session = runtime.session(profile.name)
        for index, part in enumerate((scaling, scores)):
            answers = session_outputs(session, part)
            relative[index].append(relative_drift(answers, truth[index]))
            absolute[index].append(absolute_drift(answers, truth[index]))
    rel, abso = ([np.stack(p, axis=1) for p in both] for both in (relative, absolute))
    epsilon = simultaneous_bounds(rel[0], rel[1], delta)
    absolute_epsilon = simultaneous_bounds(abso[0], abso[1], delta)
    few = select(scores, slice(0, BATCH))
    entries = [
        Certificate(
            profile=profile.name,
            engine=runtime.engine.name,
            forms=forms_key(runtime.forms[profile.name], runtime.device.weight_bits),
            delta=delta,
            samples=len(rel[1]),
            mean=float(rel[1][:, index].mean()),
            first_order=float(first_order_drift(model, original, profile, few).mean()),
            epsilon=float(epsilon[index]),
            absolute_mean=float(abso[1][:, index].mean()),
            absolute_epsilon=float(absolute_epsilon[index]),
        )
        for index, profile in enumerate(runtime.chain)
    ]
    return Ledger(
        content=runtime.artifact.content,
        assumption=ASSUMPTION,
        data=fingerprint(scores),
        entries=tuple(entries),
    )


def fingerprint(samples: Inputs) -> str:
    """A hash of the samples a certificate rests on."""
    digest = hashlib.sha256()
    for value in tensors(samples):
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _difference(a: Array, b: Array) -> float:
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-12))
