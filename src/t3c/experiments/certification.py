"""Whether certificates hold: coverage, correlation, tightness, worst cases, cost, the monitor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from t3c.artifact.folder import staged
from t3c.artifact.reader import Artifact
from t3c.artifact.shift import ShiftModel
from t3c.certify.coverage import agreement, expected_coverage, random_splits
from t3c.certify.drift import Array, relative_drift
from t3c.control.profiles import names_for
from t3c.convert import ElasticConfig, elasticize_, state_of
from t3c.evidence.along import first_order
from t3c.evidence.certify import CertifyConfig, Slices, certify
from t3c.evidence.drifts import (
    Samples,
    arrays,
    measure_drifts,
    program_reference,
    session_outputs,
)
from t3c.evidence.estimates import EstimateConfig, estimate, residuals_of
from t3c.evidence.original import Original, beside, to_original
from t3c.evidence.program import Executed, Program, executed
from t3c.evidence.shift import seen_features
from t3c.evidence.worst_case import norms_of, worst_cases
from t3c.experiments.fidelity import uniform
from t3c.exporter import content
from t3c.exporter.allocate import Allocated
from t3c.measure.memory import peak_rss, reset_peak
from t3c.nn.inputs import Inputs, batches_of, evaluating, select
from t3c.runtime.grid import mixtures, widest_ranges
from t3c.runtime.measured import Subject as Deployed
from t3c.runtime.monitor import Monitor
from t3c.runtime.runtime import Runtime
from t3c.runtime.watching import watched
from t3c.spec import Menu, Profile, ProfileChain
from t3c.train import TrainConfig, fit
from t3c.zoo.cifar10 import cifar10, imagenet_as_cifar, resnet
from t3c.zoo.corrupt import CORRUPTIONS
from t3c.zoo.digits import DigitsNet, load_digits, train_digits
from t3c.zoo.local import imagenet_sample, resnet50
from t3c.zoo.text import MiniLMEmbedding, sst2_sentences, stories15m, stories_tokens

DELTA = 0.05
SPLITS, SCALING, CALIBRATION = 1000, 1 / 6, 0.55
MIXTURES = 32
BITS = (3, 4, 5, 6, 8)
ELASTIC = ElasticConfig(rank_fractions=(1 / 2, 5 / 8, 3 / 4, 7 / 8), bits=BITS, store_ratio=1.0)
# Shares of rank and bits of five profiles, as far down as a network untrained for them can go.
WIDE = ((1 / 2, 5), (5 / 8, 6), (3 / 4, 6), (7 / 8, 8), (1.0, 8))
NARROW = ((3 / 4, 4), (3 / 4, 5), (1.0, 5), (1.0, 6), (1.0, 8))
Say = Callable[[str], object]
Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model, data for its factors and its ranges, and a pool of samples nothing else has seen.

    `studied` is how many of the pool the correlation is taken over, `bounded` how many the worst
    case is evaluated at.
    """

    name: str
    model: nn.Module
    statistics: Sequence[Inputs]
    calibration: Inputs
    pool: Inputs
    points: Sequence[tuple[float, int]]
    studied: int = 32
    bounded: int = 16


@dataclass(frozen=True)
class Made:
    """An artifact with the original it was made from, ready to be certified."""

    subject: Subject
    runtime: Runtime
    original: Original
    pool: Samples

    @property
    def names(self) -> list[str]:
        return [profile.name for profile in self.runtime.chain]


def subjects() -> dict[str, Callable[[], Subject]]:
    """The digits network, ResNet-56, MiniLM-L6, stories15M and ResNet-50, made when asked for."""
    return {
        "digits": _digits, "resnet-56": _resnet56, "minilm-l6": _minilm,
        "stories15m": _stories15m, "resnet-50": _resnet50,
    }  # fmt: skip


