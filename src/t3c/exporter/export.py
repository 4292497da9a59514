"""`t3c.export`: one call from an elastic model to a certified artifact."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from t3c.artifact.card import write_card
from t3c.artifact.devices import DeviceTable, LayerTiming
from t3c.artifact.folder import staged
from t3c.artifact.graph import Axes, Traced
from t3c.artifact.ledger import Certification, Ledger, ParityEntry
from t3c.artifact.reader import Artifact
from t3c.certify.conformal import least_samples
from t3c.certify.slices import sample_keys, split_unique
from t3c.control.profiles import Measured, Pruned, fitting, names_for, prune, thin
from t3c.convert import state_of
from t3c.device.calibrate import calibrate
from t3c.device.measured import Watch
from t3c.engines import Engine, open_engine
from t3c.errors import ConvertError, DataError, EngineError, SpecError
from t3c.evidence.certify import Slices, certify
from t3c.evidence.drifts import arrays, model_reference, program_reference
from t3c.evidence.original import beside, to_original
from t3c.exporter import content
from t3c.exporter.allocate import Allocated, Wanted, allocate
from t3c.exporter.config import ExportConfig
from t3c.exporter.parity import engine_parity, other_engines, stored_profiles
from t3c.exporter.timing import Timed, time_traced
from t3c.nn.inputs import Inputs, check_finite, check_like, evaluating, gather, select, tensors
from t3c.runtime.runtime import Runtime
from t3c.runtime.tokens import read_tokenizer
from t3c.spec import ImageSpec, ProfileChain, TextSpec

PARITY_SAMPLES, OTHER_SAMPLES = 16, 4


@dataclass(frozen=True)
class Exported:
    """What was written, what was measured on the way, and why other things were not shipped.

    `pruned` are candidate profiles, `notes` points that a proposal was not simply rounded to,
    `dropped` points that are on no menu, by what shares them.
    """

    path: Path
    profiles: ProfileChain
    table: DeviceTable
    ledger: Ledger
    parity: tuple[ParityEntry, ...]
    pruned: tuple[Pruned, ...] = ()
    notes: tuple[str, ...] = ()
    dropped: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Parts:
    """The calibration data in three disjoint parts (paper E.1)."""

    quantizer: Inputs
    scaling: Inputs
    scores: Inputs


def export(
    model: nn.Module,
    path: str | Path,
    calibration: Iterable[Any],
    config: ExportConfig | None = None,
    *,
    name: str | None = None,
    image: ImageSpec | None = None,
    classes: Iterable[str] | None = None,
    axes: Axes | None = None,
    tokenizer: Any = None,
    text: TextSpec | None = None,
    timed: Timed | None = None,
    say: Callable[[str], object] = lambda message: None,
    watch: Watch = lambda what, done, total: None,
) -> Exported:
    """Write an elastic model as an artifact: profiles, costs, certificates, packed factors.

    `calibration` yields inputs, or (inputs, target), that the model was not trained on: one part
    sets ranges and allocates, the rest makes the certificates. An artifact that was at `path`
    stays whole until the new one is. `axes` names the axes of inputs that are free besides the
    batch, `{"input_ids": {1: "sequence"}}`; what is measured is measured at the example's sizes.
    `tokenizer` is a tokenizer.json, a folder that has one, or a fast tokenizer of Hugging Face,
    which also says what texts begin with and end at if `text` does not. `timed` are layer times
    that `time_points` measured before, with the same configuration.
    """
    config = config or ExportConfig()
    state = state_of(model)
    path = Path(path)
    engine = open_engine(config.engine, config.threads)
    samples = gather(calibration)
    check_finite(samples, "the calibration data")
    check_like(samples, state.example, "the calibration data")
    parts = split(samples, config)
    names = None if classes is None else tuple(classes)
    kept, own = (None, None) if tokenizer is None else read_tokenizer(tokenizer)
    with evaluating(model), staged(path) as folder:
        say("tracing the model")
        free = {"axes": axes} if axes else {}
        traced = content.topology(model, **free)
        _check_described(traced, image, names)
        if timed is None:
            say(f"timing layer points on {engine.name}, {engine.threads} threads")
            timed = time_traced(model, traced, engine, config, watch)
        timings, config = timed.layers, replace(config, activations=timed.activations)
        say(f"layers take {config.activations} activations")
        say("allocating ranks and bits")
        wanted = Wanted(
            _candidates(config), config.goal.worst_drift, config.goal.size_weight,
            config.proposals, controller=config.controller,
        )  # fmt: skip
        candidates = allocate(model, parts.quantizer, state.plan.layers, timings, wanted)
        say("packing weights, observing activation ranges")

        def written(allocated: Allocated, draft: Artifact | None = None) -> Artifact:
            return content.write(
                folder, model, traced, allocated, parts.quantizer, name=name or path.stem,
                seed=config.seed, image=image, classes=names, draft=draft, tokenizer=kept,
                text=text or own, weight_only=config.activations == "float",
            )  # fmt: skip

        draft = written(candidates)
        say(f"timing {len(candidates.profiles)} candidate profiles")
        chosen, pruned = choose(candidates, draft, engine, timings, config, watch)
        checked = select(parts.quantizer, slice(0, PARITY_SAMPLES))
        while True:
            artifact = written(chosen, draft)
            say("calibrating the profiles and the proxy")
            table = calibrate(artifact, engine, config.timing, timings=timings, watch=watch)
            artifact.add_device(table)
            runtime = Runtime(artifact, config.engine, config.threads)
            say("checking each profile against torch")
            stored = stored_profiles(model, artifact, checked)
            parity = engine_parity(runtime, checked, stored)
            if all(row.ok for row in parity):
                break
            chosen, failed = _without_failed(chosen, parity)
            pruned += failed
        for other in other_engines(runtime):
            say(f"checking each profile on {other.engine.name}")
            parity += engine_parity(other, select(checked, slice(0, OTHER_SAMPLES)), stored)
        artifact.add_parity(parity)
        say(f"certifying on {len(tensors(parts.scores)[0])} samples")
        slices = Slices(arrays(parts.scaling), arrays(parts.scores))
        ledger = artifact.add_certification(_certified(model, runtime, slices, config, watch, free))
        write_card(artifact)
    return Exported(
        path, chosen.profiles, table, ledger, tuple(parity), tuple(pruned), chosen.notes,
        chosen.dropped,
    )  # fmt: skip


def _without_failed(
    chosen: Allocated, parity: Sequence[ParityEntry]
) -> tuple[Allocated, list[Pruned]]:
    """The profiles that the engine runs as torch does, and why the others are not shipped."""
    failed = [Pruned(row.profile, row.reason) for row in parity if not row.ok]
    kept = [row.profile for row in parity if row.ok]
    if not kept:
        row = next(row for row in parity if not row.ok)
        raise EngineError(f"no profile is as torch has it on {row.engine}: {row.reason}")
    return chosen.renamed({name: name for name in kept}), failed


def _certified(
    model: nn.Module,
    runtime: Runtime,
    slices: Slices,
    config: ExportConfig,
    watch: Watch,
    free: Mapping[str, Axes],
) -> Certification:
    """Certificates from the original the model remembers."""
    certificate = config.certificate
    try:
        original = beside(runtime.artifact, to_original(model, **free))
    except (DataError, ConvertError) as differs:
        frozen = state_of(model).original
        return certify(
            runtime, model_reference(frozen, state_of(model).example), None, slices,
            certificate, missing=str(differs), watch=watch,
        )  # fmt: skip
    reference = program_reference(runtime.artifact, original)
    return certify(runtime, reference, original, slices, certificate, watch=watch)


def choose(
    candidates: Allocated,
    draft: Artifact,
    engine: Engine,
    timings: Sequence[LayerTiming],
    config: ExportConfig,
    watch: Watch,
) -> tuple[Allocated, list[Pruned]]:
    """Of the candidates those worth shipping by their measured times, as many as asked for."""
    if len(candidates.profiles) == 1:
        (only,) = candidates.profiles
        return candidates.renamed({only.name: names_for(1)[0]}), []
    quick = replace(config.timing, grid=0, starts=False)
    times = calibrate(draft, engine, quick, timings=timings, watch=watch).profiles
    measured = [
        Measured(
            p.name, times[p.name].p50, *times[p.name].ci95, draft.manifest.size_bytes(p.name),
            candidates.drifts[p.name],
        )
        for p in candidates.profiles
    ]  # fmt: skip
    worth, pruned = prune(measured)
    able = [m for m in measured if m.name in worth]
    kept = fitting(able, config.budgets) if config.budgets else thin(able, config.goal.profiles)
    spare = [
        Pruned(name, f"more than {config.goal.profiles} are worth it")
        for name in worth
        if name not in kept
    ]
    names = dict(zip(kept, names_for(len(kept)), strict=True))
    told = [Pruned(p.name, _renamed(p.reason, names)) for p in (*pruned, *spare)]
    return candidates.renamed(names), told


def _candidates(config: ExportConfig) -> int:
    """How many profiles are timed for each that is shipped: budgets are met closely by more."""
    return (2 if config.budgets is None else 4) * config.goal.profiles - 1


def _renamed(reason: str, names: Mapping[str, str]) -> str:
    """A reason that names profiles as they are shipped."""
    return re.sub(r"candidate\d+", lambda found: names.get(found[0], found[0]), reason)


def split(samples: Inputs, config: ExportConfig) -> Parts:
    """A sixth for the quantizers, a sixth to scale the certificates, the rest to score them.

    Copies of one sample stay in one part, so that no two parts share any.
    """
    count, delta = len(tensors(samples)[0]), config.certificate.delta
    needed = least_samples(delta)
    least = next(n for n in itertools.count(3) if n - 2 * max(1, n // 6) >= needed)
    if count < least:
        raise DataError(
            f"{count} calibration samples are too few for delta={delta:g}: "
            f"at least {least} are needed"
        )
    sixth = max(1, count // 6)
    shares = [size / count for size in (sixth, sixth, count - 2 * sixth)]
    found = split_unique(sample_keys(arrays(samples)), shares, config.seed)
    quantizer, scaling, scores = (select(samples, torch.from_numpy(part)) for part in found)
    return Parts(quantizer, scaling, scores)


def _check_described(
    traced: Traced, image: ImageSpec | None, classes: tuple[str, ...] | None
) -> None:
    """Whether what the user says of inputs and outputs fits the model."""
    graph = traced.model.graph
    into, out = (
        [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (graph.input[0], graph.output[0])
    )
    if classes is not None and len(classes) != out[-1]:
        raise SpecError(f"{len(classes)} classes for an output of shape {tuple(out[1:])}")
    if image is not None and into[1:] != [len(image.mean), image.height, image.width]:
        raise SpecError(
            f"pictures of {len(image.mean)}x{image.height}x{image.width} for an input of shape "
            f"{tuple(into[1:])}"
        )
