"""Train a recipe with every combination of the settings in its sweep, and rank them.

`python benchmarks/sweep.py configs/X.yaml` tries what `configs/sweeps/X.yaml` lists, on the
validation part; what was stopped goes on.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from lab.sweeps import SweepRow, load_sweep, run_sweep
from t3c.cli.console import err, out_console, print_json
from t3c.errors import T3CError
from t3c.progress import showing
from t3c.train.processes import Processes


def main(arguments: list[str] | None = None) -> int:
    """Run the sweep of a recipe and print its points, best first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path, help="a YAML file such as configs/digits.yaml")
    parser.add_argument("--out", type=Path, help="default out/, the recipe's name and sweep")
    parser.add_argument("--set", action="append", default=[], help="override one: --set steps=100")
    parser.add_argument("--json", action="store_true", help="print exactly one JSON object")
    given = parser.parse_args(arguments)
    out = given.out or Path("out") / given.recipe.stem / "sweep"
    try:
        recipe, sweep = load_sweep(given.recipe, given.set)
        with showing() as show:

            def say(text: str) -> None:
                if Processes().main:
                    show.say(text)

            rows = run_sweep(recipe, sweep, out, say=say, watch=show.watch)
    except T3CError as error:
        err.print(f"error: {error}", soft_wrap=True)
        return 2
    if not Processes().main:
        return 0
    if given.json:
        print_json({"sweep": [asdict(row) for row in rows], "out": str(out)})
    else:
        out_console.print(table(rows))
    return 0


def table(rows: list[SweepRow]) -> Table:
    """Return the points with their settings and scores."""
    shown = Table("settings", "score", "task loss", "slack", title="best first")
    for row in rows:
        told = ", ".join(f"{name} {value}" for name, value in row.settings.items())
        shown.add_row(told, f"{row.score:.4f}", f"{row.loss:.4f}", f"{row.slack:.4f}")
    return shown


if __name__ == "__main__":
    sys.exit(main())
