"""`make bench-runtime`: the artifact on disk, and the runtime all day.

Sizes beside NNCF's files, swaps, threads, overhead, memory, parity with torch, hostile files.
Needs T3C_DATA; parts that were measured before are kept with --resume.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.figures import Figure, finish
from lab.shipped import make, size_rows, subjects
from lab.swapping import cold_rows, memory_rows, overhead_row, stress, swap_rows
from t3c.artifact.reader import Artifact
from t3c.errors import T3CError
from t3c.runtime.runtime import Runtime

OUT, WORK = Path("out/bench-runtime.json"), Path("out/bench-runtime")
FUZZED = Path("out/bench-fuzz.json")
SWAPS = {"digits": 5000, "stories15m": 1500, "resnet-50": 600}
CALLS = 100_000
Rows = list[dict[str, Any]]
Tables = dict[str, Rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one part: digits, stories15m, resnet-50, threads or fuzz")
    parser.add_argument("--reuse", action="store_true", help="do not export again what is there")
    parser.add_argument("--resume", action="store_true", help="keep what was measured before")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    tables = _read() if given.resume else {}
    parts: dict[str, Callable[[], Tables]] = {
        name: _model(name, given.reuse) for name in subjects()
    }
    parts |= {"threads": _threads, "fuzz": _fuzz}
    if given.only not in (None, *parts):
        parser.error(f"--only is one of {', '.join(parts)}")
    try:
        for name, measure in parts.items():
            if given.only not in (None, name) or (given.resume and _has(tables, name)):
                continue
            for table, rows in measure().items():
                kept = [row for row in tables.get(table, []) if row["part"] != name]
                tables[table] = [*kept, *({"part": name, **row} for row in rows)]
            _write(tables)
    except T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return finish(OUT, figures(tables), tables)


def _model(name: str, reuse: bool) -> Callable[[], Tables]:
    """What is measured of one model: bytes, swaps, memory, cold starts, parity."""

    def measure() -> Tables:
        subject = subjects()[name]()
        path = WORK / f"{name}.t3c"
        if reuse and path.exists():
            artifact = Artifact(path)
        else:
            say(f"{name}: exporting")
            artifact = make(subject, WORK)
        say(f"{name}: sizes")
        sizes = size_rows(artifact, WORK / f"{name}.onnx", subject.calibration, WORK)
        say(f"{name}: swaps")
        swaps = swap_rows(Runtime(artifact, "openvino"), name, SWAPS[name])
        say(f"{name}: memory and cold starts")
        memory = memory_rows(artifact.path, name)
        cold = cold_rows(artifact.path, name, WORK / f"cache-{name}")
        return {
            "sizes": sizes, "swaps": swaps, "memory": memory, "cold": cold,
            "parity": _parity(artifact, name),
        }  # fmt: skip

    return measure


def _parity(artifact: Artifact, model: str) -> Rows:
    ledger = artifact.ledger()
    rows = ledger.parity if ledger else ()
    keys = ("engine", "profile", "samples", "stored", "rounding", "rounded", "largest", "reason")
    return [{"model": model, **{key: getattr(row, key) for key in keys}} for row in rows]


def _threads() -> Tables:
    """Many threads, and overhead, on the digits network."""
    path = WORK / "digits.t3c"
    if not path.exists():
        raise T3CError(f"{path} is not there: run --only digits first")
    engines = ("openvino", "onnxruntime")
    rows, over = [], []
    for engine in engines:
        say(f"{CALLS:,} calls from 8 threads on {engine}")
        rows.append(stress(Runtime(Artifact(path), engine, 1), CALLS))
        say(f"overhead on {engine}")
        over.append(overhead_row(Runtime(Artifact(path), engine)))
    return {"threads": rows, "overhead": over}


def _fuzz() -> Tables:
    """Hostile artifacts, by `make bench-fuzz`."""
    say("hostile artifacts: a million, or ten minutes")
    subprocess.run([sys.executable, str(Path(__file__).with_name("fuzz.py"))], check=False)
    found = json.loads(FUZZED.read_text())
    return {"fuzz": found["tables"]["outcomes"], "fuzz_figures": found["figures"]}


def figures(tables: Tables) -> list[Figure]:
    found = []
    size = {(row["model"], row["file"]): row["bytes"] for row in tables.get("sizes", [])}
    for model in dict.fromkeys(model for model, _ in size):
        whole, largest = size[model, "artifact"], size[model, "trimmed max"]
        found += [
            Figure(f"{model}.trimmed_max_over_int8", largest / size[model, "nncf int8"], 1.1),
            Figure(f"{model}.artifact_over_max", whole / largest, 1.4),
        ]
    for row in tables.get("swaps", []):
        if row["profile"] == "all":  # of one profile there are too few calls for a p99 to be steady
            name = f"{row['model']}.swap_p99_over_plain_ms"
            found.append(Figure(name, row["over_ms"], row["allowed_ms"]))
    for row in tables.get("threads", []):
        found += [Figure(f"{row['engine']}.{kind}", row[kind], 0) for kind in ("lost", "mixed")]
    for row in tables.get("overhead", []):
        found.append(Figure(f"{row['engine']}.overhead", row["runtime_p50"] - 1, 0.05))
    for row in tables.get("parity", []):
        name = f"{row['model']}.{row['engine']}.{row['profile']}.parity"
        found.append(Figure(name, row["rounded"], max(0.02, 0.5 * (row["rounding"] or 0))))
    for row in tables.get("fuzz_figures", []):
        least = row["name"] != "crashes"
        found.append(Figure(f"fuzz.{row['name']}", row["value"], row["limit"], at_least=least))
    return found


def _has(tables: Tables, part: str) -> bool:
    return any(row["part"] == part for rows in tables.values() for row in rows)


def _read() -> Tables:
    path = WORK / "parts.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _write(tables: Tables) -> None:
    (WORK / "parts.json").write_text(json.dumps(tables))


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
