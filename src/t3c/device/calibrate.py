"""Calibration: what layer points and profiles take on this device, and the proxy fitted to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Annotated

from pydantic import Field, PositiveFloat

from t3c.artifact.devices import (
    AS_FAST,
    DeviceTable,
    GridRow,
    Group,
    GroupTiming,
    LayerTiming,
    Start,
    choose_forms,
)
from t3c.artifact.reader import Artifact
from t3c.cost.proxy import solver
from t3c.device.grid import grid_row, held_out, mixtures, widest_ranges, with_grid, work_of
from t3c.device.journal import Journal
from t3c.device.measured import (
    Subject,
    Watch,
    describe,
    example_inputs,
    runners,
    time_group,
    time_layers,
)
from t3c.device.starts import time_start
from t3c.engines import Engine, Session
from t3c.engines.protocol import Array
from t3c.errors import CorruptError, SpecError
from t3c.graph.assemble import candidate_groups
from t3c.graph.context import float_outputs
from t3c.graph.int4 import Activations
from t3c.measure.energy import Unavailable, energy_per_call, find_meter, idle_watts
from t3c.measure.latency import Blocks, level, paced, sample, summarize
from t3c.measure.memory import available
from t3c.measure.pinning import pinned
from t3c.measure.quiet import Conditions, combined, settle, watchful
from t3c.spec import Form, Profile
from t3c.version import __version__

SWEEPS = 3  # over the profiles, minutes apart
BATCH = 12  # profiles of the grid compiled at the same time where free memory is not known
COPIES, SESSION_BYTES = 4, 32 << 20  # of its weights, and besides: what a compiled profile takes
STILL_AS_FAST = 1.1  # AS_FAST, where the intervals do not tell the two apart
CERTIFIED = " as certified"
# What a journal has to hold for times to be taken from it.
Some = Annotated[list[PositiveFloat], Field(min_length=1)]
Times = dict[str, Annotated[list[Some], Field(min_length=1)]]


@dataclass(frozen=True)
class CalibrationConfig:
    """How much to measure.

    `rounds` times each profile of the artifact is timed, `grid_rounds` each of `grid` others: all
    of them mixtures of the artifact's profiles, layer by layer, a third held out of the fit. Short
    calls are timed more often, so that each lot takes some seconds.
    `pin` keeps an engine of fewer threads than cores on as many cores; `busy` measures a machine
    that other processes use, instead of refusing to; `starts` times cold starts too.
    """

    rounds: int = 120
    grid: int = 30
    grid_rounds: int = 45
    seed: int = 3407
    pin: bool = True
    busy: bool = False
    starts: bool = True

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.grid_rounds < 1 or self.grid < 0:
            raise SpecError(f"rounds must be positive and the grid not negative, got {self}")


def calibrate(
    artifact: Artifact,
    engine: Engine,
    config: CalibrationConfig | None = None,
    *,
    timings: Sequence[LayerTiming] | None = None,
    journal: Journal | None = None,
    watch: Watch = lambda what, done, total: None,
) -> DeviceTable:
    """Measure an artifact on a device: layers, groups of layers, profiles and mixtures of them.

    `timings` of the layers, where they are known already, are not measured again. What `journal`
    holds is not either, and what is measured goes into it.
    """
    solver()  # nothing is measured that cannot be fitted
    run = _Run(artifact, engine, config or CalibrationConfig(), journal or _journal(), watch)
    settle(run.quiet)
    with pinned(engine.threads) if run.config.pin else nullcontext():
        layers = run.layers() if timings is None else tuple(timings)
        table = DeviceTable(content=artifact.content, device=run.device, layers=layers, profiles={})
        table = table.model_copy(update={"groups": run.groups(table)})
        chain, grid = run.subjects(table)
        sweeps, lots = run.measure(chain, grid)
        table = _with_profiles(table, chain, sweeps)
        named = {p.name: subject_of(artifact, table, p) for p in artifact.manifest.chain}
        energy, energies = run.energies(named | grid)

    def row(name: str, subject: Subject) -> GridRow:
        kept = name if subject.forms == chain.get(name, subject).forms else name + CERTIFIED
        p50 = summarize(lots[kept]).p50 if lots else table.profiles[name].p50
        return grid_row(artifact, subject, p50, energies.get(name))

    own = [row(name, subject) for name, subject in named.items()]
    table = with_grid(table, [*own, *held_out([row(*item) for item in grid.items()])])
    starts = run.starts(table) if run.config.starts else {}
    mine = {name: energies[name] for name in named if name in energies}
    update = {
        "starts": starts, "conditions": run.conditions(), "energy": energy, "energy_mj": mine,
    }  # fmt: skip
    return table.model_copy(update=update)


def about(artifact: Artifact, engine: Engine, config: CalibrationConfig) -> dict[str, object]:
    """What a journal has to be about for this calibration to go on from it."""
    how = {name: value for name, value in asdict(config).items() if name != "busy"}
    device = describe(engine).model_dump()
    return {"version": __version__, "content": artifact.content, "device": device, "config": how}


def subject_of(artifact: Artifact, table: DeviceTable, profile: Profile) -> Subject:
    """A profile of the artifact as the table has it executed."""
    specs = artifact.manifest.specs
    forms = table.forms.get(profile.name) or choose_forms(table.layers, specs, profile.points)
    possible = {name: specs[name].forms(point) for name, point in profile.points.items()}
    if forms.keys() != possible.keys() or any(f not in possible[n] for n, f in forms.items()):
        raise CorruptError(
            f"the table of {table.device.title} runs profile {profile.name!r} in forms its layers "
            "do not have: calibrate again"
        )
    grouped = table.grouped(profile.points, forms)
    return Subject(profile, forms, artifact.ranges(profile.name), grouped)


class _Run:
    """One calibration: what its steps share."""

    def __init__(
        self,
        artifact: Artifact,
        engine: Engine,
        config: CalibrationConfig,
        journal: Journal,
        watch: Watch,
    ) -> None:
        self.artifact, self.engine, self.config = artifact, engine, config
        self.journal, self.watch = journal, watch
        self.device = describe(engine)
        self.quiet = watchful(config.busy)
        self.inputs: list[Array] = example_inputs(artifact)
        self.specs = artifact.manifest.specs
        self.activations: Activations = "float" if artifact.weight_only else "int8"
        self.before = journal.read("conditions", Conditions)

    def conditions(self) -> Conditions:
        """What all of it was measured under, also what an earlier process measured."""
        return combined(self.before, self.quiet.conditions)

    def layers(self) -> tuple[LayerTiming, ...]:
        """Every layer at the ranks profiles run it at, in each form."""
        chain = self.artifact.manifest.chain
        ranks = [
            (spec, tuple(sorted({profile.points[name].rank for profile in chain})))
            for name, spec in self.specs.items()
        ]
        kept = {
            key.removeprefix("layer "): self.journal.read(key, list[LayerTiming])
            for key in self.journal.results
            if key.startswith("layer ")
        }
        known = {key: timings for key, timings in kept.items() if timings}

        def keep(key: str, timings: list[LayerTiming]) -> None:
            self.journal.put(f"layer {key}", [t.model_dump(mode="json") for t in timings])

        to_float = float_outputs(self.artifact.graph().graph, self.specs)
        return time_layers(
            self.engine, ranks, to_float, activations=self.activations, quiet=self.quiet,
            watch=self.watch, known=known, keep=keep,
        )  # fmt: skip

    def groups(self, table: DeviceTable) -> tuple[GroupTiming, ...]:
        """Layers that read one input, together and apart, at the points of the profiles."""
        found: dict[tuple[Group, tuple[int, ...], Form], GroupTiming] = {}
        wanted = candidate_groups(self.artifact.graph().graph, self.artifact.entries)
        profiles = list(self.artifact.manifest.chain)
        certified = _certified_forms(self.artifact, table)
        for index, profile in enumerate(profiles):
            chosen = choose_forms(table.layers, self.specs, profile.points)
            for forms, layers in product((chosen, certified.get(profile.name, chosen)), wanted):
                self.watch("timing grouped products", index, len(profiles))
                ranks = tuple(profile.points[name].rank for name in layers)
                key = (layers, ranks, forms[layers[0]])
                if key not in found and len({forms[name] for name in layers}) == 1:
                    found[key] = self._group(*key)
        return tuple(found.values())

    def _group(self, layers: tuple[str, ...], ranks: tuple[int, ...], form: Form) -> GroupTiming:
        specs = [self.specs[name] for name in layers]
        shapes = [replace(spec, name="") for spec in specs]
        key = f"group {shapes} {ranks} {form}"
        timing = self.journal.read(key, GroupTiming)
        if timing is None:
            timing = time_group(self.engine, specs, ranks, form, self.quiet, self.activations)
            self.journal.put(key, timing.model_dump(mode="json"))
        return timing.model_copy(update={"layers": layers})

    def subjects(self, table: DeviceTable) -> tuple[dict[str, Subject], dict[str, Subject]]:
        """What is timed: the artifact's profiles, and the grid."""
        chain: dict[str, Subject] = {}
        certified = _certified_forms(self.artifact, table)
        for profile in self.artifact.manifest.chain:
            mine = subject_of(self.artifact, table, profile)
            chain[profile.name] = mine
            forms = certified.get(profile.name)
            if forms is not None and forms != mine.forms:
                grouped = table.grouped(profile.points, forms)
                other = Subject(profile, forms, mine.ranges, grouped)
                chain[profile.name + CERTIFIED] = other
        ranges = widest_ranges(self.artifact)
        grid = {}
        # Profiles that differ in bits alone, or in ranks that run dense, are the same work.
        seen = {work_of(self.artifact, subject).tobytes() for subject in chain.values()}
        for profile in mixtures(self.artifact, self.config.grid, self.config.seed):
            forms = choose_forms(table.layers, self.specs, profile.points)
            grouped = table.grouped(profile.points, forms)
            subject = Subject(profile, forms, ranges, grouped)
            work = work_of(self.artifact, subject).tobytes()
            if work not in seen:
                seen.add(work)
                grid[profile.name] = subject
        return chain, grid

    def measure(
        self, chain: Mapping[str, Subject], grid: Mapping[str, Subject]
    ) -> tuple[dict[str, Blocks], dict[str, Blocks]]:
        """Times in blocks: of the chain in sweeps, and between those of the chain and the grid.

        The grid is timed all together, or in batches as large as memory allows, each beside the
        chain; a machine that is faster or slower in one of them is told by the chain.
        """
        names = list(grid)
        count = max(1, math.ceil(len(names) / self._room()))
        batches = [{n: grid[n] for n in names[i::count]} for i in range(count)] if names else []
        sweeps: dict[str, Blocks] = {}
        lots: list[dict[str, Blocks]] = []
        compiled: dict[str, Session] = {}
        for index in range(SWEEPS):
            turn = f"{index + 1} of {SWEEPS}"
            rounds = math.ceil(self.config.rounds / SWEEPS)
            times = self._task(f"profiles, sweep {turn}", chain, rounds, compiled)
            for name, blocks in times.items():
                sweeps.setdefault(name, []).extend(blocks)
            rounds = math.ceil(self.config.grid_rounds / SWEEPS)
            for number, batch in enumerate(batches):
                title = f"grid, sweep {turn}, batch {number + 1} of {count}"
                lots.append(self._task(title, {**chain, **batch}, rounds, compiled))
                if count > 1:
                    for name in batch:
                        compiled.pop(name, None)
        return sweeps, level(lots, list(chain))

    def _room(self) -> int:
        """How many compiled profiles of the grid fit into half of the memory that is free."""
        free = available()
        if free is None:
            return BATCH
        largest = self.artifact.manifest.size_bytes(self.artifact.manifest.chain.top.name)
        return max(1, int(free / 2 / (COPIES * largest + SESSION_BYTES)))

    def _task(
        self, title: str, subjects: Mapping[str, Subject], rounds: int, compiled: dict[str, Session]
    ) -> dict[str, Blocks]:
        known: dict[str, Blocks] | None = self.journal.read(title, Times)
        if known is not None and known.keys() == subjects.keys():
            return known
        for index, (name, subject) in enumerate(subjects.items()):
            self.watch(f"{title}: compiling", index, len(subjects))
            if name not in compiled:
                graph = subject.graph(self.artifact, self.device.weight_bits)
                compiled[name] = self.engine.compile(graph)
        calls = runners({name: compiled[name] for name in subjects}, self.inputs)
        times = sample(
            calls, paced(calls, rounds), quiet=self.quiet,
            tick=lambda done, total: self.watch(f"{title}: timing", done, total),
        )  # fmt: skip
        self.journal.put(title, times)
        self.journal.put("conditions", asdict(self.conditions()))
        return times

    def energies(self, subjects: Mapping[str, Subject]) -> tuple[str, dict[str, float]]:
        """What is read energies by, and millijoules a call; or why they are not to be had."""
        meter = find_meter()
        if isinstance(meter, Unavailable):
            return f"unavailable: {meter.reason}", {}
        self.watch("measuring idle power", 0, 1)
        idle = idle_watts(meter)
        found = {}
        for index, (name, subject) in enumerate(subjects.items()):
            self.watch(f"measuring energy: {name}", index, len(subjects))
            known = self.journal.read(f"energy {name}", float)
            if known is None:
                graph = subject.graph(self.artifact, self.device.weight_bits)
                call = runners({name: self.engine.compile(graph)}, self.inputs)[name]
                known = energy_per_call(meter, call, idle)
                self.journal.put(f"energy {name}", known)
            found[name] = known
        return meter.name, found

    def starts(self, table: DeviceTable) -> dict[str, Start]:
        """Cold starts and memory of the artifact's profiles."""
        found = {}
        chain = list(self.artifact.manifest.chain)
        for index, profile in enumerate(chain):
            self.watch(f"cold start: {profile.name}", index, len(chain))
            start = self.journal.read(f"start {profile.name}", Start)
            if start is None:
                subject = subject_of(self.artifact, table, profile)
                start = time_start(self.artifact, self.engine, subject, self.device.weight_bits)
                self.journal.put(f"start {profile.name}", start.model_dump(mode="json"))
            found[profile.name] = start
        return found