def make(subject: Subject, path: Path) -> Made:
    """An artifact of profiles at even points; forms are those of a device that was not timed."""
    model = subject.model
    example = select(subject.statistics[0], slice(0, 2))
    elasticize_(model, example, ELASTIC, calibration=subject.statistics)
    plan = state_of(model).plan
    names = names_for(len(subject.points))
    chain = ProfileChain(
        tuple(
            Profile(name, uniform(plan, share, bits).points)
            for name, (share, bits) in zip(names, subject.points, strict=True)
        )
    )
    menus = {
        name: Menu(tuple(dict.fromkeys(profile.points[name] for profile in chain)))
        for name in chain.top.points
    }
    allocated = Allocated(menus, chain, dict.fromkeys(names, 0.0))
    with evaluating(model), staged(path) as folder:
        content.write(
            folder, model, content.topology(model), allocated, subject.calibration,
            name=subject.name, seed=0, image=None, classes=None,
        )  # fmt: skip
    artifact = Artifact(path)
    original = beside(artifact, to_original(model))
    return Made(subject, Runtime(artifact, "openvino"), original, arrays(subject.pool))


def certified(made: Made, watch: Any) -> Row:
    """Certify all profiles once, as a user would: figures, minutes and memory."""
    order = np.random.default_rng(0).permutation(len(made.pool[0]))
    first, second = int(len(order) * SCALING), int(len(order) * (SCALING + CALIBRATION))
    parts = (order[:first], order[first:second], order[second:])
    scaling, scores, held_out = ([value[part] for value in made.pool] for part in parts)
    reset_peak()
    started = time.perf_counter()
    found = certify(
        made.runtime, program_reference(made.runtime.artifact, made.original), made.original,
        Slices(scaling, scores, held_out), CertifyConfig(delta=DELTA), watch=watch,
    )  # fmt: skip
    minutes = (time.perf_counter() - started) / 60
    made.runtime.artifact.add_certification(found)
    assert found.held_out is not None
    peak = peak_rss()
    return {
        "model": made.subject.name, "profiles": len(found.entries), "samples": len(scores[0]),
        "held_out": found.held_out.samples, "coverage": found.held_out.coverage,
        "expected_from": found.held_out.expected[0], "expected_to": found.held_out.expected[1],
        "minutes": minutes, "peak_gb": None if peak is None else peak / 1e9,
    }  # fmt: skip


def profile_rows(made: Made) -> list[Row]:
    """The four figures of each profile beside the drift that was seen."""
    ledger = made.runtime.artifact.ledger()
    assert ledger is not None
    return [
        {
            "model": made.subject.name, "profile": c.profile, "mean": c.mean, "p95": c.p95,
            "epsilon": c.epsilon, "first_order": c.first_order, "spectral": c.spectral,
            "worst_case": c.worst_case, "unavailable": c.unavailable,
        }
        for c in ledger.certifications[-1].entries
    ]  # fmt: skip


def split_row(made: Made, watch: Any) -> tuple[Row, Array]:
    """Coverage and tightness over many splits of the pool; and the drifts (n, profiles)."""
    runtime = made.runtime
    reference = program_reference(runtime.artifact, made.original)
    sessions = {name: runtime.session(name) for name in made.names}
    drifts = measure_drifts(
        reference, sessions, made.pool, {"relative": "relative"}, watch
    ).relative
    together = random_splits(drifts, DELTA, SPLITS, scaling=SCALING, calibration=CALIBRATION)
    alone = [
        random_splits(drifts[:, [i]], DELTA, SPLITS, scaling=SCALING, calibration=CALIBRATION)
        for i in range(drifts.shape[1])
    ]
    low, high = expected_coverage(together.test, together.calibration, DELTA)
    return {
        "model": made.subject.name, "pool": len(drifts), "calibration": together.calibration,
        "test": together.test, "splits": SPLITS, "coverage": together.coverage,
        "standard_error": together.standard_error, "lowest_profile": together.lowest,
        "expected_from": low, "expected_to": high,
        "to_p95_five": _largest(together.to_p95), "to_mean_five": _largest(together.to_mean),
        "to_p95_one": _largest([one.to_p95[0] for one in alone]),
        "to_mean_one": _largest([one.to_mean[0] for one in alone]),
    }, drifts  # fmt: skip


