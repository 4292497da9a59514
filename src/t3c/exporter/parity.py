"""Whether what was written, and what engines make of it, is what the model computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from t3c.artifact.ledger import ParityEntry
from t3c.artifact.reader import Artifact
from t3c.engines import ENGINES
from t3c.engines.protocol import Array
from t3c.engines.torch import TorchSession
from t3c.errors import EngineError, MissingExtraError
from t3c.evidence.drifts import arrays
from t3c.evidence.served import answers, run_of
from t3c.exporter.content import BATCH, float_session
from t3c.nn.inputs import Inputs, batches_of, call
from t3c.nn.norms import OutputNorms, normed
from t3c.nn.view import at
from t3c.runtime.runtime import Runtime

STORED_TOLERANCE, ENGINE_TOLERANCE = 1e-3, 0.02
# Engines sum in another order, so here and there a value is rounded the other way, and in a deep
# network one such step leads to the next: in the end two runs are as far apart as two roundings
# that have nothing to do with each other, which is 1.4 times what either is from no rounding.
ROUNDING_SHARE = 1.6
REFERENCE = "torch"


@torch.no_grad()
def model_outputs(model: nn.Module, samples: Inputs) -> Array:
    """Outputs of a torch model."""
    return np.concatenate([call(model, b).cpu().numpy() for b in batches_of(samples, BATCH)])


@dataclass(frozen=True)
class Stored:
    """A profile as it is stored, in float: its outputs, and how far they are from the model's."""

    outputs: Array
    difference: float


def stored_profiles(
    model: nn.Module, artifact: Artifact, samples: Inputs, norms: Mapping[str, OutputNorms]
) -> dict[str, Stored]:
    """Each profile as it is stored, beside the model with the profile's own `norms`."""
    given, found = arrays(samples), {}
    for profile in artifact.manifest.chain:
        with at(model, profile), normed(model, norms.get(profile.name, {})):
            wanted = model_outputs(model, samples)
        outputs = answers(run_of(float_session(artifact, profile)), given)
        found[profile.name] = Stored(outputs, difference(outputs, wanted))
    return found


def engine_parity(
    runtime: Runtime, samples: Inputs, stored: Mapping[str, Stored]
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


def _row(runtime: Runtime, profile: str, given: list[Array], stored: Stored) -> ParityEntry:
    rounding = rounded = largest = None
    reason = ""
    if not stored.difference <= STORED_TOLERANCE:
        reason = f"stored weights differ from the model's by {stored.difference:.3g}"
    else:
        graph = runtime.graph(runtime.chain[profile])
        reference = answers(run_of(TorchSession(graph)), given)
        rounding = difference(reference, stored.outputs[: len(reference)])
        try:
            outputs = answers(run_of(runtime.session(profile)), given)
        except EngineError as error:
            reason = str(error)
        else:
            rounded = difference(outputs, reference)
            size = max(float(np.abs(reference).max()), 1e-12)
            largest = float(np.abs(outputs - reference).max()) / size
            allowed = max(ENGINE_TOLERANCE, ROUNDING_SHARE * rounding)
            if not rounded <= allowed:
                reason = f"differs from torch by {rounded:.3g}, more than {allowed:.3g}"
    return ParityEntry(
        engine=runtime.engine.name, engine_version=runtime.engine.version,
        weight_bits=runtime.device.weight_bits, profile=profile, samples=len(given[0]),
        stored=_finite(stored.difference), rounding=_finite(rounding), rounded=_finite(rounded),
        largest=_finite(largest), reason=reason,
    )  # fmt: skip


def difference(a: Array, b: Array) -> float:
    """How far `a` is from `b`, relative to the norm of `b`."""
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-12))


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None
