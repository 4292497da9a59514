"""The original, baselines and profiles, measured side by side in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from t3c.artifact.devices import Device
from t3c.artifact.manifest import ModelEntry
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
from t3c.evidence.int8 import INT8, Int8, bytes_on_disk
from t3c.evidence.quality import MAX_DROP, Judge, paired_interval
from t3c.runtime.reading import read_samples
from t3c.runtime.runtime import Runtime
from t3c.spec import MAX_BITS, Form, Latency, LayerPoint, Metric, Profile

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
    """One row of a comparison; `flops` are those of the elastic layers.

    Quality is one of accuracy, perplexity, agreement (answers as the original's) or neighbours
    (nearest ones as the original's). `below_full_ci95` is the paired interval of how much worse it
    is than the original, as a share of samples, or in nats a token.
    """

    name: str
    method: str
    accuracy: float | None = None
    perplexity: float | None = None
    agreement: float | None = None
    neighbours: float | None = None
    below_full_ci95: tuple[float, float] | None = None
    samples: int
    latency_ms: Latency
    size_bytes: int
    params: int | None
    flops: int | None
    drift: Drift

    @property
    def quality(self) -> float | None:
        """Return the figure of whichever metric it is judged by."""
        known = (self.accuracy, self.perplexity, self.agreement, self.neighbours)
        return next((value for value in known if value is not None), None)

    @property
    def metric(self) -> Metric | None:
        """Return what it is judged by."""
        return next((m for m in Metric if getattr(self, str(m)) is not None), None)


class Monotone(Frozen):
    checked: int
    violations: int


class Result(Frozen):
    """A comparison, as `demo` and `bench` print it as JSON."""

    device: Device
    variants: tuple[Variant, ...] = Field(min_length=1)
    monotone: Monotone
    artifact: str


@dataclass(frozen=True)
class Data:
    """Test samples (n, ...) of every input with how they are judged, and samples that plain int8
    is calibrated on."""

    test: tuple[Array, ...]
    judge: Judge
    calibration: tuple[Array, ...]


def bench(
    runtime: Runtime,
    original: Path,
    data: Data,
    against: Sequence[str] = ("full", "ptq8"),
    *,
    transformer: bool = False,
    rounds: int = 300,
    checks: int = 1000,
    made: Mapping[str, Int8] | None = None,
    say: Callable[[str], object] = lambda message: None,
) -> Result:
    """Measure `against` and every profile: accuracy and drift on test data, time in turns.

    Baselines that are in `made` are not made again.
    """
    engine = runtime.engine
    if not isinstance(engine, OpenVINO):
        raise EngineError(f"baselines run on openvino: a comparison on {engine.name} is not like")
    _refuse_unknown(against)
    runtime.check(_as_given(data.calibration))
    _refuse_known(runtime, runtime.check(_as_given(data.test)))
    if not original.is_file():
        raise DataError(f"{original}: no such file: --original names the original model in ONNX")
    raw = original.read_bytes()
    model = engine.read(raw)
    sessions: dict[str, Session] = {"full": engine.compile_read(model)}
    sizes = {"full": bytes_on_disk(model)}
    methods = {"full": "the original, fp32"}
    for name in against:
        if name != "full":
            baseline = (made or {}).get(name)
            if baseline is None:
                say(f"making {name}")
                baseline = INT8[name](engine.read(raw), data.calibration, transformer=transformer)
            sessions[name] = engine.compile_read(baseline.model)
            sizes[name], methods[name] = baseline.size_bytes, baseline.method
    profiles = {f"t3c-{profile.name}": profile.name for profile in runtime.chain}
    for name, profile in profiles.items():
        sessions[name] = runtime.session(profile)
        sizes[name] = runtime.artifact.manifest.size_bytes(profile)
        methods[name] = "a profile of the artifact"
    count = len(data.test[0])
    say(f"answering {count} test samples with {len(sessions)} variants")
    losses, drifts = _scored(sessions, data)
    say(f"timing {len(sessions)} variants in turns")
    times = time_sessions(sessions, [value[:1] for value in data.test], rounds)
    wanted = [n for n in sessions if n in profiles or n in against]
    variants = tuple(
        Variant.model_validate(
            {
                "name": name, "method": methods[name], "samples": count,
                str(data.judge.metric): data.judge.value(losses[name]),
                "below_full_ci95": paired_interval(losses[name], losses["full"]),
                "latency_ms": times[name], "size_bytes": sizes[name],
                "params": _params(runtime, profiles.get(name)),
                "flops": _flops(runtime, profiles.get(name)),
                "drift": _drift(runtime, profiles.get(name), drifts[name]),
            }
        )
        for name in wanted
    )  # fmt: skip
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


def _as_given(arrays: Sequence[Array]) -> Array | tuple[Array, ...]:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def _scored(
    sessions: Mapping[str, Session], data: Data
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the losses and the drifts (n,) of each session, asked one sample at a time."""
    running = data.judge.metric is Metric.PERPLEXITY  # logits of all texts are too large to hold
    kept: dict[str, list[Array]] = {name: [] for name in sessions}
    drifts: dict[str, list[Array]] = {name: [] for name in sessions}
    for row in range(len(data.test[0])):
        one = [np.ascontiguousarray(value[row : row + 1]) for value in data.test]
        outputs = {name: session.run(one)[0] for name, session in sessions.items()}
        for name, output in outputs.items():
            drifts[name].append(relative_drift(output, outputs["full"]))
            if running:
                output = data.judge.at(slice(row, row + 1)).losses(output, outputs["full"])
            kept[name].append(output)
    whole = {name: np.concatenate(parts) for name, parts in kept.items()}
    if not running:
        whole = {name: data.judge.losses(values, whole["full"]) for name, values in whole.items()}
    return whole, {name: np.concatenate(parts) for name, parts in drifts.items()}


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


def read_data(
    path: Path, calibration: Path, model: ModelEntry, metric: Metric | None = None
) -> Data:
    """Read test data and calibration data from .npz files, named as the inputs or, if one, `x`.

    Labels are `y`. By default a decoder is judged by perplexity, what has labels by accuracy, and
    else by agreement with the original.
    """
    inputs, others = read_samples(path, model)
    other, _ = read_samples(calibration, model)
    arrays, targets = tuple(inputs.values()), others.get("y")
    if targets is not None and targets.shape != arrays[0].shape[:1]:
        raise DataError(
            f"{path}: samples of shape {arrays[0].shape} have labels of shape {targets.shape}"
        )
    if metric is None:
        unlabelled = Metric.PERPLEXITY if model.states else Metric.AGREEMENT
        metric = unlabelled if targets is None else Metric.ACCURACY
    if metric is Metric.PERPLEXITY:
        targets = arrays[0]
    return Data(arrays, Judge(metric, MAX_DROP[metric], targets), tuple(other.values()))


def read_result(path: Path) -> Result:
    """Read what `t3c bench --json` printed."""
    if not path.is_file():
        raise DataError(f"{path}: no such file: write it with t3c bench --json")
    try:
        return Result.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(
            f"{path}: not a result of t3c bench --json: {error.errors()[0]['msg']}"
        ) from error
