"""What is measured of an artifact on the engine that serves it: times, parity, certificates."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from t3c.artifact.devices import DeviceTable, LayerTiming, Ledger, forms_key
from t3c.artifact.reader import Artifact
from t3c.certify.conformal import simultaneous_bounds
from t3c.certify.drift import absolute_drift, relative_drift
from t3c.certify.first_order import first_order_drift
from t3c.cost.proxy import features, fit_proxy
from t3c.errors import EngineError
from t3c.exporter.content import BATCH, float_session
from t3c.nn.inputs import Inputs, batches_of, call, select, tensors
from t3c.nn.view import at
from t3c.runtime.assemble import assemble
from t3c.runtime.engines import Engine, Session
from t3c.runtime.engines.protocol import Array
from t3c.runtime.engines.torch import TorchSession
from t3c.runtime.measured import describe, time_sessions
from t3c.runtime.runtime import Runtime
from t3c.spec import Certificate, Profile

MIXTURES, HELD_OUT = 14, 5
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


def calibrate(
    artifact: Artifact,
    engine: Engine,
    timings: tuple[LayerTiming, ...],
    samples: Inputs,
    *,
    rounds: int,
    seed: int,
) -> DeviceTable:
    """Time the profiles and mixtures of them in turns; fit the proxy, judge it on held-out ones."""
    empty = DeviceTable(
        content=artifact.content, device=describe(engine), layers=timings, profiles={}
    )
    specs, chain = artifact.manifest.specs, artifact.manifest.chain
    mixtures = _mixtures(artifact, seed)
    widest = _widest_ranges(artifact)
    everything = [*chain, *mixtures]
    forms = {p.name: empty.forms(specs, p.points) for p in everything}
    ranges = {p.name: artifact.ranges(p.name) for p in chain} | {p.name: widest for p in mixtures}
    bits = empty.device.weight_bits
    sessions = {
        p.name: engine.compile(assemble(artifact, p, forms[p.name], ranges[p.name], bits))
        for p in everything
    }
    one = [value.numpy() for value in tensors(select(samples, slice(0, 1)))]
    measured = time_sessions(sessions, one, rounds)
    rows = {p.name: features(specs, p, forms[p.name]) for p in everything}
    held = [p.name for p in mixtures[: min(HELD_OUT, len(mixtures) // 2)]]
    fitted = [p.name for p in everything if p.name not in held]
    proxy = fit_proxy(
        [rows[n] for n in fitted],
        [measured[n].p50 for n in fitted],
        [rows[n] for n in held],
        [measured[n].p50 for n in held],
    )
    profiles = {p.name: measured[p.name] for p in chain}
    return empty.model_copy(update={"profiles": profiles, "proxy": proxy})


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


def _mixtures(artifact: Artifact, seed: int) -> list[Profile]:
    """Profiles that take each layer's point from one of the artifact's, so all are stored.

    None is drawn twice or is one of the artifact's own, so that what is held out is new.
    """
    rng = np.random.default_rng(seed)
    chain = list(artifact.manifest.chain)
    seen = {tuple(profile.points.values()) for profile in chain}
    mixtures: list[Profile] = []
    for _ in range(10 * MIXTURES):
        drawn = {n: chain[rng.integers(len(chain))].points[n] for n in artifact.manifest.specs}
        if tuple(drawn.values()) not in seen and len(mixtures) < MIXTURES:
            seen.add(tuple(drawn.values()))
            mixtures.append(Profile(f"mixture{len(mixtures)}", drawn))
    return mixtures


def _widest_ranges(artifact: Artifact) -> dict[str, tuple[float, float]]:
    """Ranges any mixture can run with."""
    widest: dict[str, tuple[float, float]] = {}
    for profile in artifact.manifest.profiles:
        for name, (low, high) in artifact.ranges(profile.name).items():
            before = widest.get(name, (low, high))
            widest[name] = (min(low, before[0]), max(high, before[1]))
    return widest
