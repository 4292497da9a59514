"""`t3c train`: a recipe carried out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from t3c.cli.console import JsonOpt, need, out_console, print_json
from t3c.progress import showing


def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML file such as configs/digits.yaml")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write; default out/ and the recipe's name")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint")
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override one: --set steps=100, elastic.tile=4"),
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Train a network once for every profile, and test it beside itself untrained."""
    need("torch", "train")
    from t3c.train.processes import Processes
    from t3c.zoo.recipe import load_recipe
    from t3c.zoo.training import train_recipe

    found = load_recipe(recipe, setting or ())
    folder = out or Path("out") / recipe.stem
    with showing() as show:

        def say(text: str) -> None:
            if Processes().main:
                show.say(text)

        done = train_recipe(found, folder, resume=resume, say=say, watch=show.watch)
    if not Processes().main:
        return
    payload = {
        "subject": done.subject.name, "samples": done.samples,
        "profiles": [asdict(row) for row in done.rows], "out": str(folder),
    }  # fmt: skip
    if as_json:
        print_json(payload)
        return
    out_console.print(_table(payload))


def _table(payload: dict[str, Any]) -> Table:
    """Each view with its accuracy, or its loss where outputs are no classes, and the interval."""
    rows = payload["profiles"]
    classes = rows[-1]["accuracy"] is not None
    what = "accuracy" if classes else "loss"
    title = f"{payload['subject']}, {payload['samples']:,} test samples"
    heads = ("view", what, "untrained", "to full, points", "drift", "FLOPs", "bytes")
    table = Table(*heads, title=title, pad_edge=False)
    for row in rows:
        before = row["untrained" if classes else "untrained_loss"]
        gap = row["to_full"]
        shown = (
            ""
            if gap is None or row["name"] == "full"
            else "{:+.2f} [{:+.2f}, {:+.2f}]".format(*(100 * value for value in gap.values()))
        )
        table.add_row(
            row["name"], f"{row[what]:.4f}", f"{before:.4f}", shown, f"{row['drift']:.3f}",
            f"{row['flops']:.2f}", f"{row['bytes']:.2f}",
        )  # fmt: skip
    return table
