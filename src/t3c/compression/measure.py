"""The finished artifact beside the original and plain int8 on test samples, and what is left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from t3c.artifact.card import write_card
from t3c.artifact.reader import Artifact
from t3c.compression.judging import judge_of
from t3c.compression.kept import BENCH, CALIBRATION, ORIGINAL, TEST
from t3c.compression.stages import Stage
from t3c.evidence.bench import Data, Result, bench
from t3c.evidence.quality import Scorer, measure_quality
from t3c.files import write_atomic
from t3c.report.page import render_report
from t3c.runtime.runtime import load

if TYPE_CHECKING:
    from t3c.compression.pipeline import Compression

ARTIFACT = "artifact.t3c"
ROUNDS = 120


def judge_profiles(run: Compression, exported: Path) -> None:
    """Put the quality of every profile into the ledger: on the samples of the certificates, which
    placed none of them."""
    part, source = run.parts.certificate, run.source
    runtime = load(exported / ARTIFACT, run.options.engine, run.options.threads)
    judge = judge_of(source, part, run.options.max_drop)
    scorer = Scorer.of(judge, part.arrays(), run.answered())
    runtime.artifact.add_quality(measure_quality(runtime, scorer, run.show.watch))
    write_card(runtime.artifact)


def measure(run: Compression, exported: Path) -> Mapping[str, Any]:
    """Measure full, plain int8 and every profile on the test part, in turns."""
    artifact = Artifact(exported / ARTIFACT)
    runtime = load(exported / ARTIFACT, run.options.engine, run.options.threads)
    test, calibration = run.parts.test, run.parts.ranges.arrays()
    made = {} if run.plain is None else {"ptq8w" if artifact.weight_only else "ptq8": run.plain}
    judge = judge_of(run.source, test, run.options.max_drop)
    result = bench(
        runtime, run.original, Data(tuple(test.arrays()), judge, tuple(calibration)),
        ("full", *made), rounds=ROUNDS, made=made, say=run.show.say,
    )  # fmt: skip
    return {"result": result.model_dump(mode="json")}


def write_beside(run: Compression, exported: Stage, result: Result, out: Path) -> None:
    """Leave in the work folder what `t3c bench` and `t3c certify` read, and the report beside."""
    work, artifact = run.stages.root, Artifact(out)
    target = work / ORIGINAL
    target.unlink(missing_ok=True)
    target.hardlink_to(run.original)
    for name, part in ((TEST, run.parts.test), (CALIBRATION, run.parts.certificate)):
        arrays = dict(
            zip((e.name for e in artifact.manifest.model.inputs), part.arrays(), strict=True)
        )
        if len(arrays) == 1:
            arrays = {"x": next(iter(arrays.values()))}
        if part.labels is not None:
            arrays["y"] = part.labels.numpy()
        np.savez(work / name, **arrays)  # type: ignore[arg-type]
    write_atomic(work / BENCH, result.model_dump_json(indent=1).encode())
    record = {
        "choices": [choice.model_dump() for choice in run.choices],
        "samples": run.parts.sizes(),
        "plan": {"minutes": run.plan.minutes, "training": run.plan.training},
        **exported.result,
    }
    write_atomic(work / "record.json", json.dumps(record, indent=1).encode())
    page = render_report(result, artifact, choices=[str(choice) for choice in run.choices])
    write_atomic(out.with_name(out.name.removesuffix(".t3c") + ".html"), page.encode())
