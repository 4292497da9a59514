"""The original, baselines and profiles, measured side by side in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from t3c.artifact.devices import Device
from t3c.certify.conformal import coverage
from t3c.certify.drift import relative_drift
from t3c.certify.slices import refuse_overlap, sample_keys
from t3c.cost.work import profile_work
from t3c.device.measured import time_sessions
from t3c.engines import Session
from t3c.engines.openvino import OpenVINO
from t3c.engines.protocol import Array
from t3c.errors import DataError, EngineError
from t3c.evidence.audit import broken_promises, draw_pairs
from t3c.evidence.drifts import session_outputs
from t3c.evidence.int8 import INT8, bytes_on_disk
from t3c.runtime.reading import read_arrays
from t3c.runtime.runtime import Runtime
from t3c.spec import MAX_BITS, Form, Latency, LayerPoint, Profile

AGAINST = ("full", *INT8)


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Drift(Frozen):
    """Relative drift from the original; what is not available is None."""

    mean: float | None = None
    spectral: float | None = None
    first_order: float | None = None
    epsilon: float | None = None
    worst_case: float | None = None
    coverage: float | None = None


class Variant(Frozen):
    """One row of a comparison; `flops` are those of the elastic layers."""

    name: str
    method: str
    accuracy: float | None
    samples: int
    latency_ms: Latency
    size_bytes: int
    params: int | None
    flops: int | None
    drift: Drift


class Monotone(Frozen):
    checked: int
    violations: int


class Result(Frozen):
    """What `demo` and `bench` print as JSON."""

    device: Device
    variants: tuple[Variant, ...] = Field(min_length=1)
    monotone: Monotone
    artifact: str


@dataclass(frozen=True)
class Data:
    """Labelled test samples (n, ...), (n,), and samples to calibrate baselines on."""

    test: Array
    labels: Array | None
    calibration: Array

    def __post_init__(self) -> None:
        if self.labels is not None and self.labels.shape != self.test.shape[:1]:
            raise DataError(
                f"test samples of shape {self.test.shape} have labels of shape {self.labels.shape}"
            )


def bench(
    runtime: Runtime,
    original: Path,
    data: Data,
    against: Sequence[str] = ("full", "ptq8"),
    *,
    rounds: int = 300,
    checks: int = 1000,
    say: Callable[[str], object] = lambda message: None,
) -> Result:
    """Measure `against` and every profile: accuracy and drift on test data, time in turns."""
    engine = runtime.engine
    if not isinstance(engine, OpenVINO):
        raise EngineError(f"baselines run on openvino: a comparison on {engine.name} is not like")
    _refuse_unknown(against)
    if len(runtime.inputs) != 1:
        raise DataError("comparisons are made of models with one input")
    runtime.check(data.calibration)
    _refuse_known(runtime, runtime.check(data.test))
    if not original.is_file():
        raise DataError(f"{original}: no such file: --original names the original model in ONNX")
    raw = original.read_bytes()
    model = engine.read(raw)
    sessions: dict[str, Session] = {"full": engine.compile_read(model)}
    sizes = {"full": bytes_on_disk(model)}
    methods = {"full": "the original, fp32"}
    for name in against:
        if name != "full":
            say(f"making {name}")
            baseline = INT8[name](engine.read(raw), data.calibration)
            sessions[name] = engine.compile_read(baseline.model)
            sizes[name], methods[name] = baseline.size_bytes, baseline.method
    profiles = {f"t3c-{profile.name}": profile.name for profile in runtime.chain}
    for name, profile in profiles.items():
        sessions[name] = runtime.session(profile)
        sizes[name] = runtime.artifact.manifest.size_bytes(profile)
        methods[name] = "a profile of the artifact"
    say(f"answering {len(data.test)} test samples with {len(sessions)} variants")
    answers = {name: session_outputs(session, [data.test]) for name, session in sessions.items()}
    say(f"timing {len(sessions)} variants in turns")
    times = time_sessions(sessions, [data.test[:1]], rounds)
    wanted = [n for n in sessions if n in profiles or n in against]
    variants = tuple(
        Variant(
            name=name,
            method=methods[name],
            accuracy=_accuracy(answers[name], data.labels),
            samples=len(data.test),
            latency_ms=times[name],
            size_bytes=sizes[name],
            params=_params(runtime, profiles.get(name)),
            flops=_flops(runtime, profiles.get(name)),
            drift=_drift(
                runtime, profiles.get(name), relative_drift(answers[name], answers["full"])
            ),
        )
        for name in wanted
    )
    pairs = draw_pairs(runtime, checks, seed=0)
    violations = sum(bool(broken_promises(runtime, tight, loose)) for tight, loose in pairs)
    return Result(
        device=runtime.device,
        variants=variants,
        monotone=Monotone(checked=checks, violations=violations),
        artifact=str(runtime.artifact.path),
    )


def _refuse_unknown(against: Sequence[str]) -> None:
    """Raise DataError if `against` names something other than the original and plain int8."""
    unknown = [name for name in against if name not in AGAINST]
    if unknown:
        raise DataError(f"unknown baseline {', '.join(unknown)}: there are {', '.join(AGAINST)}")


def _refuse_known(runtime: Runtime, test: Sequence[Array]) -> None:
    """Coverage means nothing on samples that the bounds were made of."""
    ledger = runtime.artifact.ledger()
    made_of = [
        key
        for found in (ledger.certifications if ledger else ())
        for part, keys in found.keys.items()
        for key in keys
        if part != "test"
    ]
    known = {"quantizer": runtime.artifact.manifest.calibrated_on or (), "certificate": made_of}
    tested = sample_keys(test)
    for name, keys in known.items():
        refuse_overlap({name: keys, "test": tested})


def _accuracy(outputs: Array, labels: Array | None) -> float | None:
    return None if labels is None else float((outputs.argmax(axis=-1) == labels).mean())


def _drift(runtime: Runtime, profile: str | None, drifts: Array) -> Drift:
    certificate = None if profile is None else runtime.certificates.get(profile)
    if certificate is None:
        return Drift(mean=float(drifts.mean()))
    return Drift(
        mean=float(drifts.mean()),
        spectral=certificate.spectral,
        first_order=certificate.first_order,
        epsilon=certificate.epsilon,
        worst_case=certificate.worst_case,
        coverage=coverage(drifts, certificate.epsilon),
    )


def _executed(runtime: Runtime, name: str | None) -> tuple[Profile, dict[str, Form]]:
    """Return what a profile executes; without one, baselines, which keep all layers dense."""
    if name is not None:
        return runtime.chain[name], runtime.forms[name]
    specs = runtime.artifact.manifest.specs
    points = {n: LayerPoint(s.full_rank, MAX_BITS) for n, s in specs.items()}
    return Profile("full", points), dict.fromkeys(specs, Form.DENSE)


def _flops(runtime: Runtime, name: str | None) -> int:
    profile, forms = _executed(runtime, name)
    return profile_work(runtime.artifact.manifest.specs, profile, forms).flops


def _params(runtime: Runtime, name: str | None) -> int:
    """Weights stored to run it: elastic layers as their point needs, others as they are."""
    profile, _ = _executed(runtime, name)
    specs = runtime.artifact.manifest.specs
    dense = sum(math.prod(spec.dense_shape) for spec in specs.values())
    mine = 0
    for layer, point in profile.points.items():
        mine += sum(map(math.prod, specs[layer].stored_shapes(point)))
    return runtime.artifact.manifest.model.parameters - dense + mine


def read_data(path: Path, calibration: Path) -> Data:
    """Test data from an .npz with `x` and, if there are labels, `y`; calibration with `x`."""
    test, other = read_arrays(path), read_arrays(calibration)
    for arrays, where in ((test, path), (other, calibration)):
        if "x" not in arrays:
            raise DataError(f"{where}: no array x: it holds {', '.join(arrays)}")
    return Data(test["x"], test.get("y"), other["x"])
