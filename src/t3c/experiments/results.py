"""One model beside everything one would use instead: a spec in YAML, and the tables it leaves.

Stages: the artifact, trained once and exported; each baseline; then all of them measured in one
process on test data that nothing was tuned on. What is done is not done again.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openvino as ov
from torch import nn

from t3c.artifact.reader import Artifact
from t3c.baselines import BASELINES, TRAINED
from t3c.baselines.baseline import Task, bytes_on_disk
from t3c.baselines.finetune import Training
from t3c.errors import SpecError
from t3c.evidence.original import write_original
from t3c.experiments.ablations import ablation_rows
from t3c.experiments.diagnostics import audit_rows, device_rows, energy_rows, violation_rows
from t3c.experiments.extended import (
    allocation_blocks,
    allocation_rows,
    certificate_rows,
    drift_rows,
    proxy_rows,
    seed_rows,
)
from t3c.experiments.recipe import Recipe
from t3c.experiments.settings import read_settings
from t3c.experiments.stages import Stage, Stages
from t3c.experiments.training import train_recipe
from t3c.experiments.variants import Compared, Row, Variant, Watch, compare
from t3c.exporter import ExportConfig, export
from t3c.runtime.engines.openvino import OpenVINO
from t3c.runtime.runtime import Runtime
from t3c.zoo.subjects import SUBJECTS, Subject

ORIGINAL, ARTIFACT, MODEL = "original.onnx", "model.t3c", "model.xml"


@dataclass(frozen=True)
class Limits:
    """What is asked of `t3c-med`: its accuracy below full, its time and size against `ptq8`.

    `full` is the least accuracy of the original.
    """

    drop: float
    p50: float
    size: float
    full: float = 0.0


@dataclass(frozen=True)
class ResultsSpec:
    """A recipe of ours, and the methods it is compared with.

    Every trained method gets the recipe's data, batches and augmentations for `minutes`, and
    `labels` times the task's loss beside the distance to the original; `options` are those of
    single methods. `calibrated` samples are what baselines are calibrated on, `rounds` how often
    each variant is timed, `ablated` how many test samples ablations are made on.
    """

    recipe: Recipe
    methods: tuple[str, ...]
    limits: Limits
    minutes: float
    calibrated: int = 300
    labels: float = 0.0
    transformer: bool = False
    options: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    rounds: int = 200
    ablated: int = 2000
    seeds: tuple[int, ...] = (3407,)

    def __post_init__(self) -> None:
        for name in (*self.methods, *self.options):
            if name not in BASELINES:
                raise SpecError(f"no method {name!r}: known are {', '.join(BASELINES)}")
        if "ptq8" not in self.methods:
            raise SpecError("ptq8 has to be among the methods: others are compared with it")
        if not 0 < self.minutes < math.inf:
            raise SpecError(f"minutes must be positive, got {self.minutes:g}")
        if self.recipe.export is None:
            raise SpecError("the recipe has no export: add `export: {}` to it")
        if not self.seeds:
            raise SpecError("there is no seed")
        for name in ("calibrated", "rounds", "ablated"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def export(self) -> ExportConfig:
        assert self.recipe.export is not None
        return self.recipe.export


def load_results(path: Path) -> ResultsSpec:
    """The spec of a YAML file."""
    return read_settings(path, ResultsSpec)


class Results:
    """The stages of a spec, each made when it is asked for."""

    def __init__(self, spec: ResultsSpec, folder: Path, say: Callable[[str], object], watch: Watch):
        self.spec, self.watch = spec, watch
        self.stages = Stages(folder, say)
        self.subject: Subject = SUBJECTS[spec.recipe.subject]()
        self.weights = fingerprint(self.subject.model)
        self.engine = OpenVINO(spec.export.threads or len(os.sched_getaffinity(0)))

    def artifact(self, seed: int) -> Stage:
        """Train the recipe once and export it; the folder holds the artifact and the original."""
        recipe = self.spec.recipe.changed({"seed": seed})

        def make(folder: Path) -> Row:
            started = time.perf_counter()
            done = train_recipe(
                recipe, folder / "run", resume=True, test=False, say=self.stages.say,
                watch=self.watch,
            )  # fmt: skip
            trained = time.perf_counter() - started
            write_original(done.model, folder / ORIGINAL)
            subject = done.subject
            exported = export(
                done.model, folder / ARTIFACT, [subject.calibration], self.spec.export,
                name=subject.name, image=subject.image, classes=subject.classes,
                say=self.stages.say, watch=self.watch,
            )  # fmt: skip
            middle = exported.profiles.profiles[len(exported.profiles) // 2]
            part = tuple(values[: self.spec.ablated] for values in subject.test)
            rows = ablation_rows(
                done.model, subject.calibration, exported.table.layers, middle,
                self.spec.export.size_weight, (part[0], part[1]), watch=self.watch,
            )  # fmt: skip
            return {"minutes": trained / 60, "steps": recipe.train.steps, "ablations": rows}

        made_from = {
            "recipe": repr(recipe), "weights": self.weights, "ablated": self.spec.ablated,
        }  # fmt: skip
        return self.stages.run(f"t3c-{seed}", made_from, make)

    def baseline(self, name: str, task: Task) -> Stage:
        """A method carried out; the folder holds its model."""
        options = dict(self.spec.options.get(name, {}))
        made_from: dict[str, Any] = {
            "options": options, "weights": self.weights, "calibrated": self.spec.calibrated,
            "activations": task.activations, "transformer": task.transformer,
            "threads": self.engine.threads,
        }  # fmt: skip
        if name in TRAINED:
            recipe = self.spec.recipe
            made_from |= {
                "minutes": self.spec.minutes, "labels": self.spec.labels, "batch": recipe.batch,
                "samples": recipe.samples, "augmentations": recipe.train.augmentations,
            }  # fmt: skip

        def make(folder: Path) -> Row:
            found = BASELINES[name](task, **options)
            ov.save_model(found.model, folder / MODEL, compress_to_fp16=False)
            return {
                "method": found.method, "size_bytes": found.size_bytes, "steps": found.steps,
                "minutes": found.seconds / 60,
            }  # fmt: skip

        return self.stages.run(name, made_from, make)

    def task(self, stage: Stage) -> Task:
        """What every baseline is given; activations are as the artifact has them."""
        original = (stage.folder / ORIGINAL).read_bytes()
        artifact = Artifact(stage.folder / ARTIFACT)
        spec, subject = self.spec, self.subject
        images, targets = (part[: spec.recipe.samples] for part in subject.train)
        training = Training(
            subject.model, images, targets, spec.minutes, batch=spec.recipe.batch,
            labels=spec.labels, augmentations=spec.recipe.train.augmentations,
            image=subject.image,
        )  # fmt: skip
        return Task(
            original, subject.calibration[: spec.calibrated].numpy(), self.engine,
            "float" if artifact.weight_only else "int8", spec.transformer, training, self.watch,
        )  # fmt: skip

    def variants(self, stage: Stage) -> tuple[Runtime, dict[str, Variant]]:
        """The original, every baseline and every profile, ready to answer."""
        task = self.task(stage)
        read = self.engine.read(task.original)
        found = {
            "full": Variant(
                "full", "the original, fp32", self.engine.compile_read(read), bytes_on_disk(read)
            )
        }
        for name in self.spec.methods:
            made = self.baseline(name, task)
            model = self.engine.core.read_model(made.folder / MODEL)
            told = made.result
            found[name] = Variant(
                name, told["method"], self.engine.compile_read(model), told["size_bytes"],
                told["minutes"], told["steps"],
            )  # fmt: skip
        return self._with_profiles(stage, found)

    def _with_profiles(
        self, stage: Stage, found: dict[str, Variant]
    ) -> tuple[Runtime, dict[str, Variant]]:
        runtime = Runtime(Artifact(stage.folder / ARTIFACT), "openvino", self.spec.export.threads)
        for profile in runtime.chain:
            certificate = runtime.certificates.get(profile.name)
            found[f"t3c-{profile.name}"] = Variant(
                f"t3c-{profile.name}", "a profile of the one artifact",
                runtime.session(profile.name),
                runtime.artifact.manifest.size_bytes(profile.name), stage.result["minutes"],
                stage.result["steps"], certificate.epsilon if certificate else None,
            )  # fmt: skip
        return runtime, found

    def tables(self) -> dict[str, list[Row]]:
        """Everything measured side by side, and the tables of the paper's appendix F."""
        first, *others = (self.artifact(seed) for seed in self.spec.seeds)
        runtime, variants = self.variants(first)
        compared = self.compared(variants)
        seeds = [compared.rows()]
        for stage in others:
            kept = {name: variants[name] for name in ("full", "ptq8")}
            seeds.append(self.compared(self._with_profiles(stage, kept)[1]).rows())
        return {
            "results": seeds[0],
            "ablations": first.result["ablations"],
            "seeds": seed_rows([{row["name"]: row for row in rows} for rows in seeds]),
            **self._extended(runtime, compared),
        }

    def compared(self, variants: Mapping[str, Variant]) -> Compared:
        """Variants on the test part, timed in turns."""
        self.stages.say(f"measuring {len(variants)} variants")
        images, labels = (part.numpy() for part in self.subject.test)
        return compare(variants, (images, labels), self.spec.rounds, self.watch)

    def _extended(self, runtime: Runtime, compared: Compared) -> dict[str, list[Row]]:
        """What concerns the artifact alone."""
        self.stages.say("certificates, budgets and devices")
        names = [profile.name for profile in runtime.chain]
        drifts = {name: compared.drifts(f"t3c-{name}") for name in names}
        right = {name: compared.right(f"t3c-{name}") for name in names}
        live = {name: compared.times[f"t3c-{name}"] for name in names}
        samples = self.subject.test[0][:8].numpy()
        energy, why = energy_rows(runtime, samples[:1])
        if why:
            self.stages.say(f"no energy: {why}")
        table = runtime.table
        proxies = {runtime.device.title: table} if table is not None and table.grid else {}
        return {
            "certificates": certificate_rows(runtime, drifts),
            "drifts": drift_rows(runtime, drifts),
            "allocation": allocation_rows(runtime.artifact, runtime.forms),
            "allocation_blocks": allocation_blocks(runtime.artifact, runtime.forms),
            "violations": violation_rows(runtime, samples),
            "audit": audit_rows(runtime, right, live=live),
            "devices": device_rows(runtime.artifact),
            "proxies": proxy_rows(proxies) if proxies else [],
            "energy": energy or [{"reason": why}],
        }


def fingerprint(model: nn.Module) -> str:
    """A hash of all weights and buffers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