def study_rows(made: Made, say: Say, count: int = MIXTURES) -> list[Row]:
    """Estimates beside drift on the engine, for the profiles and mixtures of them.

    Both are means over the same samples of the pool. Gains are those at the original.
    """
    runtime, artifact, subject = made.runtime, made.runtime.artifact, made.subject
    samples = [value[: subject.studied] for value in made.pool]
    tensors = [torch.from_numpy(value) for value in samples]
    program, bits = Program(artifact), runtime.device.weight_bits
    truth = program_reference(artifact, made.original)(samples)
    deployed = [runtime.subjects[name] for name in made.names]
    widest = widest_ranges(artifact)
    for profile in mixtures(artifact, count, seed=0):
        forms = {n: artifact.entries[n].spec.forms(p)[0] for n, p in profile.points.items()}
        deployed.append(Deployed(profile, forms, widest))
    gains: Mapping[str, float] | None = None
    rows = []
    known: dict[tuple[str, object], float] = {}
    for index, one in enumerate(deployed):
        say(f"{subject.name}: profile {index + 1} of {len(deployed)}")
        beside_it = executed(artifact, made.original, one, bits, torch.float32)
        if gains is None:
            config = EstimateConfig(samples=min(16, subject.studied), path_samples=0)
            found = estimate(program, {"": beside_it}, tensors, config)[""]
            gains, rms = found.gains, found.rms
            scale = float(np.sqrt(np.mean(np.square(truth.reshape(len(truth), -1)).sum(axis=1))))
        session = runtime.engine.compile(one.graph(artifact, bits))
        drift = relative_drift(session_outputs(session, samples), truth)
        changes = torch.cat([first_order(program, beside_it, part) for part in _few(tensors)])
        norms = np.linalg.norm(truth.reshape(len(truth), -1), axis=1)
        estimates = changes.double().norm(dim=1).numpy() / norms
        residuals = _residuals(beside_it, one.profile, known)
        spectral = sum(gains[n] * residuals[n] * rms[n] for n in gains) / scale
        rows.append(
            {
                "model": subject.name, "profile": one.profile.name, "samples": len(drift),
                "drift": float(drift.mean()), "first_order": float(estimates.mean()),
                "spectral": float(spectral),
            }
        )  # fmt: skip
    return rows


def _residuals(
    found: Executed, profile: Profile, known: dict[tuple[str, object], float]
) -> dict[str, float]:
    """Residual norms, those of points met before taken from there: forms follow from points."""
    new = {n: x for n, x in found.layers.items() if (n, profile.points[n]) not in known}
    for name, norm in residuals_of(replace(found, layers=new)).items():
        known[name, profile.points[name]] = norm
    return {name: known[name, profile.points[name]] for name in found.layers}


def correlation_row(rows: Sequence[Row]) -> Row:
    """How well the estimates of one model follow drift over its profiles."""
    drift = [row["drift"] for row in rows]
    low = [row for row in rows if row["drift"] <= 0.5]
    first, spectral = (
        agreement([r[key] for r in rows], drift) for key in ("first_order", "spectral")
    )
    near = agreement([r["first_order"] for r in low], [r["drift"] for r in low])
    ratios = [row["first_order"] / row["drift"] for row in low]
    return {
        "model": rows[0]["model"], "profiles": len(rows), "samples": rows[0]["samples"],
        "drift_from": min(drift), "drift_to": max(drift),
        "first_order_spearman": first.spearman, "first_order_pearson": first.pearson,
        "up_to_half": len(low), "pearson_up_to_half": near.pearson,
        "ratio_from": min(ratios, default=None), "ratio_to": max(ratios, default=None),
        "spectral_spearman": spectral.spearman, "spectral_pearson": spectral.pearson,
    }  # fmt: skip


