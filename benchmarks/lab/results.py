"""One model beside everything one would use instead: a spec in YAML, and the tables it leaves.

Stages: the recipe trained once; the artifact; each baseline; then all of them measured in one
process on test data that nothing was tuned on. What is done is not done again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openvino as ov
from torch import nn

from lab import baselines
from lab.ablations import ablation_rows
from lab.appendix import artifact_tables
from lab.baselines import BASELINES, TRAINED
from lab.baselines.baseline import Task
from lab.baselines.finetune import Training
from lab.decoding import compare_text
from lab.extended import seed_rows
from lab.fingerprints import fingerprint, hashed, hashed_files, versions
from lab.subjects import SUBJECTS, Subject
from lab.sweep import sweep_rows
from lab.variants import Comparison, Row, Variant, Watch, compare
from t3c.artifact.reader import Artifact
from t3c.artifact.store import layer_bytes
from t3c.compression.stages import Stage, Stages
from t3c.device.execution import example_inputs
from t3c.device.machine import describe
from t3c.engines.openvino import OpenVINO
from t3c.engines.protocol import Array
from t3c.errors import SpecError
from t3c.evidence.int8 import bytes_on_disk
from t3c.exporter import ExportConfig, Timed
from t3c.runtime.runtime import Runtime
from t3c.zoo.recipe import Recipe
from t3c.zoo.settings import read_settings
from t3c.zoo.training import Trained, export_subject, train_recipe

ORIGINAL, ARTIFACT, MODEL = "original.onnx", "model.t3c", "model.xml"


@dataclass(frozen=True)
class Limits:
    """What is asked of `t3c-med`: its accuracy below full, its time and size against `ptq8`.

    `full` is the least accuracy of the original. Of a language model: its perplexity `over` the
    original's, as a share, its size and how many tokens it makes a second against `ptq8w`. Sizes
    of text models are without the vocabulary's table.
    """

    size: float
    drop: float | None = None
    p50: float | None = None
    full: float = 0.0
    over: float | None = None
    speed: float | None = None


@dataclass(frozen=True)
class ResultsSpec:
    """A recipe of ours, and the methods it is compared with.

    Every trained method gets the recipe's data, batches and augmentations for `minutes`, and
    `labels` times the task's loss beside the distance to the original; `options` are those of
    single methods. `calibrated` samples are what baselines are calibrated on, `rounds` how often
    each variant is timed, `ablated` how many test samples ablations are made on: none with 0, and
    none of language models.
    """

    recipe: Recipe
    methods: tuple[str, ...]
    limits: Limits
    minutes: float
    calibrated: int = 300
    labels: float = 0.0
    transformer: bool = False
    options: Mapping[str, Mapping[str, int | float]] = field(default_factory=dict)
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
        for name, least in (("calibrated", 1), ("rounds", 1), ("ablated", 0)):
            if getattr(self, name) < least:
                raise SpecError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def export(self) -> ExportConfig:
        assert self.recipe.export is not None
        return self.recipe.export


def load_results(path: Path) -> ResultsSpec:
    """The spec of a YAML file."""
    return read_settings(path, ResultsSpec)


class Results:
    """The stages of a spec, each made when it is asked for."""

    def __init__(
        self, spec: ResultsSpec, folder: Path, say: Callable[[str], object], watch: Watch
    ) -> None:
        self.spec, self.watch = spec, watch
        self.stages = Stages(folder, say)
        self.subject: Subject = SUBJECTS[spec.recipe.subject]()
        self.engine = OpenVINO(spec.export.threads or len(os.sched_getaffinity(0)))
        self.about = {
            "original": fingerprint(self.subject.model), "versions": versions(),
            "data": hashed(*self.subject.train, self.subject.calibration),
        }  # fmt: skip
        # Of this process, by seed: models that were trained, and layer times they were trained for.
        self.models: dict[int, nn.Module] = {}
        self.times: dict[int, Timed] = {}

    def trained(self, seed: int) -> Stage:
        """The recipe trained; the folder holds its run, the result its minutes of training."""
        recipe = self._recipe(seed)

        def make(folder: Path) -> Row:
            done = self._train(recipe, folder)
            self.models[seed] = done.model
            return {"minutes": done.seconds / 60, "steps": recipe.train.steps}

        made_from = self.about | {
            "recipe": repr(replace(recipe, export=None)), "device": repr(describe(self.engine)),
            "activations": self.spec.export.activations,
        }  # fmt: skip
        return self.stages.run(f"train-{seed}", made_from, make)

    def artifact(self, seed: int) -> Stage:
        """The trained model exported; the folder holds the artifact and the original."""
        run, subject = self.trained(seed), self.subject

        def make(folder: Path) -> Row:
            export_subject(
                subject, self._model(seed, run), self.spec.export, folder / ORIGINAL,
                folder / ARTIFACT, timed=self.times.get(seed),
            )  # fmt: skip
            return {name: run.result[name] for name in ("minutes", "steps")}

        made_from = {
            "run": run.key, "export": repr(self.spec.export), "device": repr(describe(self.engine)),
        }  # fmt: skip
        return self.stages.run(f"t3c-{seed}", made_from, make)

    def ablations(self, seed: int, made: Stage) -> Stage:
        """Other ways to allocate the middle profile's cost, on the first test samples."""
        test, labels = (values[: self.spec.ablated] for values in self.subject.test)

        def make(folder: Path) -> Row:
            runtime = self._runtime(made)
            profiles = list(runtime.chain)
            assert runtime.table is not None
            rows = ablation_rows(
                self._model(seed, self.trained(seed)), self.subject.calibration,
                runtime.table.layers, profiles[len(profiles) // 2],
                self.spec.export.goal.size_weight, (test, labels), watch=self.watch,
            )  # fmt: skip
            return {"rows": rows}

        made_from = {"artifact": made.key, "test": hashed(test, labels)}
        return self.stages.run("ablations", made_from, make)

    def baseline(self, name: str, task: Task) -> Stage:
        """A method carried out; the folder holds its model."""
        options = dict(self.spec.options.get(name, {}))
        recipe = self.spec.recipe
        made_from: dict[str, Any] = self.about | {
            "options": options, "code": hashed_files(Path(baselines.__file__).parent),
            "activations": task.activations, "transformer": task.transformer,
            "samples": len(task.samples), "threads": self.engine.threads,
        }  # fmt: skip
        if name in TRAINED:
            made_from |= {
                "minutes": self.spec.minutes, "labels": self.spec.labels, "batch": recipe.batch,
                "images": recipe.samples, "augmentations": recipe.train.augmentations,
                "precision": recipe.train.precision,
            }  # fmt: skip

        def make(folder: Path) -> Row:
            found = BASELINES[name](task, **options)
            ov.save_model(found.model, folder / MODEL, compress_to_fp16=False)
            return {
                "method": found.method, "size_bytes": found.size_bytes, "steps": found.steps,
                "minutes": found.seconds / 60,
            }  # fmt: skip

        return self.stages.run(name, made_from, make)

    def task(self, made: Stage) -> Task:
        """What every baseline is given; activations are as the artifact has them."""
        spec, subject = self.spec, self.subject
        images, targets = (part[: spec.recipe.samples] for part in subject.train)
        training = Training(
            subject.model, images, targets, spec.minutes, batch=spec.recipe.batch,
            labels=spec.labels, augmentations=spec.recipe.train.augmentations,
            image=subject.image, precision=spec.recipe.train.precision, padding=subject.padding,
        )  # fmt: skip
        weight_only = Artifact(made.folder / ARTIFACT).weight_only
        return Task(
            (made.folder / ORIGINAL).read_bytes(), subject.calibration[: spec.calibrated].numpy(),
            self.engine, "float" if weight_only else "int8", spec.transformer, training,
            self.watch,
        )  # fmt: skip

    def tables(self) -> dict[str, list[Row]]:
        """Everything measured side by side, and the tables of the paper's appendix F."""
        made = [self.artifact(seed) for seed in self.spec.seeds]
        task = self.task(made[0])
        others = {name: self.baseline(name, task) for name in self.spec.methods}
        ablated = self.spec.ablated and self.subject.text is None
        ablations = [self.ablations(self.spec.seeds[0], made[0])] if ablated else []

        def make(folder: Path) -> Row:
            variants = self._baselines(task, others)
            runtimes = [self._runtime(stage) for stage in made]
            compared = [
                self._compared(variants | profiles_of(runtime, stage, self.subject.vocabulary))
                for runtime, stage in zip(runtimes, made, strict=True)
            ]
            seeds = [{row["name"]: row for row in found.rows()} for found in compared]
            self.stages.say("certificates, budgets and devices")
            return {
                "results": compared[0].rows(), "seeds": seed_rows(seeds),
                "sweep": sweep_rows(runtimes[0], compared[0]),
                **artifact_tables(runtimes[0], compared[0], self._asked(runtimes[0])),
            }  # fmt: skip

        text = self.subject.text
        made_from = {
            "made": [stage.key for stage in (*made, *others.values())], "rounds": self.spec.rounds,
            "test": hashed(*self.subject.test, *([text.ids] if text else [])),
            "device": repr(describe(self.engine)),
        }  # fmt: skip
        found = self.stages.run("measured", made_from, make).result
        tables = {name: rows for name, rows in found.items() if isinstance(rows, list)}
        spent = [s.result["seconds"] for s in (*made, *others.values(), *ablations)]
        spent += [self.trained(seed).result["seconds"] for seed in self.spec.seeds]
        return tables | {
            "ablations": [row for stage in ablations for row in stage.result["rows"]],
            "spent": [{"minutes": (math.fsum(spent) + found["seconds"]) / 60}],
        }

    def _recipe(self, seed: int) -> Recipe:
        return self.spec.recipe.changed({"seed": seed})

    def _train(self, recipe: Recipe, folder: Path) -> Trained:
        """The recipe carried out for what layers take on this device."""

        return train_recipe(
            recipe, folder / "run", resume=True, test=False, validated=False,
            say=self.stages.say, watch=self.watch,
        )  # fmt: skip

    def _model(self, seed: int, run: Stage) -> nn.Module:
        """The trained model: of this process, or as the run's last checkpoint has it."""
        if seed not in self.models:
            self.models[seed] = self._train(self._recipe(seed), run.folder).model
        return self.models[seed]

    def _runtime(self, made: Stage) -> Runtime:
        return Runtime(Artifact(made.folder / ARTIFACT), "openvino", self.engine.threads)

    def _baselines(self, task: Task, made: Mapping[str, Stage]) -> dict[str, Variant]:
        """The original and every baseline, ready to answer."""
        read = self.engine.read(task.original)
        session, size = self.engine.compile_read(read), bytes_on_disk(read)
        table = self._table_bytes(read)
        found = {"full": Variant("full", "the original, fp32", session, size, table_bytes=table)}
        for name, stage in made.items():
            told = stage.result
            model = self.engine.core.read_model(stage.folder / MODEL)
            found[name] = Variant(
                name, told["method"], self.engine.compile_read(model), told["size_bytes"],
                told["minutes"], told["steps"], table_bytes=self._table_bytes(model),
            )  # fmt: skip
        return found

    def _table_bytes(self, model: ov.Model) -> int:
        """What the vocabulary's table takes in a model, with its scales; 0 where there is none."""
        rows = self.subject.vocabulary
        return 0 if rows is None else bytes_of_rows(model, rows)

    def _asked(self, runtime: Runtime) -> list[Array]:
        """Inputs (n, ...) that are asked with budgets: test samples, or a token of a text."""
        if self.subject.text is not None:
            return example_inputs(runtime.artifact)
        return [self.subject.test[0][:8].numpy()]

    def _compared(self, variants: Mapping[str, Variant]) -> Comparison:
        """Variants on the test part, timed in turns."""
        self.stages.say(f"measuring {len(variants)} variants")
        if (text := self.subject.text) is not None:
            return compare_text(
                variants, text.ids.numpy(), length=text.length, bos=text.bos,
                rounds=self.spec.rounds, watch=self.watch,
            )  # fmt: skip
        images, labels = (part.numpy() for part in self.subject.test)
        return compare(variants, (images, labels), self.spec.rounds, self.watch)


def bytes_of_rows(model: ov.Model, rows: int) -> int:
    """What the constants take that have an axis of so many rows, each counted once."""
    constants = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    return sum(node.get_byte_size() for node in constants if rows in list(node.shape))


def profiles_of(runtime: Runtime, made: Stage, vocabulary: int | None = None) -> dict[str, Variant]:
    """Every profile of an artifact, ready to answer."""
    kind = "float" if runtime.artifact.weight_only else "int8"
    tables = [
        entry
        for entry in runtime.artifact.entries.values()
        if entry.spec.out_channels == vocabulary
    ]
    found = {}
    for profile in runtime.chain:
        name, certificate = f"t3c-{profile.name}", runtime.certificates.get(profile.name)
        found[name] = Variant(
            name, f"a profile of the one artifact, activations {kind}",
            runtime.session(profile.name), runtime.artifact.manifest.size_bytes(profile.name),
            made.result["minutes"], made.result["steps"],
            certificate.epsilon if certificate else None,
            sum(layer_bytes(entry, profile.points[entry.spec.name]) for entry in tables),
        )  # fmt: skip
    return found
