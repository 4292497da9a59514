"""Options and consoles that commands share."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from t3c.compression.kept import work_of
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


def say_kept(artifact: Path, *files: Path) -> None:
    """Say on stderr which files are those that a compression kept."""
    work = work_of(artifact)
    names = [file.name for file in files if file.parent == work]
    if names:
        err.print(f"· {', '.join(names)}: as kept in {work}", soft_wrap=True)


def need(module: str, extra: str) -> None:
    """Raise what to install if a module is not there."""
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(module, extra)