def _journal() -> Journal:
    return Journal(None, {})


def _with_profiles(
    table: DeviceTable, chain: Mapping[str, Subject], blocks: Mapping[str, Blocks]
) -> DeviceTable:
    """The table with each profile's times, in the certified forms where those are as fast."""
    profiles, forms = {}, {}
    for name, subject in chain.items():
        if name.endswith(CERTIFIED):
            continue
        mine, chosen = summarize(blocks[name]), subject
        if name + CERTIFIED in chain:
            other = summarize(blocks[name + CERTIFIED])
            overlap = other.ci95[0] <= mine.ci95[1]
            if other.p50 <= mine.p50 * (STILL_AS_FAST if overlap else AS_FAST):
                mine, chosen = other, chain[name + CERTIFIED]
        profiles[name], forms[name] = mine, dict(chosen.forms)
    return table.model_copy(update={"profiles": profiles, "forms": forms})


def _certified_forms(artifact: Artifact, table: DeviceTable) -> dict[str, dict[str, Form]]:
    """Forms of this engine's that certificates of the artifact are for, by profile."""
    ledger, device = artifact.ledger(), table.device
    for certification in ledger.on(device.engine) if ledger else ():
        if certification.weight_bits == device.weight_bits:
            return dict(certification.forms)
    return {}
