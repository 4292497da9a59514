"""The application the commands hang on, and what they share."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from t3c.errors import MissingExtraError
from t3c.version import __version__

app = typer.Typer(
    name="t3c",
    help="One trained network, one artifact, any budget.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
out_console = Console(markup=False, highlight=False)
err = Console(stderr=True, markup=False, highlight=False)

ArtifactArg = Annotated[Path, typer.Argument(help="An artifact folder, NAME.t3c")]
EngineOpt = Annotated[str, typer.Option(help="openvino, onnxruntime or torch")]
ThreadsOpt = Annotated[int | None, typer.Option(help="Threads of the engine; default all cores")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object")]


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"t3c {__version__}\n")
        raise typer.Exit


@app.callback()
def t3c(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which")
    ] = False,
) -> None:
    """One trained network, one artifact, any budget."""


def print_json(payload: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(payload) + "\n")


def need(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(module, extra)


@contextmanager
def progress() -> Iterator[Progress]:
    columns = (TextColumn("  {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield progress


def watcher(bar: Progress) -> Callable[[str, int, int], None]:
    """One line of progress, for whatever is being done."""
    task = bar.add_task("", total=1)

    def watch(what: str, done: int, total: int) -> None:
        bar.update(task, description=what, completed=done, total=total)

    return watch


def fail(message: str) -> None:
    line = " ".join(message.split())
    sys.stderr.write(f"error: {line}\n")
    sys.exit(2)
