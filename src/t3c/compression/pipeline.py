"""The stages of a compression in order, each kept in the work folder and made once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from t3c.artifact.devices import LayerTiming
from t3c.compression.choice import Choice, best, choices_of
from t3c.compression.compare import Placing, plain_int8
from t3c.compression.data import Data, Parts
from t3c.compression.elastic import (
    STATISTICS,
    choose_kernels,
    keep_elastic,
    make_elastic,
    restore_elastic,
)
from t3c.compression.judging import judge_of, view_losses
from t3c.compression.kept import ORIGINAL
from t3c.compression.measure import ARTIFACT, judge_profiles
from t3c.compression.place import TINY_TIMES
from t3c.compression.plan import RunPlan
from t3c.compression.source import Source, Task
from t3c.compression.stages import Stage, Stages
from t3c.compression.teach import Lesson, Plan, probe, teach
from t3c.convert import state_of
from t3c.convert.state import STATE
from t3c.device.calibrate import CalibrationConfig
from t3c.engines import Engine, open_engine
from t3c.engines.openvino import OpenVINO
from t3c.evidence.certify import CertifyConfig
from t3c.evidence.drifts import model_reference
from t3c.evidence.estimates import EstimateConfig
from t3c.evidence.int8 import Int8, keep_int8, kept_int8
from t3c.evidence.original import write_original
from t3c.evidence.quality import Scorer
from t3c.evidence.served import Run, run_of
from t3c.exporter import ExportConfig, Timed, export, time_points
from t3c.exporter.allocate import measured_shares
from t3c.measure.quiet import Conditions
from t3c.nn.inputs import Inputs
from t3c.progress import Show
from t3c.spec import Goal, TextSpec
from t3c.train.targets import Path as Route
from t3c.train.targets import find_path

KEPT, INT8 = "elastic.safetensors", "int8.xml"
CANDIDATES = 6  # profiles asked of the exporter; it measures twice as many to choose from
SIZE_WEIGHT = 0.2  # of bytes against time: profiles are placed by time, size is a by-product
AIMS = (0.1, 0.15, 0.22, 0.32, 0.5, 0.8)  # first-order drifts that the smallest profile may have
AIMED = 64  # samples that they are judged on
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
            "max_drop": self.options.max_drop,
        }  # fmt: skip

    @property
    def axes(self) -> dict[str, dict[int, str]] | None:
        """Return the axes that are free besides the batch: a decoder's length."""
        return {"input_ids": {1: "sequence"}} if self.source.task is Task.LANGUAGE else None

    def run(self) -> Stage:
        """Carry out all stages; those that are done are read."""
        converted = self._convert()
        timed, timing = self._time(converted)
        self._int8(converted, timed)
        trained = self._train(timed, timing)
        return self._export(trained, timed)

    def _convert(self) -> Stage:
        """Make the model elastic; its weights are in the stage's folder."""
        source, batches = self.source, self._statistics()

        def make(folder: Path) -> Mapping[str, Any]:
            kernels, choice = choose_kernels(source.model, source.example, batches, self.engine)
            smooth = _linears(source.model)
            make_elastic(
                source.model, source.example, batches, kernels, smooth=smooth, watch=self.show.watch
            )
            keep_elastic(source.model, folder / KEPT)
            chosen = [] if choice is None else [choice.model_dump()]
            return {
                "kernels": {n: str(k) for n, k in kernels.items()},
                "smooth": smooth,
                "choices": chosen,
            }

        stage = self.stages.run("convert", self.made_from, make)
        self.choices += choices_of(stage.result)
        if STATE not in source.model.__dict__:  # the stage was done before
            make_elastic(
                source.model, source.example, batches[:1],
                stage.result["kernels"], smooth=stage.result["smooth"],
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
                "conditions": None if timed.conditions is None else asdict(timed.conditions),
            }

        stage = self.stages.run("time", {"of": converted.key}, make)
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
                self.engine, folder / ORIGINAL, samples, transformer=self.source.reads_text,
                weight_only=timed.activations == "float",
            )  # fmt: skip
            return {"int8": keep_int8(made, folder / INT8)}

        stage = self.stages.run("int8", {"of": converted.key, "on": timed.activations}, make)
        self.original = stage.folder / ORIGINAL
        if stage.result["int8"] is not None:
            self.plain = kept_int8(stage.folder / INT8, **stage.result["int8"])

    def _train(self, timed: Timed, timing: Stage) -> Stage:
        """Aim at the profiles that will be shipped, probe, train, keep what validates better."""
        model, parts = self.source.model, self.parts
        held = max(8, min(128, len(parts.train) // 10))
        training = (parts.train.at(slice(held, None)), parts.train.at(slice(held)))
        shares = measured_shares(state_of(model).plan.layers, timed.layers)
        path = find_path(model, training[1].inputs, SIZE_WEIGHT, shares)

        def lesson(worst_drift: float) -> Lesson:
            goal = _goal(worst_drift)
            seed, task = self.options.seed, self.source.task
            return Lesson(model, *training, task, goal, path.targets(goal), seed)

        def aim(folder: Path) -> Mapping[str, Any]:
            choice = self._aim(training[1], path)
            worst = float(choice.taken)
            seconds = self.plan.left(time.monotonic() - self.plan.started)
            found = probe(lesson(worst), seconds, self.show.watch)
            return {
                "worst_drift": worst,
                "steps": found.steps,
                "learning_rate": found.learning_rate,
                "choices": [choice.model_dump(), found.choice.model_dump()],
            }

        aimed = self.stages.run("probe", {"of": timing.key}, aim)
        self.choices += choices_of(aimed.result)
        worst = aimed.result["worst_drift"]
        planned = Plan(
            aimed.result["steps"], aimed.result["learning_rate"], choices_of(aimed.result)[-1]
        )

        def make(folder: Path) -> Mapping[str, Any]:
            if not planned.steps:
                return {"choices": [], "trained": False}
            choice = teach(lesson(worst), planned, folder / "run")
            keep_elastic(model, folder / KEPT)
            return {"choices": [choice.model_dump()], "trained": True}

        stage = self.stages.run("train", {"of": aimed.key, "plan": repr(planned)}, make)
        self.choices += choices_of(stage.result)
        if stage.result["trained"]:
            restore_elastic(model, stage.folder / KEPT)
        return Stage(stage.folder, stage.key, {**stage.result, "goal": worst})

    def _aim(self, validation: Data, path: Route) -> Choice:
        """Return the drift that the smallest profile may have: where it loses what tiny may."""
        validation = validation.at(slice(0, AIMED))
        judge = judge_of(self.source, validation, self.options.max_drop)
        wanted = 2 * TINY_TIMES * judge.limit  # training and rounding move it; placement decides
        smallest = [path.profile(path.within(worst), "tiny") for worst in AIMS]
        losses = view_losses(self.source.model, smallest, validation, judge)
        before, tried = next(losses).mean(), dict[str, float]()
        for place, worst in enumerate(AIMS):
            self.show.watch(f"judging drifts up to {worst:g}", place, len(AIMS))
            lost = float(next(losses).mean() - before)
            tried[f"{worst:g}"] = abs(lost - wanted)
            if lost > wanted:
                break
        return best(
            "drift that the smallest profile may have", tried, "off the loss aimed at",
            f"{wanted:.3g}",
        )  # fmt: skip

    def _export(self, trained: Stage, timed: Timed) -> Stage:
        """Pack, place by quality beside plain int8, certify; the folder holds the artifact."""
        source, parts, model = self.source, self.parts, self.source.model

        def make(folder: Path) -> Mapping[str, Any]:
            judge = judge_of(source, parts.placement, self.options.max_drop)
            scorer = Scorer.of(judge, parts.placement.arrays(), self.answered())
            placing = Placing(self.engine, scorer, self.plain, self.show.watch)
            pictures = source.pictures
            export(
                model, folder / ARTIFACT, [parts.certificate.inputs],
                self._export_config(_goal(trained.result["goal"])),
                name=source.name, image=None if pictures is None else pictures.image,
                classes=source.classes, axes=self.axes, tokenizer=source.tokenizer,
                text=_text(source), timed=timed, ranges=parts.ranges.inputs, place=placing,
            )  # fmt: skip
            judge_profiles(self, folder)
            assert placing.placed is not None
            rows = [
                {"candidate": r.candidate, "p50": r.p50, "size": r.size, "drop": r.drop,
                 "upper": r.upper, "fate": str(r.fate), "profile": r.profile}
                for r in placing.placed.rows
            ]  # fmt: skip
            return {"candidates": rows}

        return self.stages.run("export", {"of": trained.key}, make)

    def answered(self) -> Run:
        """Return the original as a function of arrays, in float on the engine where that can."""
        if isinstance(self.engine, OpenVINO):
            read = self.engine.read(self.original.read_bytes())
            return run_of(self.engine.compile_read(read))
        return model_reference(state_of(self.source.model).original, self.source.example)

    def _statistics(self) -> list[Inputs]:
        part = self.parts.train.at(slice(0, STATISTICS))
        return [batch[0] if isinstance(batch, tuple) else batch for batch in part.batches(32)]

    def _export_config(self, goal: Goal) -> ExportConfig:
        return ExportConfig(
            engine=self.options.engine, threads=self.options.threads, goal=goal,
            activations="auto", seed=self.options.seed,
            timing=CalibrationConfig(
                rounds=45, grid=6, grid_rounds=15, busy=True, starts=False
            ),
            certificate=CertifyConfig(estimates=EstimateConfig(samples=2, path_samples=0)),
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
