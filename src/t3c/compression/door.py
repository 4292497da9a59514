"""`t3c.compress`: from a trained model and data to the best artifact of it, in one call."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from t3c.artifact.folder import staged
from t3c.artifact.reader import Artifact
from t3c.compression.choice import Choice
from t3c.compression.data import Data, Rows, gathered, split
from t3c.compression.kept import work_of
from t3c.compression.measure import ARTIFACT, beyond_int8, measure, write_beside
from t3c.compression.pipeline import Compression, Options
from t3c.compression.plan import plan_run
from t3c.compression.reading import read_data
from t3c.compression.record import read_record, refuse_other
from t3c.compression.source import open_source
from t3c.compression.stages import Stages
from t3c.engines import check_engine
from t3c.errors import ArtifactError, SpecError
from t3c.evidence.bench import Result, Variant
from t3c.files import locked, writing
from t3c.measure.memory import keep_freed
from t3c.nn.inputs import Inputs, select
from t3c.progress import showing
from t3c.silence import silenced

CHATTY = ("transformers", "huggingface_hub", "torch", "torchao", "nncf", "openvino")  # loggers


@dataclass(frozen=True)
class Compressed:
    """The outcome of a compression: the artifact, the table on test samples, every choice."""

    path: Path
    result: Result
    choices: tuple[Choice, ...]
    seconds: float

    def __str__(self) -> str:
        plain = next((v for v in self.result.variants if v.name.startswith("ptq8")), None)
        told = [
            _line(variant, plain)
            for variant in self.result.variants
            if variant.name in ("full", "ptq8", "ptq8w", "t3c-tiny", "t3c-med", "t3c-max")
        ]
        megabytes = Artifact(self.path).size_on_disk() / 1e6
        told[0] += f"; {self.path}: {megabytes:.1f} MB for all profiles"
        return "\n".join(told)


def _line(variant: Variant, plain: Variant | None) -> str:
    quality = "" if variant.quality is None else f"{variant.metric} {variant.quality:.4g}"
    p50 = variant.latency_ms.p50
    beside = "" if plain is None else f" ({p50 / plain.latency_ms.p50:.2f} of int8)"
    size = variant.size_bytes / 1e6
    return f"{variant.name:9} {quality:18} {p50:.3f} ms{beside}, {size:.2f} MB"


def compress(
    model: str | Path | nn.Module,
    data: Any,
    out: str | Path,
    *,
    test: Any = None,
    example: Any = None,
    minutes: float = 30.0,
    max_drop: float | None = None,
    length: int | None = None,
    engine: str = "openvino",
    threads: int | None = None,
    seed: int = 3407,
    fresh: bool = False,
    replay: str | Path | None = None,
    progress: bool = True,
) -> Compressed:
    """Make the best artifact of a trained model: convert, train once, measure, certify, pack.

    `model` is a Hugging Face folder or hub name, `file.py:function` that returns a module and an
    example, or a module. `data` is a folder of images, a CSV, TSV or JSONL of texts, a text file,
    an .npz with x and y, or batches; `test` is a set of its own to judge on, else a fifth of the
    data. `minutes` is the whole run. `max_drop` is what the profile `med` may lose; by default
    0.005 of accuracy, or what suits the task. Texts have `length` tokens. Work is kept in
    `OUT.work`: the same call goes on where it was stopped, `fresh` starts anew. `replay` is the
    `record.json` of a finished run: what it measured decides again, and the content is the same.

    >>> made = t3c.compress("resnet-50/", "images/", "resnet.t3c", minutes=60)  # doctest: +SKIP
    >>> print(made)  # doctest: +SKIP
    """
    started = time.monotonic()
    keep_freed()
    out = Path(out)
    _check_asked(out, minutes, max_drop, length)
    check_engine(engine)
    work = work_of(out)
    record = None if replay is None else read_record(Path(replay))
    with writing(out, ArtifactError):
        out.parent.mkdir(parents=True, exist_ok=True)
    with showing(progress) as show, silenced(*CHATTY), locked(work, error=ArtifactError):
        if fresh:
            shutil.rmtree(work, ignore_errors=True)
        show.say(f"loading {model if isinstance(model, str | Path) else type(model).__name__}")
        given = data if isinstance(data, str | Path) else gathered(data)
        source = open_source(model, _example_of(given) if example is None else example)
        for note in source.notes:
            show.say(f"{source.name}: {note}")
        show.say("reading data")
        samples = read_data(source, given, length=length, watch=show.watch)
        held = None if test is None else read_data(source, test, length=length, watch=show.watch)
        parts = split(samples, held)
        source = source.like(select(parts.train.inputs, slice(0, 2)))
        plan = plan_run(source, parts, minutes, started)
        for line in plan.lines():
            show.say(line)
        options = Options(minutes, max_drop, length, engine, threads, seed)
        recorded = {} if record is None else record.decided.model_dump(mode="json")
        run = Compression(source, parts, options, Stages(work, show.say, recorded), show, plan)
        if record is not None:
            refuse_other(Path(str(replay)), record, run.made_from)
        with writing(work, ArtifactError):
            work.mkdir(parents=True, exist_ok=True)
        exported = run.run()
        measured = run.stages.run(
            "measure", {"of": exported.key}, lambda folder: measure(run, exported.folder)
        )
        result = Result.model_validate(measured.result["result"])
        result = result.model_copy(update={"artifact": str(out)})
        with writing(work, ArtifactError):
            write_beside(run, exported, result, out)
        # What is finished is refused: it comes last.
        with staged(out) as staging, writing(out, ArtifactError):
            shutil.copytree(exported.folder / ARTIFACT, staging, dirs_exist_ok=True)
        for note in beyond_int8(result):
            show.say(f"warning: {note}")
        seconds = time.monotonic() - started
        show.say(f"done: {out} in {seconds / 60:.1f} minutes")
    return Compressed(out, result, tuple(run.choices), seconds)


def _check_asked(out: Path, minutes: float, max_drop: float | None, length: int | None) -> None:
    """Refuse what cannot be done before anything is read."""
    if out.exists():
        raise ArtifactError(f"{out} exists: name another with --out, or remove it")
    if not minutes >= 1:
        raise SpecError(f"minutes must be at least 1, got {minutes:g}")
    if max_drop is not None and not 0 < max_drop < 1:
        raise SpecError(f"max_drop must be between 0 and 1, such as 0.005, got {max_drop:g}")
    if length is not None and length < 2:
        raise SpecError(f"length must be at least 2 tokens, got {length}")


def _example_of(data: str | Path | Data | Rows) -> Inputs | None:
    """Return the first samples of Python data, as an example of a module's inputs."""
    return data.at(slice(0, 2)).inputs if isinstance(data, Data) else None
