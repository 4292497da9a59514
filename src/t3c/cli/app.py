"""The application: its commands are imported when they are called."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from t3c.version import __version__

# The module and name of each command, and its line in the list of them.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "inspect": ("t3c.cli.artifacts", "inspect",
        "Say what an artifact is: its layers, profiles, devices and certificates."),
    "run": ("t3c.cli.artifacts", "run", "Answer one input, or go on with a text, within a budget."),
    "bench": ("t3c.cli.artifacts", "bench",
        "Measure the profiles beside the original and baselines, in turns, in one process."),
    "report": ("t3c.cli.artifacts", "report",
        "Render a measured comparison as one HTML page that needs no network."),
    "certify": ("t3c.cli.certify", "certify",
        "Certify every profile on this engine: epsilon, first order, spectral."),
    "compress": ("t3c.cli.compress", "compress",
        "Compress a trained model: convert, train once, measure, certify and pack it."),
    "convert": ("t3c.cli.convert", "convert",
        "Say what of a model becomes elastic and why not; convert it in memory to prove it."),
    "demo": ("t3c.cli.demo", "demo",
        "Train a network on digits, make one artifact of it, and ask it for three budgets."),
    "calibrate": ("t3c.cli.devices", "calibrate",
        "Measure this machine: layers, profiles and the cost proxy, into the artifact's devices/."),
    "audit": ("t3c.cli.devices", "audit",
        "Check that more budget is never worse (else exit 1), and count budgets missed live."),
    "export": ("t3c.cli.export", "export",
        "Write an artifact with some of its profiles alone, or one profile for TensorRT."),
    "serve": ("t3c.cli.serve", "serve",
        "Serve an artifact over HTTP: the Open Inference Protocol, budgets, a dashboard."),
    "train": ("t3c.cli.train", "train",
        "Train a network once for every profile, and test it beside itself untrained."),
    "data": ("t3c.cli.data", "data", "Fetch data sets."),
}  # fmt: skip


class Commands(TyperGroup):
    """The commands by their lines, of which one is imported when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name else listed, rest


def load_command(name: str) -> Any:
    """Import a command, and keep the log off stderr: warnings are in the answers."""
    import logging

    logging.getLogger("t3c").addHandler(logging.NullHandler())
    module, function, _ = COMMANDS[name]
    loaded = getattr(importlib.import_module(module), function)
    if isinstance(loaded, typer.Typer):
        return typer.main.get_command(loaded)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name)(loaded)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="t3c",
    cls=Commands,
    help="One trained network, one artifact, any budget.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


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


def _listed() -> None:
    """Stand for a command in the list of them."""


for _name, (_, _, _line) in COMMANDS.items():
    app.command(_name, help=_line)(_listed)
