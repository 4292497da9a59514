"""Certificates of an artifact on the engine and forms that serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from t3c.artifact.devices import forms_key
from t3c.artifact.ledger import Capped, Certification, HeldOut, LayerTerm, Settings, SliceEntry
from t3c.certify.conformal import simultaneous_bounds
from t3c.certify.coverage import agreement, expected_coverage
from t3c.certify.drift import MEASURES, Array, Measure
from t3c.certify.risk import certified_within, risk_bounds
from t3c.certify.slices import digest, refuse_overlap, sample_keys, slice_table
from t3c.errors import SpecError
from t3c.evidence.drifts import Drifts, Reference, Watch, measure_drifts
from t3c.evidence.estimates import GAINS, PATH, Estimate, EstimateConfig, estimate
from t3c.evidence.original import Original
from t3c.evidence.program import Executed, Program, executed
from t3c.evidence.served import Samples
from t3c.evidence.shift import shift_models
from t3c.evidence.worst_case import WorstCase, norms_of, worst_cases
from t3c.runtime.runtime import Runtime
from t3c.spec import Bound, Certificate

ASSUMPTION = (
    "a new sample is exchangeable with the certificate samples; the bound holds for all profiles "
    "of the artifact at once, on this engine executing these forms"
)
QUANTILES = (0.5, 0.9, 0.95, 0.99)
WORST_SAMPLES = 4  # that the worst case is evaluated at, if it is asked for
RISKS = ("flip",)  # measures whose mean is bounded, not the drift of a sample


@dataclass(frozen=True)
class CertifyConfig:
    """What to certify, and how much it may take.

    `delta` is the share of samples `epsilon` may miss. `measures` are further measures of drift, by
    name: absolute, kl, flip. `worst_case` bounds the drift of a few samples with no probability in
    it, which takes long. `monitor` models the activations, for a monitor to compare with at run
    time. `flip_cap` asks which profiles change at most this share of the answers.
    """

    delta: float = 0.05
    measures: tuple[str, ...] = ("absolute",)
    estimates: EstimateConfig = field(default_factory=EstimateConfig)
    worst_case: bool = False
    monitor: bool = False
    flip_cap: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise SpecError(f"delta must be between 0 and 1, got {self.delta:g}")
        unknown = [name for name in self.measures if name not in MEASURES]
        if unknown:
            known = ", ".join(MEASURES)
            raise SpecError(f"unknown measure {unknown[0]!r}: it is one of {known}")
        if self.flip_cap is not None and not 0 < self.flip_cap < 1:
            raise SpecError(f"flip_cap must be between 0 and 1, got {self.flip_cap:g}")


@dataclass(frozen=True)
class Slices:
    """Disjoint samples: to scale the bounds, to score them, and, if given, to test them.

    `labels` (n,) put the scoring samples into slices of their own.
    """

    scaling: Samples
    scores: Samples
    held_out: Samples | None = None
    labels: npt.NDArray[np.generic] | None = None

    def keys(self) -> dict[str, list[str]]:
        """Hashes of the samples of each part."""
        parts = {"scaling": self.scaling, "certificate": self.scores, "test": self.held_out}
        return {name: sample_keys(part) for name, part in parts.items() if part is not None}


def certify(
    runtime: Runtime,
    reference: Reference,
    original: Original | None,
    slices: Slices,
    config: CertifyConfig | None = None,
    *,
    own: Mapping[str, Measure] | None = None,
    missing: str = "",
    watch: Watch = lambda what, done, total: None,
) -> Certification:
    """Certify all profiles. Without the original's weights only epsilon is to be had.

    `own` are the user's measures of drift; `missing` says why there is no original.
    """
    config = config or CertifyConfig()
    keys = slices.keys()
    refuse_overlap({"quantizer": runtime.artifact.manifest.calibrated_on or (), **keys})
    names = [profile.name for profile in runtime.chain]
    sessions = {name: runtime.session(name) for name in names}
    measures = _measures(runtime, slices, config, own or {})

    def seen(part: Samples) -> Drifts:
        return measure_drifts(reference, sessions, part, measures, watch)

    scaling, scores = seen(slices.scaling), seen(slices.scores)
    bounds = {name: _bounds(name, scaling, scores, config.delta) for name in measures}
    few = [torch.from_numpy(np.ascontiguousarray(value)) for value in slices.scaling]
    found = _Evidence(runtime, original, few, config, watch) if original else None
    figures = {n: found.figures(n) if found else {"unavailable": missing} for n in names}
    entries = _entries(runtime, scores, bounds, config.delta, figures)
    held_out = None
    if slices.held_out is not None:
        test = seen(slices.held_out)["relative"]
        held_out = _held_out(entries, test, config.delta, digest(keys["test"]))
    return Certification(
        engine=runtime.engine.name,
        engine_version=runtime.engine.version,
        weight_bits=runtime.device.weight_bits,
        forms={name: dict(runtime.forms[name]) for name in names},
        assumption=ASSUMPTION,
        delta=config.delta,
        data=digest([*keys["scaling"], *keys["certificate"]]),
        keys={name: tuple(part) for name, part in keys.items()},
        settings=_settings(config, len(slices.scaling[0])) if found else None,
        entries=entries,
        quantiles=_quantiles(scores["relative"], names),
        layers={name: found.layers(name) for name in names} if found else {},
        agreement=_agreement(entries) if found else {},
        slices=_slices(slices.labels, scores, bounds["relative"], names),
        held_out=held_out,
        capped=_capped(scores, names, config),
        monitors=(
            shift_models(runtime, slices.scaling, slices.scores, watch) if config.monitor else {}
        ),
    )


def _measures(
    runtime: Runtime, slices: Slices, config: CertifyConfig, own: Mapping[str, Measure]
) -> dict[str, str | Measure]:
    """All measures of drift that are asked for, by name."""
    taken = [name for name in own if name in MEASURES]
    if taken:
        raise SpecError(f"a measure of one's own cannot be called {taken[0]!r}: there is one")
    measures: dict[str, str | Measure] = {"relative": "relative"}
    measures |= {name: name for name in config.measures} | dict(own)
    classes = runtime.artifact.manifest.model.classes
    if config.flip_cap is not None or (slices.labels is not None and classes is not None):
        measures["flip"] = "flip"
    return measures


def _entries(
    runtime: Runtime,
    scores: Drifts,
    bounds: Mapping[str, Array],
    delta: float,
    figures: Mapping[str, Mapping[str, Any]],
) -> tuple[Certificate, ...]:
    """The certificate of each profile."""
    return tuple(
        Certificate(
            profile=name,
            engine=runtime.engine.name,
            forms=forms_key(runtime.forms[name], runtime.device.weight_bits),
            delta=delta,
            samples=len(scores["relative"]),
            mean=float(scores["relative"][:, index].mean()),
            p95=float(np.quantile(scores["relative"][:, index], 0.95)),
            epsilon=float(bounds["relative"][index]),
            measures={
                m: Bound(float(scores[m][:, index].mean()), float(bounds[m][index]))
                for m in bounds
                if m != "relative"
            },
            **own,
        )
        for index, (name, own) in enumerate(figures.items())
    )


class _Evidence:
    """Estimates and worst cases of all profiles."""

    def __init__(
        self,
        runtime: Runtime,
        original: Original,
        samples: Sequence[torch.Tensor],
        config: CertifyConfig,
        watch: Watch,
    ) -> None:
        artifact, bits = runtime.artifact, runtime.device.weight_bits
        self.worst: dict[str, list[WorstCase]] = {}

        def at(name: str, dtype: torch.dtype) -> Executed:
            return executed(artifact, original, runtime.executions[name], bits, dtype)

        names = [profile.name for profile in runtime.chain]
        profiles = {name: at(name, torch.float32) for name in names}
        self.estimates: dict[str, Estimate] = estimate(
            Program(artifact), profiles, samples, config.estimates, watch
        )
        program = Program(artifact, torch.float64)
        for count, name in enumerate(names if config.worst_case else ()):
            watch(f"the worst case of {name}", count, len(names))
            one = at(name, torch.float64)
            few = [value[:WORST_SAMPLES] for value in samples]
            self.worst[name] = worst_cases(program, one, norms_of(program, one), few)

    def figures(self, name: str) -> dict[str, Any]:
        found = self.estimates[name]
        worst = self.worst.get(name, [])
        stopped = next((case.stopped for case in worst if case.bound is None), "")
        bounds = [case.bound / max(case.size, 1e-12) for case in worst if case.bound is not None]
        why = f"worst_case: {stopped}" if stopped else "" if worst else "worst_case: not asked for"
        return {
            "first_order": float(found.first_order.mean()),
            "spectral": found.spectral,
            "spectral_pointwise": float(found.spectral_of.max()),
            "worst_case": max(bounds) if bounds and not stopped else None,
            "unavailable": why,
        }

    def layers(self, name: str) -> tuple[LayerTerm, ...]:
        bounds: dict[str, list[float]] = {}
        for case in self.worst.get(name, []):
            for use, bound in case.layers.items():  # `layer#2` where it is not the first
                bounds.setdefault(use.split("#")[0], []).append(bound)
        worst = {layer: max(seen) for layer, seen in bounds.items() if np.isfinite(seen).all()}
        terms = self.estimates[name].layers.items()
        return tuple(t.model_copy(update={"worst_case": worst.get(n)}) for n, t in terms)


def _bounds(name: str, scaling: Drifts, scores: Drifts, delta: float) -> Array:
    if name in RISKS:
        return risk_bounds(scores[name], delta)
    return simultaneous_bounds(scaling[name], scores[name], delta)


def _held_out(entries: Sequence[Certificate], drifts: Array, delta: float, data: str) -> HeldOut:
    """What the bounds do on drifts (n, profiles) that they were not made of."""
    names = [entry.profile for entry in entries]
    bounds = np.array([entry.epsilon for entry in entries])
    inside = drifts <= bounds
    high = np.maximum(np.quantile(drifts, 0.95, axis=0), 1e-12)
    return HeldOut(
        samples=len(drifts),
        data=data,
        coverage=float(inside.all(axis=1).mean()),
        expected=expected_coverage(len(drifts), entries[0].samples, delta),
        within=dict(zip(names, inside.mean(axis=0).tolist(), strict=True)),
        ratio=dict(zip(names, (bounds / high).tolist(), strict=True)),
    )


def _quantiles(drifts: Array, names: Sequence[str]) -> dict[str, dict[str, float]]:
    return {
        name: {f"p{100 * q:g}": float(np.quantile(column, q)) for q in QUANTILES}
        for name, column in zip(names, drifts.T, strict=True)
    }


def _capped(scores: Drifts, names: Sequence[str], config: CertifyConfig) -> Capped | None:
    if config.flip_cap is None:
        return None
    kept = certified_within(scores["flip"], config.flip_cap, config.delta)
    return Capped(
        measure="flip", cap=config.flip_cap, profiles=tuple(names[index] for index in kept)
    )


def _agreement(entries: Sequence[Certificate]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for figure in ("first_order", "spectral"):
        values = [getattr(entry, figure) for entry in entries]
        seen = agreement(values, [entry.mean for entry in entries])
        found |= {f"{figure}.{key}": value for key, value in asdict(seen).items()}
    return found


def _slices(
    labels: npt.NDArray[np.generic] | None, scores: Drifts, bounds: Array, names: Sequence[str]
) -> tuple[SliceEntry, ...]:
    if labels is None:
        return ()
    table = slice_table(labels, scores["relative"], scores.get("flip"), bounds, names)
    return tuple(SliceEntry(**{**asdict(row), "label": str(row.label)}) for row in table)


def _settings(config: CertifyConfig, samples: int) -> Settings:
    made = config.estimates
    return Settings(
        gain_samples=min(made.samples, samples), probes=GAINS.probes, steps=GAINS.steps,
        path=PATH, path_samples=min(made.path_samples, samples),
        worst_samples=min(WORST_SAMPLES, samples) if config.worst_case else 0,
        seed=GAINS.seed,
    )  # fmt: skip