def worst_rows(made: Made, say: Say) -> list[Row]:
    """The worst case of each profile against float64 and against the engine, sample by sample."""
    runtime, artifact = made.runtime, made.runtime.artifact
    samples = [value[: made.subject.bounded] for value in made.pool]
    tensors = [torch.from_numpy(value) for value in samples]
    program = Program(artifact, torch.float64)
    truth = program_reference(artifact, made.original)(samples)
    rows = []
    for name in made.names:
        say(f"{made.subject.name}: the worst case of {name}")
        one = executed(
            artifact, made.original, runtime.subjects[name], runtime.device.weight_bits,
            torch.float64,
        )  # fmt: skip
        cases = worst_cases(program, one, norms_of(one), tensors)
        stopped = next((case.stopped for case in cases if case.bound is None), "")
        row: Row = {"model": made.subject.name, "profile": name, "samples": len(cases)}
        if stopped:
            rows.append(row | {"stopped": stopped})
            continue
        with torch.no_grad():
            ends = [
                torch.cat([program(one, part, s) for part in _few(tensors)]) for s in (0.0, 1.0)
            ]
        simulated = (ends[1] - ends[0]).flatten(1).norm(dim=1).numpy()
        served = session_outputs(runtime.session(name), samples)
        on_engine = np.linalg.norm((served - truth).reshape(len(truth), -1), axis=1)
        bounds = np.array([case.bound for case in cases])
        sizes = np.array([case.size for case in cases])
        rows.append(
            row
            | {
                "stopped": "", "violations": int((simulated > bounds).sum()),
                "engine_violations": int((on_engine > bounds).sum()),
                "worst_case": float((bounds / sizes).mean()),
                "over_drift": float(np.median(bounds / np.maximum(simulated, 1e-12))),
            }
        )  # fmt: skip
    return rows


