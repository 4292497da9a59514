"""`t3c.export`: one call from an elastic model to a certified artifact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from t3c.artifact.card import write_card
from t3c.artifact.devices import DeviceTable
from t3c.artifact.draft import Draft
from t3c.artifact.folder import staged
from t3c.artifact.graph import Axes
from t3c.artifact.ledger import Ledger, ParityEntry
from t3c.artifact.reader import Artifact
from t3c.certify.conformal import least_samples
from t3c.certify.slices import sample_keys, split_unique
from t3c.control.menu import Dropped
from t3c.control.profiles import Measured, PruneCode, Pruned, fitting, names_for, prune, thin
from t3c.convert import state_of
from t3c.device.calibrate import calibrate, layer_table
from t3c.device.measured import Watch
from t3c.engines import Engine, open_engine
from t3c.errors import ConvertError, DataError, EngineError
from t3c.evidence.certify import Slices, certify
from t3c.evidence.drifts import arrays, model_reference, program_reference
from t3c.evidence.original import beside, to_original
from t3c.exporter import content
from t3c.exporter.allocate import Allocated, allocate
from t3c.exporter.config import ExportConfig
from t3c.exporter.described import Described
from t3c.exporter.norms import normed_by, own_norms
from t3c.exporter.parity import engine_parity, other_engines, stored_profiles
from t3c.exporter.timing import Timed, time_traced
from t3c.measure.quiet import combined
from t3c.nn.inputs import Inputs, check_finite, check_like, evaluating, gather, select, tensors
from t3c.nn.view import group_
from t3c.progress import Show, showing
from t3c.runtime.placed import disturbance
from t3c.runtime.runtime import Runtime
from t3c.runtime.tokens import read_tokenizer
from t3c.spec import ImageSpec, ProfileChain, TextSpec

PARITY_SAMPLES, OTHER_SAMPLES = 16, 4
RANGE_SAMPLES = 16  # set the ranges that candidates are timed with
PLACED_SAMPLES = 32  # those that they are judged with


# Chooses among a draft's profiles, by their table: the name of each that is to be shipped.
Place = Callable[[Draft, DeviceTable], Mapping[str, str]]


@dataclass(frozen=True)
class Exported:
    """What was written, what was measured on the way, and why other things were not shipped.

    `pruned` are candidate profiles, `dropped` levels that are on no menu, by unit; `str` of each
    is a sentence.
    """

    path: Path
    profiles: ProfileChain
    table: DeviceTable
    ledger: Ledger
    parity: tuple[ParityEntry, ...]
    pruned: tuple[Pruned, ...] = ()
    dropped: Mapping[str, tuple[Dropped, ...]] = field(default_factory=dict)


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
    ranges: Inputs | None = None,
    place: Place | None = None,
    progress: bool = True,
) -> Exported:
    """Write an elastic model as an artifact: profiles, costs, certificates, packed factors.

    `calibration` yields inputs, or (inputs, target), that the model was not trained on: one part
    sets ranges and allocates, the rest makes the certificates. An artifact that was at `path`
    stays whole until the new one is. `axes` names the axes of inputs that are free besides the
    batch, `{"input_ids": {1: "sequence"}}`; what is measured is measured at the example's sizes.
    `tokenizer` is a tokenizer.json, a folder that has one, or a fast tokenizer of Hugging Face,
    which also says what texts begin with and end at if `text` does not. `timed` are layer times
    that `time_points` measured before, with the same configuration. `ranges` are samples of their
    own for ranges and allocation: all of `calibration` then makes certificates. `place` chooses
    among the measured candidates in place of the rule by time and size. Stages are told on stderr
    unless `progress` is False. Where activations stay float, weights have grids of groups from then
    on, as the artifact has.
    """
    config, path = config or ExportConfig(), Path(path)
    parts = split(_checked(calibration, model), config, ranges)
    engine = open_engine(config.engine, config.threads)
    kept, own = (None, None) if tokenizer is None else read_tokenizer(tokenizer)
    with showing(progress) as show, evaluating(model), staged(path) as folder:
        show.say("tracing the model")
        free = {"axes": axes} if axes else {}
        described = Described(
            model, content.topology(model, **free), name or path.stem, config.seed, image,
            None if classes is None else tuple(classes), text or own, kept,
        )  # fmt: skip
        if timed is None:
            show.say(f"timing layer points on {engine.name}, {engine.threads} threads")
            timed = time_traced(model, described.traced, engine, config, show.watch)
        bench = Bench(engine, timed, config, show)
        show.say(f"layers take {timed.activations} activations")
        group_(model, timed.activations == "float")
        show.say("allocating ranks and bits")
        # More candidates than are shipped, most where budgets are to be met.
        count = (2 if config.budgets is None else 4) * config.goal.profiles - 1
        candidates = allocate(
            model, parts.quantizer, state_of(model).plan.layers, timed.layers, config.goal,
            count=count, controller=config.controller,
        )  # fmt: skip
        normed = normed_by(model, described.traced)
        norms = own_norms(model, normed, candidates.profiles, parts.quantizer, show.watch)
        show.say(
            f"own norms reduce drift for {len(norms)} of {len(candidates.profiles)} candidates"
        )
        candidates = replace(candidates, norms=norms)
        show.say("packing weights")
        described = replace(described, weight_only=timed.activations == "float")
        packed = content.pack(described, candidates)
        show.say(f"timing {len(candidates.profiles)} candidate profiles")
        chosen, pruned = _chosen(candidates, packed, parts.quantizer, bench, place)
        shipped = _shipped(folder, model, packed, chosen, parts.quantizer, bench)
        if (found := disturbance(path, shipped.table)) is not None:
            show.say(f"warning: {found}")
        show.say(f"certifying on {len(tensors(parts.scores)[0])} samples")
        ledger = _certified(model, shipped.runtime, parts, config, show.watch, free)
        write_card(shipped.runtime.artifact)
    return Exported(
        path, shipped.allocated.profiles, shipped.table, ledger, shipped.parity,
        (*pruned, *shipped.failed), shipped.allocated.dropped,
    )  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """An engine to measure on: what layers take there, how it is measured, where progress goes."""

    engine: Engine
    timed: Timed
    config: ExportConfig
    show: Show

    def calibrated(self, artifact: Artifact, *, quick: bool = False) -> DeviceTable:
        """Return the table of an artifact; a quick one has no grid and no cold starts."""
        how = self.config.timing
        how = replace(how, grid=0, starts=False) if quick else how
        table = calibrate(
            artifact, self.engine, how, timings=self.timed.layers, watch=self.show.watch
        )
        assert table.conditions is not None
        conditions = combined(self.timed.conditions, table.conditions)
        return table.model_copy(update={"conditions": conditions})


def _chosen(
    candidates: Allocated, packed: Draft, samples: Inputs, bench: Bench, place: Place | None
) -> tuple[Allocated, tuple[Pruned, ...]]:
    """Return the candidates to ship: by time and size, or as `place` has them."""
    few = RANGE_SAMPLES if place is None else PLACED_SAMPLES
    draft = content.ranged(packed, select(samples, slice(0, few)))
    if place is None:
        return choose(candidates, draft, bench)
    layers, how = bench.timed.layers, bench.config.timing
    table = layer_table(draft, bench.engine, layers, how, bench.show.watch)
    return candidates.renamed(place(draft, table)), ()


@dataclass(frozen=True)
class Shipped:
    """What was written, with its measured times, and the profiles that engines get wrong."""

    runtime: Runtime
    allocated: Allocated
    table: DeviceTable
    parity: tuple[ParityEntry, ...]
    failed: tuple[Pruned, ...]


def _shipped(
    folder: Path,
    model: nn.Module,
    packed: Draft,
    chosen: Allocated,
    samples: Inputs,
    bench: Bench,
) -> Shipped:
    """Write the chosen profiles, once unless the engine computes some of them otherwise than torch.

    Those are left out of what is then written from the same codes.
    """
    checked, failed = select(samples, slice(0, PARITY_SAMPLES)), list[Pruned]()
    say = bench.show.say
    while True:
        say("observing activation ranges, writing")
        artifact = content.write(folder, packed, chosen, samples)
        say("calibrating the profiles and the proxy")
        table = bench.calibrated(artifact)
        artifact.add_device(table)
        runtime = Runtime(artifact, bench.config.engine, bench.config.threads)
        say("checking each profile against torch")
        stored = stored_profiles(model, artifact, checked, chosen.norms)
        parity = engine_parity(runtime, checked, stored)
        if all(row.ok for row in parity):
            break
        bad = [row for row in parity if not row.ok]
        if len(bad) == len(parity):
            raise EngineError(f"no profile is as torch has it on {bad[0].engine}: {bad[0].reason}")
        chosen = chosen.renamed({row.profile: row.profile for row in parity if row.ok})
        failed += [Pruned(row.profile, PruneCode.INEXACT, detail=row.reason) for row in bad]
    for other in other_engines(runtime):
        say(f"checking each profile on {other.engine.name}")
        parity += engine_parity(other, select(checked, slice(0, OTHER_SAMPLES)), stored)
    artifact.add_parity(parity)
    return Shipped(runtime, chosen, table, tuple(parity), tuple(failed))


def _certified(
    model: nn.Module,
    runtime: Runtime,
    parts: Parts,
    config: ExportConfig,
    watch: Watch,
    free: Mapping[str, Axes],
) -> Ledger:
    """Add certificates from the original that the model remembers, and return the ledger."""
    artifact, state = runtime.artifact, state_of(model)
    original, missing = None, ""
    try:
        original = beside(artifact, to_original(model, **free))
    except (DataError, ConvertError) as differs:
        missing = str(differs)
    if original is None:
        reference = model_reference(state.original, state.example)
    else:
        reference = program_reference(artifact, original)
    slices = Slices(arrays(parts.scaling), arrays(parts.scores))
    how = config.certificate
    certified = certify(runtime, reference, original, slices, how, missing=missing, watch=watch)
    return artifact.add_certification(certified)


def choose(
    candidates: Allocated, draft: Artifact, bench: Bench
) -> tuple[Allocated, tuple[Pruned, ...]]:
    """Return the candidates worth shipping by their measured times, as many as asked for."""
    if len(candidates.profiles) == 1:
        (only,) = candidates.profiles
        return candidates.renamed({only.name: names_for(1)[0]}), ()
    config, times = bench.config, bench.calibrated(draft, quick=True).profiles
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
    names = dict(zip(kept, names_for(len(kept)), strict=True))
    pruned += [
        Pruned(name, PruneCode.SURPLUS, figures=(config.goal.profiles,))
        for name in worth
        if name not in names
    ]
    # What is told of a profile that is shipped calls it by its name there.
    told = tuple(replace(one, than=names.get(one.than, one.than)) for one in pruned)
    return candidates.renamed(names), told


def _checked(calibration: Iterable[Any], model: nn.Module) -> Inputs:
    """Return the calibration data as one batch of inputs that the model can take."""
    example, what = state_of(model).example, "the calibration data"
    samples = gather(calibration)
    check_finite(samples, what)
    check_like(samples, example, what)
    return samples


def split(samples: Inputs, config: ExportConfig, ranges: Inputs | None = None) -> Parts:
    """A sixth for the quantizers, a sixth to scale the certificates, the rest to score them.

    Copies of one sample stay in one part, so that no two parts share any. Where `ranges` are
    given, the quantizers have these, and the samples make certificates alone.
    """
    count, delta = len(tensors(samples)[0]), config.certificate.delta
    needed, parts = least_samples(delta), 1 if ranges is not None else 2
    least = next(n for n in itertools.count(3) if n - parts * max(1, n // 6) >= needed)
    if count < least:
        raise DataError(
            f"{count} calibration samples are too few for delta={delta:g}: "
            f"at least {least} are needed"
        )
    sixth = max(1, count // 6)
    shares = [size / count for size in (*[sixth] * parts, count - parts * sixth)]
    indices = split_unique(sample_keys(arrays(samples)), shares, config.seed)
    found = [select(samples, torch.from_numpy(part)) for part in indices]
    return Parts(*found) if ranges is None else Parts(ranges, *found)
