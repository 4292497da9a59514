"""The stages of a compression in order, each kept in the work folder and made once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from t3c.artifact.devices import LayerTiming
from t3c.compression.choice import Choice, best, choices_of
from t3c.compression.compare import Placing, PlainInt8, plain_int8
from t3c.compression.data import Data, Parts
from t3c.compression.elastic import (
    STATISTICS,
    choose_factorization,
    keep_elastic,
    make_elastic,
    restore_elastic,
)
from t3c.compression.judging import judge_of, run_original, view_losses
from t3c.compression.measure import ARTIFACT, ORIGINAL
from t3c.compression.place import TINY_TIMES, Row
from t3c.compression.plan import RunPlan, training_seconds
from t3c.compression.source import Source, Task
from t3c.compression.stages import Stage, Stages
from t3c.compression.teach import Lesson, Plan, probe, teach
from t3c.control.options import Shares
from t3c.convert import state_of
from t3c.convert.state import STATE
from t3c.device.calibrate import CalibrationConfig
from t3c.engines import Engine, open_engine
from t3c.evidence.certify import CertifyConfig
from t3c.evidence.estimates import EstimateConfig
from t3c.evidence.original import to_original, write_original
from t3c.evidence.quality import Run, Scorer
from t3c.exporter import ExportConfig, Timed, export, time_points
from t3c.exporter.allocate import measured_shares
from t3c.nn.inputs import Inputs
from t3c.report.progress import Show
from t3c.spec import Factorization, Goal, TextSpec
from t3c.train.targets import find_path

KEPT = "elastic.safetensors"
CANDIDATES = 8  # profiles asked of the exporter; it measures twice as many to choose from
SIZE_WEIGHT = 0.2  # of bytes against time: profiles are placed by time, size is a by-product
AIMS = (0.1, 0.15, 0.22, 0.32, 0.5, 0.8)  # first-order drifts that the smallest profile may have
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
    rows: tuple[Row, ...] = ()

    calibrated: int = CALIBRATION

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
            "max_drop": self.options.max_drop,
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
        return self._train(converted, timed, timing), timed

    def _convert(self) -> Stage:
        """Make the model elastic; its weights are in the stage's folder."""
        source, batches = self.source, self._statistics()

        def make(folder: Path) -> Mapping[str, Any]:
            way, choice = choose_factorization(source.model, source.example, batches, self.engine)
            smooth = _linears(source.model)
            make_elastic(
                source.model, source.example, batches, way, smooth=smooth, watch=self.show.watch
            )
            keep_elastic(source.model, folder / KEPT)
            chosen = [] if choice is None else [choice.model_dump()]
            return {"convolution": str(way), "smooth": smooth, "choices": chosen}

        stage = self.stages.run("convert", self.made_from, make)
        self.choices += choices_of(stage.result)
        if STATE not in source.model.__dict__:  # the stage was done before
            make_elastic(
                source.model, source.example, batches[:1],
                Factorization(stage.result["convolution"]), smooth=stage.result["smooth"],
            )  # fmt: skip
            restore_elastic(source.model, stage.folder / KEPT)
        return stage

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
            }

        stage = self.stages.run("time", {"of": converted.key}, make)
        layers = tuple(LayerTiming.model_validate(one) for one in stage.result["layers"])
        return Timed(layers, stage.result["activations"]), stage

    def _train(self, converted: Stage, timed: Timed, timing: Stage) -> Stage:
        """Aim at the profiles that will be shipped, probe, train, keep what validates better."""
        model, parts = self.source.model, self.parts
        shares = measured_shares(state_of(model).plan.layers, timed.layers)
        held = max(8, min(128, len(parts.train) // 10))
        training = (parts.train.at(slice(held, None)), parts.train.at(slice(held)))

        def lesson(goal: Goal) -> Lesson:
            return Lesson(model, *training, self.source.task, goal, shares, self.options.seed)

        def aim(folder: Path) -> Mapping[str, Any]:
            goal, choice = self._aim(training[1], shares)
            found = probe(lesson(goal), training_seconds(self.plan), self.show.watch)
            return {
                "worst_drift": goal.worst_drift,
                "steps": found.steps,
                "learning_rate": found.learning_rate,
                "choices": [choice.model_dump(), found.choice.model_dump()],
            }

        aimed = self.stages.run("probe", {"of": timing.key}, aim)
        self.choices += choices_of(aimed.result)
        goal = _goal(aimed.result["worst_drift"])
        planned = Plan(
            aimed.result["steps"], aimed.result["learning_rate"], choices_of(aimed.result)[-1]
        )

        def make(folder: Path) -> Mapping[str, Any]:
            if not planned.steps:
                return {"choices": [], "trained": False}
            choice = teach(lesson(goal), planned, folder / "run", self.show.watch)
            keep_elastic(model, folder / KEPT)
            return {"choices": [choice.model_dump()], "trained": True}

        stage = self.stages.run("train", {"of": aimed.key, "plan": repr(planned)}, make)
        self.choices += choices_of(stage.result)
        if stage.result["trained"]:
            restore_elastic(model, stage.folder / KEPT)
        return Stage(stage.folder, stage.key, {**stage.result, "goal": aimed.result["worst_drift"]})

    def _aim(self, validation: Data, shares: Shares) -> tuple[Goal, Choice]:
        """Return the drift that the smallest profile may have: where it loses what tiny may."""
        model = self.source.model
        judge = judge_of(self.source, validation, self.options.max_drop)
        before = view_losses(model, None, validation, judge).mean()
        wanted = 2 * TINY_TIMES * judge.limit  # training and rounding move it; placement decides
        tried: dict[str, float] = {}
        path = find_path(model, validation.inputs, SIZE_WEIGHT, shares)
        for place, worst in enumerate(AIMS):
            smallest = path.profile(path.within(worst), "tiny")
            self.show.watch(f"judging drifts up to {worst:g}", place, len(AIMS))
            lost = float(view_losses(model, smallest, validation, judge).mean() - before)
            tried[f"{worst:g}"] = abs(lost - wanted)
            if lost > wanted:
                break
        choice = best(
            "drift that the smallest profile may have", tried, "off the loss aimed at",
            f"{wanted:.3g}",
        )  # fmt: skip
        return _goal(float(choice.taken)), choice

    def _export(self, trained: Stage, timed: Timed) -> Stage:
        """Pack, place by quality beside plain int8, certify; the folder holds the artifact."""
        source, parts, model = self.source, self.parts, self.source.model

        def make(folder: Path) -> Mapping[str, Any]:
            weight_only = timed.activations == "float"
            self.show.say("making plain int8 to compare with")
            plain = self._plain(weight_only)
            judge = judge_of(source, parts.placement, self.options.max_drop)
            scorer = Scorer.of(judge, parts.placement.arrays(), self._original())
            placing = Placing(self.engine, scorer, plain, self.show.watch)
            write_original(model, folder / ORIGINAL, axes=self.axes)
            pictures = source.pictures
            export(
                model, folder / ARTIFACT, [parts.certificate.inputs],
                self._export_config(_goal(trained.result["goal"])),
                name=source.name, image=None if pictures is None else pictures.image,
                classes=source.classes, axes=self.axes, tokenizer=source.tokenizer,
                text=_text(source), timed=timed, ranges=parts.ranges.inputs, place=placing,
                say=self.show.say, watch=self.show.watch,
            )  # fmt: skip
            assert placing.placed is not None
            rows = [
                {"candidate": r.candidate, "p50": r.p50, "size": r.size, "drop": r.drop,
                 "upper": r.upper, "fate": str(r.fate), "profile": r.profile}
                for r in placing.placed.rows
            ]  # fmt: skip
            return {"candidates": rows}

        return self.stages.run("export", {"of": trained.key}, make)

    def _plain(self, weight_only: bool) -> PlainInt8 | None:
        samples = self.parts.train.at(slice(0, CALIBRATION)).arrays()
        return plain_int8(
            self.engine, to_original(self.source.model, self.axes), samples,
            transformer=self.source.reads_text, weight_only=weight_only,
        )  # fmt: skip

    def _original(self) -> Run:
        return run_original(state_of(self.source.model).original, self.source.example)

    def _statistics(self) -> list[Inputs]:
        part = self.parts.train.at(slice(0, STATISTICS))
        return [batch[0] if isinstance(batch, tuple) else batch for batch in part.batches(32)]

    def _export_config(self, goal: Goal) -> ExportConfig:
        return ExportConfig(
            engine=self.options.engine, threads=self.options.threads, goal=goal,
            activations="auto", in_place=True, seed=self.options.seed,
            timing=CalibrationConfig(
                rounds=60, grid=9, grid_rounds=20, busy=True, starts=False
            ),
            certificate=CertifyConfig(
                worst_samples=0, monitor=False, estimates=EstimateConfig(samples=4, path_samples=0)
            ),
        )  # fmt: skip


def _goal(worst_drift: float) -> Goal:
    return Goal(profiles=CANDIDATES, worst_drift=worst_drift, size_weight=SIZE_WEIGHT)


def _linears(model: nn.Module) -> bool:
    """Return whether smoothing has something to smooth: linear layers behind others."""
    return sum(type(module) is nn.Linear for module in model.modules()) > 1


def _text(source: Source) -> TextSpec | None:
    if source.task is not Task.LANGUAGE:
        return None
    stop = source.tokenizer.eos_token_id
    return TextSpec(source.tokenizer.bos_token_id, () if stop is None else (stop,))


def fingerprint(model: nn.Module) -> str:
    """Return a hash of a model's weights and of what it is made of."""
    found = hashlib.sha256(repr(model).encode())
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def hashed(data: Data) -> str:
    """Return a hash of samples and labels."""
    found = hashlib.sha256("".join(data.keys()).encode())
    if data.labels is not None:
        found.update(data.labels.numpy().tobytes())
    return found.hexdigest()