def penalty_rows(blocks: int = 12, steps: int = 10) -> list[Row]:
    """What the certificate penalty adds to a mean training step, in turns with none."""
    digits = load_digits()
    torch.manual_seed(0)
    model = DigitsNet()
    train_digits(model, digits, 1, 0)
    elasticize_(model, digits.train[0][:2], calibration=digits.loader(64))
    kinds = {
        "none": TrainConfig(steps=steps),
        "first_order": TrainConfig(steps=steps, certificate=0.1),
        "spectral": TrainConfig(steps=steps, certificate=1e-3, certificate_kind="spectral"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    batches = list(digits.loader(32))
    for _ in range(blocks + 1):
        for name, config in kinds.items():
            started = time.perf_counter()
            fit(model, batches, config)
            seconds[name].append(time.perf_counter() - started)
    plain = np.array(seconds["none"][1:])
    return [
        {
            "penalty": name, "blocks": blocks, "steps": steps,
            "mean_ratio": float(np.mean(times[1:]) / plain.mean()),
            "p50_ratio": float(np.median(np.array(times[1:]) / plain)),
            "p90_ratio": float(np.quantile(np.array(times[1:]) / plain, 0.9)),
        }
        for name, times in seconds.items()
        if name != "none"
    ]  # fmt: skip


def monitor_rows(made: Made, say: Say, rate: float = 1e-3) -> list[Row]:
    """False alarms on streams of the pool, and samples until shifts of it are noticed."""
    runtime = made.runtime
    ledger = runtime.artifact.ledger()
    assert ledger is not None
    found = ledger.certifications[-1]
    name = made.names[len(made.names) // 2]
    model = found.monitors[name]
    thresholds = dict(zip(model.tensors, model.thresholds, strict=True))
    graph = watched(runtime.graph(runtime.chain[name]), model.tensors, thresholds)
    session = runtime.engine.compile(graph)
    used = {key for part in ("scaling", "certificate") for key in found.keys[part]}
    images = _unused(made, used)
    usual = seen_features(session, [images.numpy()])
    rows = [_false_alarms(model, usual, rate, made.subject.name)]
    shifts = {n: change(images[:SHIFTED]) for n, change in CORRUPTIONS.items()}
    shifts["another data set"] = imagenet_as_cifar(SHIFTED)
    for kind, moved in shifts.items():
        say(f"monitor: {kind}")
        features = seen_features(session, [moved.numpy()])
        rows.append(_delay(model, usual, features, rate, made.subject.name, kind))
    return rows


SHIFTED, STREAMS, LENGTH, GOOD = 300, 200, 500, 200


def _unused(made: Made, used: set[str]) -> Tensor:
    """Samples of the pool that the certificate was not made of."""
    from t3c.certify.slices import sample_keys

    fresh = [i for i, key in enumerate(sample_keys(made.pool)) if key not in used]
    return torch.from_numpy(made.pool[0][fresh])


def _false_alarms(model: ShiftModel, usual: Array, rate: float, name: str) -> Row:
    rng = np.random.default_rng(0)
    length = min(LENGTH, len(usual))
    alarms = []
    for stream in range(STREAMS):
        monitor = Monitor(model, rate=rate, seed=stream)
        order = rng.permutation(len(usual))[:length]
        alarms.append(sum(monitor.observe(usual[[i]]) is not None for i in order))
    seen = np.array(alarms) / length
    return {
        "model": name, "stream": "as calibrated", "streams": STREAMS, "samples": length,
        "stated_rate": rate, "alarms_per_sample": float(seen.mean()),
        "standard_error": float(seen.std(ddof=1) / np.sqrt(STREAMS)), "noticed": None,
        "after_p50": None, "after_p90": None,
    }  # fmt: skip


def _delay(model: ShiftModel, usual: Array, moved: Array, rate: float, name: str, kind: str) -> Row:
    """Samples from the shift to the alarm, after some good ones; a stream without one counts whole."""
    rng = np.random.default_rng(1)
    delays, noticed = [], 0
    for stream in range(STREAMS):
        monitor = Monitor(model, rate=rate, seed=stream)
        monitor.observe(usual[rng.permutation(len(usual))[:GOOD]])
        delay = len(moved)
        for count, index in enumerate(rng.permutation(len(moved)), start=1):
            if monitor.observe(moved[[index]]) is not None:
                delay, noticed = count, noticed + 1
                break
        delays.append(delay)
    return {
        "model": name, "stream": kind, "streams": STREAMS, "samples": len(moved),
        "stated_rate": rate, "alarms_per_sample": None, "standard_error": None,
        "noticed": noticed / STREAMS, "after_p50": float(np.median(delays)),
        "after_p90": float(np.quantile(delays, 0.9)),
    }  # fmt: skip


def _few(tensors: Sequence[Tensor], size: int = 4) -> Iterator[list[Tensor]]:
    for start in range(0, len(tensors[0]), size):
        yield [value[start : start + size] for value in tensors]


def _largest(ratios: Sequence[float | None]) -> float | None:
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def _digits() -> Subject:
    digits = load_digits()
    torch.manual_seed(0)
    model = DigitsNet()
    train_digits(model, digits, 3, 0)
    pool = torch.cat([digits.calibration[0], digits.test[0]])
    batches = [inputs for inputs, _ in digits.loader(64)]
    return Subject("digits", model, batches, digits.train[0][:64], pool, WIDE, studied=64)


def _resnet56(statistics: int = 512, ranges: int = 64, pool: int = 2000) -> Subject:
    known = cifar10("train", statistics + ranges)[0]
    batches = list(batches_of(known[:statistics], 128))
    images = cifar10("test", pool)[0]
    return Subject("resnet-56", resnet(56), batches, known[statistics:], images, WIDE, studied=64)


def _resnet50(statistics: int = 32, ranges: int = 16) -> Subject:
    known = imagenet_sample(statistics + ranges, part="tune")[0]
    rest = torch.cat(
        [imagenet_sample(part="tune")[0][statistics + ranges :], imagenet_sample(part="test")[0]]
    )
    batches = list(batches_of(known[:statistics], 16))
    return Subject(
        "resnet-50", resnet50(), batches, known[statistics:], rest, WIDE, studied=16, bounded=4
    )


def _minilm(statistics: int = 128, ranges: int = 64, length: int = 48) -> Subject:
    known = sst2_sentences("train", statistics + ranges, length)[0]
    parts = [select(known, slice(0, statistics)), select(known, slice(statistics, None))]
    pool = sst2_sentences("test", 1200, length)[0]
    batches = list(batches_of(parts[0], 32))
    return Subject("minilm-l6", MiniLMEmbedding(), batches, parts[1], pool, NARROW)


def _stories15m(statistics: int = 64, ranges: int = 32, length: int = 32) -> Subject:
    known = stories_tokens("train", statistics + ranges, length)
    pool = {"input_ids": stories_tokens("valid", 1000, length)}
    batches = [{"input_ids": part} for part in known[:statistics].split(16)]
    model = stories15m()
    return Subject(
        "stories15m", model, batches, {"input_ids": known[statistics:]}, pool, NARROW, studied=24,
        bounded=8,
    )  # fmt: skip
