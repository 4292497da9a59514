"""One model beside everything one would use instead: a spec in YAML, and the tables it leaves.

Stages: the artifact, by `t3c.compress` with its defaults; each baseline; then all of them measured
in one process on the test set. What is done is not done again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import openvino as ov

from lab import baselines
from lab.ablations import ablation_rows, retrained
from lab.appendix import artifact_tables
from lab.baselines import BASELINES, TRAINED
from lab.baselines.baseline import Task
from lab.baselines.finetune import Training
from lab.baselines.rate import at_best_rate
from lab.decoding import compare_text
from lab.extended import seed_rows
from lab.fingerprints import fingerprint, hashed, hashed_files, versions
from lab.subjects import Subject, open_subject
from lab.sweep import sweep_rows
from lab.variants import Comparison, Row, Variant, Watch, compare
from t3c.artifact.reader import Artifact
from t3c.artifact.store import layer_bytes
from t3c.compression.data import Data
from t3c.compression.door import compress
from t3c.compression.kept import ORIGINAL, work_of
from t3c.compression.pipeline import CALIBRATION, Options
from t3c.compression.stages import RESULT, Stage, Stages
from t3c.compression.teach import BATCH, DEFAULT_BATCH
from t3c.device.execution import example_inputs
from t3c.device.machine import describe
from t3c.engines.openvino import OpenVINO
from t3c.engines.protocol import Array
from t3c.errors import SpecError
from t3c.evidence.int8 import bytes_on_disk
from t3c.nn.inputs import tensors
from t3c.runtime.runtime import Runtime
from t3c.zoo.settings import read_settings

ARTIFACT, MODEL = "model.t3c", "model.xml"
ROUNDS = 200  # how often each variant is timed
ABLATED = 2000  # test samples that ablations are made on; language models have none
ENGINE = "openvino"  # what baselines run on too


@dataclass(frozen=True)
class ResultsSpec:
    """A model, the data it is compressed with, the set it is tested on, and for how long.

    Names are those of `lab.subjects`. Every method that trains has the same `minutes`; the artifact
    is made anew with each of `seeds`. Texts have `length` tokens. How anything is done is no part
    of it: that are the defaults of `t3c.compress` and of each baseline.
    """

    model: str
    data: str
    test: str
    minutes: float
    seeds: tuple[int, ...]
    baselines: tuple[str, ...]
    length: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in self.baselines:
            if name not in BASELINES:
                raise SpecError(f"no baseline {name!r}: known are {', '.join(BASELINES)}")
        if "ptq8" not in self.baselines:
            raise SpecError("ptq8 has to be among the baselines: others are compared with it")
        if not 1 <= self.minutes < math.inf:
            raise SpecError(f"minutes must be at least 1, got {self.minutes:g}")
        if not self.seeds:
            raise SpecError("there is no seed")


def load_results(path: Path) -> ResultsSpec:
    """Read the spec of a YAML file."""
    return read_settings(path, ResultsSpec)


class Results:
    """The stages of a spec, each made when it is asked for."""

    def __init__(
        self, spec: ResultsSpec, folder: Path, say: Callable[[str], object], watch: Watch
    ) -> None:
        self.spec, self.watch = spec, watch
        self.stages = Stages(folder, say)
        self.subject: Subject = open_subject(
            spec.model, spec.data, spec.test, spec.length, watch
        )  # fmt: skip
        self.engine = OpenVINO(spec.threads or len(os.sched_getaffinity(0)))

    @cached_property
    def about(self) -> dict[str, Any]:
        """Return what every stage is made from: the model, the data, versions."""
        return {
            "original": fingerprint(self.subject.source.model), "versions": versions(),
            "data": _hashed(self.subject.data), "test": _hashed(self.subject.test),
        }  # fmt: skip

    def artifact(self, seed: int) -> Stage:
        """Compress the model; the folder holds the artifact and the work of the door."""
        spec, subject = self.spec, self.subject

        def make(folder: Path) -> Row:
            out = folder / ARTIFACT
            shutil.rmtree(out, ignore_errors=True)  # of a run stopped before its table was read
            compress(
                subject.fresh(), subject.data, out, test=subject.test,
                example=subject.source.example, minutes=spec.minutes, length=spec.length,
                engine=ENGINE, threads=spec.threads, seed=seed,
            )  # fmt: skip
            return spent(work_of(out))

        made_from = self.about | {
            "minutes": spec.minutes, "seed": seed, "length": spec.length, "threads": spec.threads,
            "device": repr(describe(self.engine)),
        }  # fmt: skip
        return self.stages.run(f"t3c-{seed}", made_from, make)

    def ablations(self, seed: int, made: Stage) -> Stage:
        """Allocate the middle profile's cost in other ways, judged on the first test samples."""
        spec, subject = self.spec, self.subject
        test = subject.test.at(slice(0, ABLATED))

        def make(folder: Path) -> Row:
            runtime = self._runtime(made)
            profiles = list(runtime.chain)
            assert runtime.table is not None
            options = Options(spec.minutes, None, spec.length, ENGINE, spec.threads, seed)
            model = retrained(subject, options, Stages(work_of(made.folder / ARTIFACT)))
            rows = ablation_rows(
                model, subject.parts.certificate.inputs, runtime.table.layers,
                profiles[len(profiles) // 2], test, watch=self.watch,
            )  # fmt: skip
            return {"rows": rows}

        return self.stages.run("ablations", {"artifact": made.key, "test": _hashed(test)}, make)

    def baseline(self, name: str, task: Task) -> Stage:
        """Carry out a method; the folder holds its model."""
        made_from: dict[str, Any] = self.about | {
            "code": hashed_files(Path(baselines.__file__).parent), "activations": task.activations,
            "threads": self.engine.threads,
        }  # fmt: skip
        if name in TRAINED:
            made_from["minutes"] = self.spec.minutes

        def make(folder: Path) -> Row:
            made = at_best_rate(name, task) if name in TRAINED else BASELINES[name](task)
            ov.save_model(made.model, folder / MODEL, compress_to_fp16=False)
            return {
                "method": made.method, "size_bytes": made.size_bytes, "steps": made.steps,
                "minutes": made.seconds / 60,
            }  # fmt: skip

        return self.stages.run(name, made_from, make)

    def task(self, made: Stage) -> Task:
        """Return what every baseline is given; activations are as the artifact has them."""
        subject = self.subject
        source, train = subject.source, subject.parts.train
        training = Training(
            source.model, train.inputs, self.spec.minutes,
            batch=BATCH.get(source.task, DEFAULT_BATCH), precision="auto",
        )  # fmt: skip
        out = made.folder / ARTIFACT
        return Task(
            (work_of(out) / ORIGINAL).read_bytes(), train.at(slice(0, CALIBRATION)).inputs,
            self.engine, "float" if Artifact(out).weight_only else "int8", source.reads_text,
            training, self.watch,
        )  # fmt: skip

    def tables(self) -> dict[str, list[Row]]:
        """Measure everything side by side, and make the tables of the paper's appendix F."""
        made = [self.artifact(seed) for seed in self.spec.seeds]
        task = self.task(made[0])
        others = {name: self.baseline(name, task) for name in self.spec.baselines}
        ablated = self.subject.text is None
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

        made_from = {
            "made": [stage.key for stage in (*made, *others.values())],
            "device": repr(describe(self.engine)),
        }  # fmt: skip
        found = self.stages.run("measured", made_from, make).result
        tables = {name: rows for name, rows in found.items() if isinstance(rows, list)}
        seconds = [s.result["seconds"] for s in (*made, *others.values(), *ablations)]
        return tables | {
            "ablations": [row for stage in ablations for row in stage.result["rows"]],
            "spent": [{"minutes": (math.fsum(seconds) + found["seconds"]) / 60}],
        }

    def _runtime(self, made: Stage) -> Runtime:
        return Runtime(Artifact(made.folder / ARTIFACT), ENGINE, self.engine.threads)

    def _baselines(self, task: Task, made: Mapping[str, Stage]) -> dict[str, Variant]:
        """Return the original and every baseline, ready to answer."""
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
        """Return what the vocabulary's table takes in a model, with its scales; 0 without one."""
        rows = self.subject.vocabulary
        return 0 if rows is None else bytes_of_rows(model, rows)

    def _asked(self, runtime: Runtime) -> list[Array]:
        """Return inputs (n, ...) asked with budgets: test samples, or a token of a text."""
        if self.subject.text is not None:
            return example_inputs(runtime.artifact)
        return self.subject.test.at(slice(0, 8)).arrays()

    def _compared(self, variants: Mapping[str, Variant]) -> Comparison:
        """Compare variants on the test set, timed in turns."""
        self.stages.say(f"measuring {len(variants)} variants")
        if (text := self.subject.text) is not None:
            return compare_text(
                variants, text.ids, length=text.length, bos=text.bos, rounds=ROUNDS,
                watch=self.watch,
            )  # fmt: skip
        test = self.subject.test
        if test.labels is None:
            raise SpecError(f"{self.spec.test} has no labels: accuracy is what is compared")
        return compare(variants, test.arrays(), test.labels.numpy(), ROUNDS, self.watch)


def spent(work: Path) -> Row:
    """Return the minutes that all stages of a compression took, and its steps of training."""
    stages = {path.parent.name: json.loads(path.read_text()) for path in work.glob(f"*/{RESULT}")}
    steps = [found["steps"] for name, found in stages.items() if name.startswith("probe-")]
    return {
        "minutes": math.fsum(found["seconds"] for found in stages.values()) / 60,
        "steps": sum(steps),
    }


def bytes_of_rows(model: ov.Model, rows: int) -> int:
    """Return what the constants take that have an axis of so many rows, each counted once."""
    constants = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    return sum(node.get_byte_size() for node in constants if rows in list(node.shape))


def profiles_of(runtime: Runtime, made: Stage, vocabulary: int | None = None) -> dict[str, Variant]:
    """Return every profile of an artifact, ready to answer."""
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


def _hashed(data: Data) -> str:
    labels = [] if data.labels is None else [data.labels]
    return hashed(*tensors(data.inputs), *labels)
