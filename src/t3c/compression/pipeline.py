"""The stages of a compression in order, each kept in the work folder and made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn

from t3c.artifact.devices import DeviceTable, LayerTiming
from t3c.artifact.reader import Artifact
from t3c.compression.choice import Choice, best, choices_of
from t3c.compression.compare import Placing, plain_int8
from t3c.compression.data import Parts
from t3c.compression.elastic import (
    POSITIONS,
    STATISTICS,
    choose_kernels,
    keep_elastic,
    make_elastic,
    restore_elastic,
    smooth_inputs,
)
from t3c.compression.improve import KEPT, goal_of, round_weights, train_once
from t3c.compression.judging import judge_of
from t3c.compression.kept import ORIGINAL
from t3c.compression.measure import ARTIFACT, judge_profiles
from t3c.compression.plan import RunPlan
from t3c.compression.record import fingerprint, hashed
from t3c.compression.source import Source, Task
from t3c.compression.stages import Stage, Stages
from t3c.compression.widths import choose_widths, kept_units, known_units
from t3c.convert import Units, state_of
from t3c.convert.state import STATE
from t3c.convert.width import find_orders, reorder_
from t3c.device.calibrate import CalibrationConfig
from t3c.engines import Engine, open_engine
from t3c.engines.openvino import OpenVINO
from t3c.evidence.certify import CertifyConfig
from t3c.evidence.drifts import model_reference
from t3c.evidence.estimates import EstimateConfig
from t3c.evidence.int8 import Int8, keep_int8, kept_int8
from t3c.evidence.original import as_handed_over, write_original
from t3c.evidence.quality import Scorer
from t3c.evidence.served import Run, run_of
from t3c.exporter import ExportConfig, Timed, export, time_points
from t3c.measure.quiet import Conditions
from t3c.nn.inputs import Inputs, batches_of
from t3c.nn.units import UnitGroup
from t3c.nn.view import group_
from t3c.progress import Show
from t3c.spec import Factorization, Goal, TextSpec

INT8 = "int8.xml"
CALIBRATION = 300  # samples that plain int8 is calibrated on, as NNCF does by default


@dataclass(frozen=True)
class Options:
    """The settings of a compression besides model and data."""

    minutes: float
    max_drop: float | None
    length: int | None
    engine: str
    threads: int | None
    seed: int


@dataclass
class Compression:
    """One run: the stages in order, each kept under what it was made from."""

    source: Source
    parts: Parts
    options: Options
    stages: Stages
    show: Show
    plan: RunPlan
    choices: list[Choice] = field(default_factory=list)
    decided: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    original: Path = Path(ORIGINAL)
    plain: Int8 | None = None

    @cached_property
    def engine(self) -> Engine:
        return open_engine(self.options.engine, self.options.threads)

    @cached_property
    def made_from(self) -> dict[str, Any]:
        """Return what tells runs apart: the model, the data, what was asked."""
        return {
            "model": fingerprint(self.source.model), "seed": self.options.seed,
            "data": {name: hashed(getattr(self.parts, name)) for name in self.parts.sizes()},
            "length": self.options.length, "engine": self.options.engine,
            "threads": self.options.threads, "minutes": self.options.minutes,
            "max_drop": self.options.max_drop, "recorded": self.stages.recorded,
        }  # fmt: skip

    @property
    def axes(self) -> dict[str, dict[int, str]] | None:
        """Return the axes that are free besides the batch: a decoder's length."""
        return {"input_ids": {1: "sequence"}} if self.source.task is Task.LANGUAGE else None

    def run(self) -> Stage:
        """Carry out all stages; those that are done are read."""
        trained, timed = self.train()
        return self._export(trained, timed)

    def train(self) -> tuple[Stage, Timed]:
        """Carry out the stages up to training: the source's model is elastic and trained then."""
        converted = self._convert()
        timed, timing = self._time(converted)
        self._int8(converted, timed)
        # Rounding and training see the grids that the artifact will have.
        group_(self.source.model, timed.activations == "float")
        return train_once(self, timed, round_weights(self, timing)), timed

    def _convert(self) -> Stage:
        """Make the model elastic; its weights are in the stage's folder."""
        source, batches = self.source, self.statistics()

        def choose(folder: Path) -> Mapping[str, Any]:
            ways, choice = choose_kernels(source.model, source.example, batches, self.engine)
            chosen = [] if choice is None else [choice.model_dump()]
            return {"kernels": {name: str(way) for name, way in ways.items()}, "choices": chosen}

        decided = self.decide("choose", self.made_from, choose)
        kernels, smoothed = decided.result["kernels"], list[Choice]()
        if _smoothable(source):  # also of a model whose stages are done: as before it is elastic
            smoothed = [smooth_inputs(source.model, self.deployed())]
        widths, narrowed = self._widths(decided, batches)

        def make(folder: Path) -> Mapping[str, Any]:
            chosen = make_elastic(
                source.model, source.example, batches, kernels, widths, self.show.watch
            )
            keep_elastic(source.model, folder / KEPT)
            return {"choices": [choice.model_dump() for choice in (*smoothed, *chosen)]}

        stage = self.stages.run("convert", {"of": narrowed.key, "by": kernels}, make)
        self.choices += choices_of(stage.result)
        if STATE not in source.model.__dict__:  # the stage was done before
            make_elastic(source.model, source.example, batches[:1], kernels, widths)
            restore_elastic(source.model, stage.folder / KEPT)
        return stage

    def _widths(self, decided: Stage, batches: list[Inputs]) -> tuple[tuple[UnitGroup, ...], Stage]:
        """Put units of channels in order, and choose those that layers are narrowed by.

        A decoder's layers are not: they are bound by reading weights, which bits make fewer.
        """
        source = self.source

        def order(folder: Path) -> Mapping[str, Any]:
            if source.task is Task.LANGUAGE:
                return kept_units(Units((), {}))
            return kept_units(find_orders(source.model, source.example, batches))

        ordered = self.stages.run("order", {"of": decided.key}, order)
        units = known_units(ordered.result)
        reorder_(source.model, units)

        def choose(folder: Path) -> Mapping[str, Any]:
            taken, choice = choose_widths(
                source.model, source.example, batches, units.groups,
                {n: Factorization(k) for n, k in decided.result["kernels"].items()}, self.engine,
            )  # fmt: skip
            chosen = [] if choice is None else [choice.model_dump()]
            return {"units": [group.name for group in taken], "choices": chosen}

        narrowed = self.decide("widths", {"of": ordered.key}, choose)
        names = set(narrowed.result["units"])
        return tuple(group for group in units.groups if group.name in names), narrowed

    def _time(self, converted: Stage) -> tuple[Timed, Stage]:
        """Time layer points in the whole network, and find where tiny has to start."""

        def make(folder: Path) -> Mapping[str, Any]:
            timed = time_points(
                self.source.model, self._export_config(Goal()), axes=self.axes,
                watch=self.show.watch,
            )  # fmt: skip
            return {
                "layers": [t.model_dump(mode="json") for t in timed.layers],
                "activations": timed.activations,
                "choices": [best("activations", timed.tried, "ms at full rank").model_dump()],
                "conditions": None if timed.conditions is None else asdict(timed.conditions),
            }

        stage = self.decide("time", {"of": converted.key}, make)
        layers = tuple(LayerTiming.model_validate(one) for one in stage.result["layers"])
        known = stage.result["conditions"]
        conditions = None if known is None else Conditions(**known)
        return Timed(layers, stage.result["activations"], conditions), stage

    def _int8(self, converted: Stage, timed: Timed) -> None:
        """Write the original in ONNX, and make plain int8 of it to compare with."""

        def make(folder: Path) -> Mapping[str, Any]:
            write_original(self.source.model, folder / ORIGINAL, axes=self.axes)
            if not isinstance(self.engine, OpenVINO):
                return {"int8": None}
            samples = self.parts.train.at(slice(0, CALIBRATION)).arrays()
            made = plain_int8(
                self.engine, as_handed_over(self.source.model, self.axes).SerializeToString(),
                samples, transformer=self.source.reads_text,
                weight_only=timed.activations == "float",
            )  # fmt: skip
            return {"int8": keep_int8(made, folder / INT8)}

        stage = self.stages.run("int8", {"of": converted.key, "on": timed.activations}, make)
        self.original = stage.folder / ORIGINAL
        if stage.result["int8"] is not None:
            self.plain = kept_int8(stage.folder / INT8, **stage.result["int8"])

    def _export(self, trained: Stage, timed: Timed) -> Stage:
        """Pack, place by quality beside plain int8, certify; the folder holds the artifact."""
        source, parts, model = self.source, self.parts, self.source.model

        def make(folder: Path) -> Mapping[str, Any]:
            placed: dict[str, Any] = {}

            def place(draft: Artifact, table: DeviceTable) -> Mapping[str, str]:
                judge = partial(self._place, draft, table)
                placed.update(self.decide("place", {"of": trained.key}, judge).result)
                profiles: Mapping[str, str] = placed["profiles"]
                return profiles

            export(
                model, folder / ARTIFACT, [parts.certificate.inputs],
                self._export_config(goal_of(trained.result["goal"])),
                name=source.name, image=source.image,
                classes=source.classes, axes=self.axes, tokenizer=source.tokenizer,
                text=_text(source), timed=timed, ranges=parts.ranges.inputs, place=place,
            )  # fmt: skip
            judge_profiles(self, folder)
            return {"placed": placed}

        stage = self.stages.run("export", {"of": trained.key}, make)
        self.decided["place"] = stage.result["placed"]
        return stage

    def _place(self, draft: Artifact, table: DeviceTable, folder: Path) -> Mapping[str, Any]:
        """Choose the profiles among the candidates of a draft, beside plain int8."""
        judge = judge_of(self.source, self.parts.placement, self.options.max_drop)
        scorer = Scorer.of(judge, self.parts.placement.arrays(), self.answered())
        placed = Placing(self.engine, scorer, self.plain, self.show.watch).place(draft, table)
        rows = [
            {"candidate": r.candidate, "p50": r.p50, "size": r.size, "drop": r.drop,
             "upper": r.upper, "fate": str(r.fate), "profile": r.profile}
            for r in placed.rows
        ]  # fmt: skip
        return {"profiles": {name: given for given, name in placed.profiles}, "candidates": rows}

    def decide(
        self, name: str, made_from: Mapping[str, Any], make: Callable[[Path], Mapping[str, Any]]
    ) -> Stage:
        """Return a stage that measures; its choices are told, and its result goes on record."""
        stage = self.stages.decide(name, made_from, make)
        self.choices += choices_of(stage.result)
        self.decided[name] = stage.result
        return stage

    def answered(self) -> Run:
        """Return the original as a function of arrays, in float on the engine where that can."""
        if isinstance(self.engine, OpenVINO):
            read = self.engine.read(self.original.read_bytes())
            return run_of(self.engine.compile_read(read))
        return model_reference(state_of(self.source.model).original, self.source.example)

    def deployed(self) -> list[Inputs]:
        """Return training samples as an engine reads them, with all of their padding: one grid of
        8 bits holds what padding leads to as well."""
        first = self.parts.train.at(slice(0, STATISTICS)).inputs
        return list(batches_of(first, 32))

    def statistics(self) -> list[Inputs]:
        """Return the training samples that factors are fitted to, in batches."""
        return self.parts.train.statistics(STATISTICS, POSITIONS, 32)

    def _export_config(self, goal: Goal) -> ExportConfig:
        return ExportConfig(
            engine=self.options.engine, threads=self.options.threads, goal=goal,
            activations="auto", seed=self.options.seed,
            timing=CalibrationConfig(
                rounds=45, grid=6, grid_rounds=15, busy=True, starts=False
            ),
            certificate=CertifyConfig(estimates=EstimateConfig(samples=2, path_samples=0)),
        )  # fmt: skip


def _smoothable(source: Source) -> bool:
    """Return whether smoothing has something to smooth: linear layers behind others.

    A decoder reads its weights for one token at a time: its activations stay float, and smoothing
    them would cost time for nothing.
    """
    linear = sum(type(module) is nn.Linear for module in source.model.modules())
    return linear > 1 and source.task is not Task.LANGUAGE


def _text(source: Source) -> TextSpec | None:
    if source.task is not Task.LANGUAGE:
        return None
    stop = source.tokenizer.eos_token_id
    return TextSpec(source.tokenizer.bos_token_id, () if stop is None else (stop,))
