"""`make bench-train`: what training once gains, what a learned policy gains, what both take.

Needs T3C_DATA and CIFAR-10 (`t3c data get cifar10`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lab.few import few_rows
from lab.figures import Figure, finish
from lab.overhead import overhead_rows, parts_rows
from lab.policies import policy_rows, summary_rows
from t3c.errors import T3CError
from t3c.files import write_atomic
from t3c.progress import showing
from t3c.zoo.recipe import load_recipe
from t3c.zoo.training import train_recipe

OUT, WORK = Path("out/bench-train.json"), Path("out/bench-train")
RECIPE = Path("configs/cifar10-resnet56.yaml")
Tables = dict[str, list[dict[str, Any]]]


def cifar10() -> Tables:
    """Full and five profiles on all test images, trained and not; what was stopped goes on."""
    with showing() as show:
        done = train_recipe(
            load_recipe(RECIPE), WORK / "cifar10", resume=True, say=say, watch=show.watch
        )
    rows = [
        flat(asdict(row)) | {"model": done.subject.name, "samples": done.samples}
        for row in done.rows
    ]
    return {"profiles": rows}


def policies(subject: str, steps: int, batch: int, count: int) -> Tables:
    """The learned policy against the knapsack, greedy and uniform; three seeds."""
    return {"policies": summary_rows(policy_rows(subject, steps, batch, count, say))}


def overhead() -> Tables:
    """One step of T3C beside one step of qat8, and where it goes."""
    rows = overhead_rows("cifar10-resnet56", 64, 15, say)
    return {"overhead": rows, "parts": parts_rows("cifar10-resnet56", 64, 5)}


def few() -> Tables:
    """500 unlabelled images: block by block, or end to end."""
    return {"few": few_rows("cifar10-resnet56", 500, 150, 60, 2000, say)}


PARTS: dict[str, Callable[[], Tables]] = {
    "cifar10": cifar10,
    "policies-digits": partial(policies, "digits", 150, 32, 500),
    "policies-cifar10": partial(policies, "cifar10-resnet20", 120, 64, 1000),
    "overhead": overhead,
    "few": few,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(PARTS), help="one part")
    parser.add_argument("--resume", action="store_true", help="keep parts that are done")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    tables: Tables = {}
    try:
        for name, measure in PARTS.items():
            path = WORK / f"{name}.json"
            if given.only not in (None, name):
                continue
            if not (given.resume and path.exists()):
                write_atomic(path, json.dumps(measure(), indent=1).encode())
            for table, rows in json.loads(path.read_bytes()).items():
                tables.setdefault(table, []).extend(rows)
    except T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return finish(OUT, figures(tables), tables)


def figures(tables: Tables) -> list[Figure]:
    """The acceptance figures of the tables there are."""
    found = []
    profiles = {row["name"]: row for row in tables.get("profiles", [])}
    if profiles:
        gap = profiles["full"]["accuracy"] - profiles["med"]["accuracy"]
        falls = [r["to_next_low"] for r in profiles.values() if r["to_next_low"] is not None]
        found.append(Figure("cifar10.med_below_full", gap, 0.005))
        found.append(Figure("cifar10.larger_worse_beyond_interval", max(falls), 0.0))
    for model in dict.fromkeys(row["model"] for row in tables.get("policies", [])):
        for method in ("gumbel", "reinforce"):
            mine = [
                row["to_knapsack"]
                for row in tables["policies"]
                if row["model"] == model and row["method"] == method
            ]
            found.append(Figure(f"{model}.{method}.worst_drift_to_knapsack", max(mine), 1.0))
    for row in tables.get("overhead", []):
        if row["training"] == "t3c":
            found.append(Figure("overhead.to_one_qat8", row["ratio_p50"], 2.5))
            found.append(Figure("overhead.to_five_qat8", row["ratio_p50"] / 5, 0.5))
    return found


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row without nested values; `to_next_low` above 0 is a larger profile that is worse."""
    gaps = {name: row[name] or {} for name in ("to_full", "to_next")}
    plain = {name: value for name, value in row.items() if name not in gaps}
    return plain | {
        f"{name}_{key}": gap.get(key)
        for name, gap in gaps.items()
        for key in ("difference", "low", "high")
    }


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} · {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
