"""Whether certificates hold: coverage, tightness, correlation, worst cases, and what they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.certified import Made
from lab.splits import random_splits
from t3c.certify.coverage import agreement, expected_coverage
from t3c.certify.drift import Array, relative_drift
from t3c.certify.slices import Indices
from t3c.device.execution import Execution
from t3c.device.grid import mixtures, widest_ranges
from t3c.evidence.along import first_order
from t3c.evidence.certify import CertifyConfig, Slices, certify
from t3c.evidence.drifts import measure_drifts, program_reference
from t3c.evidence.estimates import EstimateConfig, estimate, residuals_of
from t3c.evidence.program import Executed, Program, executed
from t3c.evidence.served import answers, run_of
from t3c.evidence.worst_case import norms_of, worst_cases
from t3c.measure.memory import peak_rss, reset_peak
from t3c.spec import Profile

DELTA = 0.05
SPLITS, SCALING, CALIBRATION = 1000, 1 / 6, 0.55
MIXTURES = 32
Say = Callable[[str], object]
Row = dict[str, Any]


def parts_of(made: Made) -> tuple[Indices, Indices, Indices]:
    """Indices into the pool: to scale bounds, to score them, to test them."""
    order = np.random.default_rng(0).permutation(len(made.pool[0]))
    first, second = int(len(order) * SCALING), int(len(order) * (SCALING + CALIBRATION))
    return order[:first], order[first:second], order[second:]


def certified_row(made: Made, drifts: Array, watch: Any) -> Row:
    """Certify all profiles once, as a user would: minutes, memory, and coverage of the rest.

    `drifts` (n, profiles) are those of the whole pool.
    """
    scaling, scores, rest = parts_of(made)
    slices = Slices([v[scaling] for v in made.pool], [v[scores] for v in made.pool])
    reference = program_reference(made.runtime.artifact, made.original)
    reset_peak()
    started = time.perf_counter()
    config = CertifyConfig(delta=DELTA, worst_case=True, monitor=True)
    found = certify(made.runtime, reference, made.original, slices, config, watch=watch)
    minutes = (time.perf_counter() - started) / 60
    made.runtime.artifact.add_certification(found)
    peak = peak_rss()
    inside = drifts[rest] <= np.array([entry.epsilon for entry in found.entries])
    low, high = expected_coverage(len(rest), len(scores), DELTA)
    return {
        "model": made.subject.name, "profiles": len(found.entries), "samples": len(scores),
        "held_out": len(rest), "coverage": float(inside.all(axis=1).mean()),
        "expected_from": low, "expected_to": high, "gain_samples": config.estimates.samples,
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
    drifts = measure_drifts(reference, sessions, made.pool, {"relative": "relative"}, watch)[
        "relative"
    ]
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
    deployed = [runtime.executions[name] for name in made.names]
    widest = widest_ranges(artifact)
    for profile in mixtures(artifact, count, seed=0):
        forms = {n: artifact.entries[n].spec.forms(p)[0] for n, p in profile.points.items()}
        deployed.append(Execution(profile, forms, widest))
    gains: Mapping[str, float] | None = None
    rows = []
    known: dict[tuple[str, object], float] = {}
    for index, one in enumerate(deployed):
        say(f"{subject.name}: profile {index + 1} of {len(deployed)}")
        beside_it = executed(artifact, made.original, one, bits, torch.float32)
        if gains is None:
            config = EstimateConfig(samples=min(16, subject.studied), path_samples=0)
            found = estimate(program, {"": beside_it}, tensors, config)[""]
            gains = {name: term.gain for name, term in found.layers.items()}
            rms = {name: term.rms for name, term in found.layers.items()}
            scale = float(np.sqrt(np.mean(np.square(truth.reshape(len(truth), -1)).sum(axis=1))))
        session = runtime.engine.compile(one.graph(artifact, bits))
        drift = relative_drift(answers(run_of(session), samples), truth)
        changes = torch.cat([first_order(program, beside_it, part) for part in _few(tensors)])
        norms = np.linalg.norm(truth.reshape(len(truth), -1), axis=1)
        estimates = changes.double().norm(dim=1).numpy() / norms
        residuals = _residuals(program, beside_it, one.profile, known)
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
    program: Program, found: Executed, profile: Profile, known: dict[tuple[str, object], float]
) -> dict[str, float]:
    """Residual norms, those of points met before taken from there: forms follow from points."""
    new = {n: x for n, x in found.layers.items() if (n, profile.points[n]) not in known}
    for name, norm in residuals_of(program, replace(found, layers=new)).items():
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
            artifact, made.original, runtime.executions[name], runtime.device.weight_bits,
            torch.float64,
        )  # fmt: skip
        cases = worst_cases(program, one, norms_of(program, one), tensors)
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
        served = answers(run_of(runtime.session(name)), samples)
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


def _few(tensors: Sequence[Tensor], size: int = 4) -> Iterator[list[Tensor]]:
    for start in range(0, len(tensors[0]), size):
        yield [value[start : start + size] for value in tensors]


def _largest(ratios: Sequence[float | None]) -> float | None:
    return max((ratio for ratio in ratios if ratio is not None), default=None)
