"""`make results-MODEL`: one artifact beside every baseline of the paper, on real data.

The artifact is made by `t3c.compress` with its defaults. What is done is kept in out/results-MODEL
and not done again; a run that was stopped goes on. `--fresh` starts anew. CIFAR-10 comes by
`t3c data get cifar10`, ResNet-50, stories15M and data for the others from T3C_DATA; the networks
for CIFAR-10 are trained first, if that was not done.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.figures import Figure, finish
from lab.results import Results, ResultsSpec, load_results
from lab.sentences import load_any, train_any
from lab.zoo.bases import NETWORKS, base_folder
from t3c.errors import T3CError
from t3c.progress import showing

ROOT = Path(__file__).parents[1]
SPECS, BASES = ROOT / "configs" / "results", ROOT / "configs" / "base"
Tables = dict[str, list[dict[str, Any]]]


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


LIMITS = {
    "resnet50": Limits(full=0.70, drop=0.01, p50=0.80, size=0.60),
    "cifar10-cnn": Limits(full=0.92, drop=0.005, p50=0.50, size=0.20),
    "cifar10-vit": Limits(full=0.70, drop=0.005, p50=0.55, size=0.25),
    "minilm": Limits(full=0.88, drop=0.005, p50=0.65, size=0.45),
    "stories15m": Limits(over=0.02, speed=1.15, size=0.60),
}
MAX_P50 = 1.03  # of `t3c-max`, against plain int8
OVERTIME = 1.15  # of its minutes that `t3c compress` may take


def main() -> int:
    models = sorted(path.stem for path in SPECS.glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=models)
    parser.add_argument("--fresh", action="store_true", help="keep nothing of earlier runs")
    given = parser.parse_args()
    work = Path("out") / f"results-{given.model}"
    if given.fresh:
        shutil.rmtree(work, ignore_errors=True)
    try:
        spec = load_results(SPECS / f"{given.model}.yaml")
        with showing() as show:
            if spec.model in NETWORKS:
                base = load_any(BASES / f"{spec.model}.yaml")
                train_any(base, base_folder(), say=say, watch=show.watch)
            tables = Results(spec, work, say, show.watch).tables()
    except T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    found = figures(given.model, spec, tables)
    return finish(Path("out") / f"results-{given.model}.json", found, tables)


def figures(name: str, spec: ResultsSpec, tables: Tables) -> list[Figure]:
    """Return what is asked of the original, of `t3c-med` and of `t3c-max`."""
    rows = {row["name"]: row for row in tables["results"]}
    med, top, limits = rows.get("t3c-med", {}), rows.get("t3c-max", {}), LIMITS[name]
    # Of text models the vocabulary's table is left out on both sides.
    beside = "ptq8" if limits.over is None else "ptq8w"
    size = "blocks" if med.get("blocks_mb") else "size"
    if limits.over is None:
        mine = [
            Figure(f"{name}.full_accuracy", rows["full"]["accuracy"], limits.full, at_least=True),
            Figure(f"{name}.med_below_full", med.get("drop"), limits.drop or 0.0),
            Figure(f"{name}.med_below_full_low", med.get("drop_low"), 0.005),
            Figure(f"{name}.med_p50_to_ptq8", med.get("to_ptq8"), limits.p50 or 0.0),
        ]
    else:
        speed = med.get("speed_to_ptq8w")
        mine = [
            Figure(f"{name}.med_perplexity_over_full", med.get("over"), limits.over),
            Figure(f"{name}.med_speed_to_ptq8w", speed, limits.speed or 0.0, at_least=True),
        ]
    return [
        *mine,
        Figure(f"{name}.med_{size}_to_{beside}", med.get(f"{size}_to_{beside}"), limits.size),
        Figure(f"{name}.max_p50_to_{beside}", top.get(f"to_{beside}"), MAX_P50),
        Figure(f"{name}.compress_minutes", top.get("minutes"), OVERTIME * spec.minutes),
        Figure(f"{name}.methods_missing", len(set(spec.baselines) - set(rows)), 0),
    ]


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} · {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
