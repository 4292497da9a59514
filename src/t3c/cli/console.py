"""Options, consoles and progress that commands share."""

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

out_console = Console(markup=False, highlight=False)
err = Console(stderr=True, markup=False, highlight=False)

ArtifactArg = Annotated[Path, typer.Argument(help="An artifact folder, NAME.t3c")]
EngineOpt = Annotated[str, typer.Option(help="openvino, onnxruntime or torch")]
ThreadsOpt = Annotated[int | None, typer.Option(help="Threads of the engine; default all cores")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object")]


def print_json(payload: dict[str, Any]) -> None:
    """Write exactly one JSON object to stdout."""
    sys.stdout.write(json.dumps(payload) + "\n")


def need(module: str, extra: str) -> None:
    """Raise what to install if a module is not there."""
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(module, extra)


@contextmanager
def progress() -> Iterator[Progress]:
    """Yield progress bars on stderr, which are seen on a terminal alone."""
    columns = (TextColumn("  {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield progress


def watcher(bar: Progress) -> Callable[[str, int, int], None]:
    """Return a function that shows what is being done on one line of progress."""
    task = bar.add_task("", total=1)

    def watch(what: str, done: int, total: int) -> None:
        bar.update(task, description=what, completed=done, total=total)

    return watch
