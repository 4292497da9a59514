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
from t3c.compression.record import RECORD, SAME
from t3c.compression.stages import Stage
from t3c.compression.teach import GUARD
from t3c.evidence.bench import Data, Result, bench
from t3c.evidence.int8 import INT8
from t3c.evidence.quality import Scorer, measure_quality
from t3c.files import write_atomic
from t3c.report.page import render_report
from t3c.runtime.runtime import load

if TYPE_CHECKING:
    from t3c.compression.pipeline import Compression

ARTIFACT = "artifact.t3c"
ROUNDS = 120
SLOWER = 1.03  # than plain int8 by p50, what `max` may be


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


def beyond_int8(result: Result) -> list[str]:
    """Return in sentences where `max` is not as good as plain int8, which it is to be."""
    rows = {variant.name: variant for variant in result.variants}
    top, told = rows["t3c-max"], []
    plain = next((row for name, row in rows.items() if name in INT8), None)
    if plain is None:
        return []
    slower = top.latency_ms.p50 / plain.latency_ms.p50
    if slower > SLOWER:
        told.append(f"max takes {slower:.2f} of plain int8's time, {SLOWER:g} is aimed at")
    drifts = top.drift.mean, plain.drift.mean
    if drifts[0] is not None and drifts[1] and drifts[0] > GUARD * drifts[1]:
        told.append(f"max drifts {drifts[0]:.3g}, plain int8 {drifts[1]:.3g}")
    return told


def write_beside(run: Compression, exported: Stage, result: Result, out: Path) -> None:
    """Leave in the work folder what `t3c bench` and `t3c certify` read, and the report beside."""
    work, artifact = run.stages.root, Artifact(exported.folder / ARTIFACT)
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
        "made_from": {name: run.made_from[name] for name in SAME},
        "choices": [choice.model_dump() for choice in run.choices],
        "samples": run.parts.sizes(),
        "plan": {"minutes": run.plan.minutes, "training": run.plan.training},
        "candidates": run.decided["place"]["candidates"],
        "decided": run.decided,
    }
    write_atomic(work / RECORD, json.dumps(record, indent=1).encode())
    told = [*map(str, run.choices), *beyond_int8(result)]
    page = render_report(result, artifact, choices=told)
    write_atomic(out.with_name(out.name.removesuffix(".t3c") + ".html"), page.encode())
