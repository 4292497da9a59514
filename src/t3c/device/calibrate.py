"""Calibration: what layer points and profiles take on this device, and the proxy fitted to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated

from pydantic import Field, PositiveFloat

from t3c.artifact.devices import (
    DISTURBED,
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
from t3c.device.execution import Execution, certified_forms, example_inputs, execution_of
from t3c.device.grid import grid_row, held_out, with_grid
from t3c.device.journal import Journal
from t3c.device.machine import describe
from t3c.device.measured import Watch, runners, time_group, time_layers
from t3c.device.starts import time_start
from t3c.device.timed import Timed, timed_grid, timed_profiles, with_profiles
from t3c.engines import Engine, Session
from t3c.engines.protocol import Array
from t3c.errors import SpecError
from t3c.graph.assemble import candidate_groups
from t3c.graph.context import float_outputs
from t3c.graph.int4 import Activations
from t3c.measure.energy import Unavailable, energy_per_call, find_meter, idle_watts
from t3c.measure.latency import Blocks, level, paced, sample, summarize
from t3c.measure.memory import available
from t3c.measure.pinning import pinned
from t3c.measure.quiet import Conditions, combined, settle, watchful
from t3c.spec import Form
from t3c.version import __version__

SWEEPS = 3  # over the profiles, minutes apart
REPEATS = 2  # of these, where times differ by DISTURBED: a disturbance is often over by then
WAIT_SECONDS = 1.0  # before each
BATCH = 12  # profiles of the grid compiled at the same time where free memory is not known
COPIES, SESSION_BYTES = 4, 32 << 20  # of its weights, and besides: what a compiled profile takes
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
    run = _Run(artifact, engine, config or CalibrationConfig(), journal or Journal(None, {}), watch)
    settle(run.quiet)
    with pinned(engine.threads) if run.config.pin else nullcontext():
        table = run.table(timings)
        chain = timed_profiles(artifact, table)
        grid = timed_grid(artifact, table, chain, run.config.grid, run.config.seed)
        sweeps, lots = run.measure(chain, grid)
        table, chosen = with_profiles(table, chain, sweeps)
        named = {name: chain[key] for name, key in chosen.items()}
        drawn = {key.profile: execution for key, execution in grid.items()}
        energy, energies = run.energies(named | drawn)

    def row(key: Timed, execution: Execution) -> GridRow:
        p50 = summarize(lots[key]).p50 if lots else table.profiles[key.profile].p50
        return grid_row(artifact, execution, p50, energies.get(key.profile))

    own = [row(key, chain[key]) for key in chosen.values()]
    table = with_grid(table, [*own, *held_out([row(*item) for item in grid.items()])])
    starts = run.starts(table) if run.config.starts else {}
    mine = {name: energies[name] for name in named if name in energies}
    update = {
        "starts": starts, "conditions": run.conditions(), "energy": energy, "energy_mj": mine,
    }  # fmt: skip
    return table.model_copy(update=update)


def layer_table(
    artifact: Artifact,
    engine: Engine,
    timings: Sequence[LayerTiming],
    config: CalibrationConfig,
    watch: Watch,
) -> DeviceTable:
    """Return what forms are chosen by, layers and groups of them; no profile is timed."""
    return _Run(artifact, engine, config, Journal(None, {}), watch).table(timings)


def about(artifact: Artifact, engine: Engine, config: CalibrationConfig) -> dict[str, object]:
    """Return what a journal must be about for this calibration to resume from it."""
    how = {name: value for name, value in asdict(config).items() if name != "busy"}
    device = describe(engine).model_dump()
    return {"version": __version__, "content": artifact.content, "device": device, "config": how}


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
        """Return the conditions of all measurements, those of an earlier process included."""
        return combined(self.before, self.quiet.conditions)

    def table(self, timings: Sequence[LayerTiming] | None) -> DeviceTable:
        """Return the table of layers, as known or as measured, and of groups of them."""
        layers = self.layers() if timings is None else tuple(timings)
        content, device = self.artifact.content, self.device
        table = DeviceTable(content=content, device=device, layers=layers, profiles={})
        return table.model_copy(update={"groups": self.groups(table)})

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
        certified = certified_forms(self.artifact.ledger(), self.device)
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
        shapes = [spec.geometry for spec in specs]
        key = f"group {shapes} {ranks} {form}"
        timing = self.journal.read(key, GroupTiming)
        if timing is None:
            timing = time_group(self.engine, specs, ranks, form, self.quiet, self.activations)
            self.journal.put(key, timing.model_dump(mode="json"))
        return timing.model_copy(update={"layers": layers})

    def measure(
        self, chain: Mapping[Timed, Execution], grid: Mapping[Timed, Execution]
    ) -> tuple[dict[Timed, Blocks], dict[Timed, Blocks]]:
        """Time the chain in sweeps, and between those the chain and the grid; in blocks.

        Sweeps that were disturbed are done again, and the quietest are kept. The grid is timed all
        together, or in batches as large as memory allows, each beside the chain; a machine that is
        faster or slower in one of them is told by the chain.
        """
        keys = list(grid)
        count = max(1, math.ceil(len(keys) / self._room()))
        batches = [{key: grid[key] for key in keys[i::count]} for i in range(count)] if keys else []
        kept: list[dict[Timed, Blocks]] = []
        lots: list[dict[Timed, Blocks]] = []
        compiled: dict[Timed, Session] = {}
        for index in range(SWEEPS):
            turn = f"{index + 1} of {SWEEPS}"
            kept.append(self._sweep(f"profiles, sweep {turn}", chain, compiled))
            rounds = math.ceil(self.config.grid_rounds / SWEEPS)
            for number, batch in enumerate(batches):
                title = f"grid, sweep {turn}, batch {number + 1} of {count}"
                lots.append(self._task(title, {**chain, **batch}, rounds, compiled))
                if count > 1:
                    for key in batch:
                        compiled.pop(key, None)
        return self._quietest(_whole(kept), chain, compiled), level(lots, list(chain))

    def _sweep(
        self, title: str, chain: Mapping[Timed, Execution], compiled: dict[Timed, Session]
    ) -> dict[Timed, Blocks]:
        return self._task(title, chain, math.ceil(self.config.rounds / SWEEPS), compiled)

    def _quietest(
        self,
        sweeps: dict[Timed, Blocks],
        chain: Mapping[Timed, Execution],
        compiled: dict[Timed, Session],
    ) -> dict[Timed, Blocks]:
        """Return the sweeps, or those of as few repeats as it takes to be undisturbed."""
        for count in range(REPEATS):
            if _spread(sweeps) < DISTURBED:
                break
            self.quiet.sleep(WAIT_SECONDS)
            titles = [f"profiles again {count + 1}, sweep {i + 1}" for i in range(SWEEPS)]
            again = _whole([self._sweep(title, chain, compiled) for title in titles])
            sweeps = min(sweeps, again, key=_spread)
        return sweeps

    def _room(self) -> int:
        """How many compiled profiles of the grid fit into half of the memory that is free."""
        free = available()
        if free is None:
            return BATCH
        largest = self.artifact.manifest.size_bytes(self.artifact.manifest.chain.top.name)
        return max(1, int(free / 2 / (COPIES * largest + SESSION_BYTES)))

    def _task(
        self,
        title: str,
        executions: Mapping[Timed, Execution],
        rounds: int,
        compiled: dict[Timed, Session],
    ) -> dict[Timed, Blocks]:
        known: dict[str, Blocks] | None = self.journal.read(title, Times)
        if known is not None and known.keys() == set(map(str, executions)):
            return {key: known[str(key)] for key in executions}
        for index, (key, execution) in enumerate(executions.items()):
            self.watch(f"{title}: compiling", index, len(executions))
            if key not in compiled:
                graph = execution.graph(self.artifact, self.device.weight_bits)
                compiled[key] = self.engine.compile(graph)
        calls = runners({key: compiled[key] for key in executions}, self.inputs)
        times = sample(
            calls, paced(calls, rounds), quiet=self.quiet,
            tick=lambda done, total: self.watch(f"{title}: timing", done, total),
        )  # fmt: skip
        self.journal.put(title, {str(key): blocks for key, blocks in times.items()})
        self.journal.put("conditions", asdict(self.conditions()))
        return times

    def energies(self, executions: Mapping[str, Execution]) -> tuple[str, dict[str, float]]:
        """Return the meter's name and millijoules a call, or why there are none."""
        meter = find_meter()
        if isinstance(meter, Unavailable):
            return f"unavailable: {meter.reason}", {}
        self.watch("measuring idle power", 0, 1)
        idle = idle_watts(meter)
        found = {}
        for index, (name, execution) in enumerate(executions.items()):
            self.watch(f"measuring energy: {name}", index, len(executions))
            known = self.journal.read(f"energy {name}", float)
            if known is None:
                graph = execution.graph(self.artifact, self.device.weight_bits)
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
                execution = execution_of(self.artifact, table, profile)
                start = time_start(self.artifact, self.engine, execution, self.device.weight_bits)
                self.journal.put(f"start {profile.name}", start.model_dump(mode="json"))
            found[profile.name] = start
        return found


def _whole(sweeps: Sequence[Mapping[Timed, Blocks]]) -> dict[Timed, Blocks]:
    """Return the blocks of several sweeps, one after the other."""
    return {key: [block for sweep in sweeps for block in sweep[key]] for key in sweeps[0]}


def _spread(sweeps: Mapping[Timed, Blocks]) -> float:
    """Return the largest spread of all that was timed."""
    return max(summarize(blocks).spread for blocks in sweeps.values())
