"""`make results-MODEL`: one artifact beside every baseline of the paper, on real data.

What is done is kept in out/results-MODEL and not done again; a run that was stopped goes on.
`--fresh` starts anew. CIFAR-10 comes by `t3c data get cifar10`, ResNet-50 and images of ImageNet
from T3C_DATA; the two networks for CIFAR-10 are trained first, if that was not done.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from lab.figures import Figure, finish
from lab.results import Results, ResultsSpec, load_results
from lab.sentences import load_any, train_any
from lab.zoo.bases import base_folder
from t3c.errors import T3CError
from t3c.progress import showing

ROOT = Path(__file__).parents[1]
SPECS, BASES = ROOT / "configs" / "results", ROOT / "configs" / "base"
PAPER = (
    "ptq8", "ptq4", "qat8", "mpqat", "magprune", "moveprune", "lrft", "loracomp", "sparsegpt",
    "kdptq",
)  # fmt: skip
TEXT = ("ptq8", "ptq8w", "ptq4", "lrft", "loracomp", "sparsegpt", "kdptq")
ASKED = {"minilm": TEXT, "stories15m": TEXT}  # of the others all of the paper's
Tables = dict[str, list[dict[str, Any]]]


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
        base = BASES / f"{spec.recipe.subject}.yaml"
        with showing() as show:
            if base.is_file():
                train_any(load_any(base), base_folder(), say=say, watch=show.watch)
            tables = Results(spec, work, say, show.watch).tables()
    except T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return finish(Path("out") / f"results-{given.model}.json", figures(spec, tables), tables)


def figures(spec: ResultsSpec, tables: Tables) -> list[Figure]:
    """What is asked of the original and of `t3c-med`."""
    rows = {row["name"]: row for row in tables["results"]}
    med, name, limits = rows.get("t3c-med", {}), spec.recipe.subject, spec.limits
    asked = ASKED.get(name, PAPER)
    # Of text models the vocabulary's table is left out on both sides.
    beside = "ptq8" if limits.over is None else "ptq8w"
    size = "blocks" if med.get("blocks_mb") else "size"
    if limits.over is None:
        mine = [
            Figure(f"{name}.full_accuracy", rows["full"]["accuracy"], limits.full, at_least=True),
            Figure(f"{name}.med_below_full", med.get("drop"), limits.drop or 0.0),
            Figure(f"{name}.med_p50_to_ptq8", med.get("to_ptq8"), limits.p50 or 0.0),
        ]
    else:
        speed = med.get("speed_to_ptq8w")
        mine = [
            Figure(f"{name}.med_perplexity_over_full", med.get("over"), limits.over),
            Figure(f"{name}.med_speed_to_ptq8w", speed, limits.speed or 0.0, at_least=True),
        ]
    swept = len(tables["sweep"])
    return [
        *mine,
        Figure(f"{name}.med_{size}_to_{beside}", med.get(f"{size}_to_{beside}"), limits.size),
        Figure(f"{name}.med_training_minutes", med.get("minutes"), 1.1 * spec.minutes),
        Figure(f"{name}.profiles", sum(n.startswith("t3c-") for n in rows), 5, at_least=True),
        Figure(f"{name}.methods_missing", len(set(asked) - set(rows)), 0),
        *([Figure(f"{name}.budgets_swept", swept, 12, at_least=True)] if asked is TEXT else []),
        Figure(f"{name}.minutes", tables["spent"][0]["minutes"], 90),
    ]


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} · {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
