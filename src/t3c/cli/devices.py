"""`t3c calibrate | audit`: what an artifact takes on this machine, and whether budgets hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from t3c.artifact.card import write_card
from t3c.artifact.devices import DeviceTable, explain_forms
from t3c.artifact.merge import merge, read_table
from t3c.artifact.reader import DEVICES, Artifact
from t3c.cli.console import (
    ArtifactArg,
    EngineOpt,
    JsonOpt,
    ThreadsOpt,
    err,
    out_console,
    print_json,
)
from t3c.device.calibrate import CalibrationConfig, about
from t3c.device.calibrate import calibrate as run_calibration
from t3c.device.execution import execution_of
from t3c.device.journal import Journal
from t3c.device.machine import describe
from t3c.device.transfer import calibrate_quickly
from t3c.engines import open_engine
from t3c.errors import DataError
from t3c.evidence.audit import ROUNDS, Audit
from t3c.evidence.audit import audit as run_audit
from t3c.files import locked
from t3c.progress import showing
from t3c.report.terminal import print_conditions, print_table, summarize_table
from t3c.runtime.reading import read_arrays
from t3c.runtime.runtime import load

BusyOpt = Annotated[bool, typer.Option("--busy", help="Measure although other processes run")]


def calibrate(
    artifact: ArtifactArg,
    engine: EngineOpt = "openvino",
    threads: ThreadsOpt = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each profile")] = 120,
    grid: Annotated[int, typer.Option(min=0, help="Other profiles the proxy is fitted to")] = 30,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure three profiles; others by another's proxy")
    ] = False,
    merged: Annotated[
        list[Path] | None, typer.Option("--merge", help="Add a table measured elsewhere, and stop")
    ] = None,
    busy: BusyOpt = False,
    forms: Annotated[
        bool, typer.Option("--forms", help="Say how each layer runs, and why")
    ] = False,
    as_json: JsonOpt = False,
) -> None:
    """Measure this machine: layers, profiles and the cost proxy, into the artifact's devices/.

    A calibration that was stopped goes on where it was.
    """
    opened = Artifact(artifact)
    if merged:
        add_tables(opened, merged, as_json)
        return
    started = open_engine(engine, threads)
    config = CalibrationConfig(rounds=rounds, grid=grid, busy=busy)
    path = opened.path / DEVICES / f"{describe(started).key}.json"
    path.parent.mkdir(exist_ok=True)
    with locked(path), showing() as show:
        watch = show.watch
        if quick:
            table = calibrate_quickly(opened, started, config, watch)
            opened.add_device(table)
        else:
            journal = Journal(path.with_suffix(".journal"), about(opened, started, config))
            if journal.resumed:
                err.print(f"· going on from {journal.resumed} steps that were measured before")
            table = run_calibration(opened, started, config, journal=journal, watch=watch)
            opened.add_device(table)
            journal.finish()
        write_card(opened)
    summary = summarize_table(table, str(path))
    rows = form_rows(opened, table) if forms else []
    if as_json:
        print_json(summary.to_json() | ({"forms": rows} if forms else {}))
        return
    print_table(summary, out_console)
    if forms:
        shown = Table("profile", "layer", "rank", "bits", "form", "why")
        for row in rows:
            shown.add_row(*(str(value) for value in row.values()))
        out_console.print(shown)


def add_tables(artifact: Artifact, paths: list[Path], as_json: bool) -> None:
    """Add tables that were measured elsewhere, each merged with what is known of its device."""
    tables = [read_table(artifact, path) for path in paths]
    for table in tables:
        for profile in artifact.manifest.chain:
            execution_of(artifact, table, profile)  # refused if it is not of these layers
    for table in tables:
        path = artifact.path / DEVICES / f"{table.device.key}.json"
        path.parent.mkdir(exist_ok=True)
        with locked(path):
            known = {mine.device: mine for mine in artifact.devices()}
            mine = known.get(table.device)
            artifact.add_device(table if mine is None else merge(mine, table))
        err.print(f"· added {table.device.title}")
    write_card(artifact)
    if as_json:
        print_json({"added": [table.device.model_dump(mode="json") for table in tables]})


def form_rows(artifact: Artifact, table: DeviceTable) -> list[dict[str, object]]:
    """How each layer runs in each profile, and why."""
    rows: list[dict[str, object]] = []
    for profile in artifact.manifest.chain:
        reasons = explain_forms(table.layers, artifact.manifest.specs, profile.points)
        for name, point in profile.points.items():
            choice = reasons[name]
            form = table.forms.get(profile.name, {}).get(name, choice.form)
            why = choice.reason if form is choice.form else f"kept as it was; {choice.reason}"
            bits = f"{point.bits}" if point.bits == 8 else f"{point.bits}, run on int8"
            rows.append(
                {
                    "profile": profile.name, "layer": name, "rank": point.rank, "bits": bits,
                    "form": str(form), "why": why,
                }
            )  # fmt: skip
    return rows


def audit(
    artifact: ArtifactArg,
    budgets: Annotated[int, typer.Option(min=1, help="How many budgets to draw")] = 1000,
    engine: EngineOpt = "openvino",
    threads: ThreadsOpt = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each profile")] = ROUNDS,
    data: Annotated[
        Path | None, typer.Option(help="An .npz with x and labels y, to check accuracy too")
    ] = None,
    busy: BusyOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Check that more budget is never worse (else exit 1), and count budgets missed live."""
    runtime = load(artifact, engine, threads)
    labelled = None
    if data is not None:
        arrays = read_arrays(data)
        if not {"x", "y"} <= arrays.keys():
            raise DataError(f"{data}: x and y are needed, it holds {', '.join(arrays)}")
        labelled = (arrays["x"], arrays["y"])
    with showing() as show:
        watch = show.watch
        found = run_audit(
            runtime, budgets, rounds=rounds, data=labelled, busy=busy,
            tick=lambda done, total: watch("timing profiles", done, total),
        )  # fmt: skip
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        print_audit(found)
        if runtime.note:
            out_console.print(f"warning: {runtime.note}")
    raise typer.Exit(0 if found.ok else 1)


def print_audit(found: Audit) -> None:
    console = out_console
    kinds = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in found.monotone.items())
    console.print(
        f"{found.budgets} budgets, each beside a looser one: "
        f"{found.monotone_violations} monotone violations ({kinds})"
    )
    over = {name: "none" if share is None else f"{share:.1%}" for name, share in found.over.items()}
    console.print(
        f"of {found.reachable} that some profile keeps, over budget: {over['p50']} at p50, "
        f"{over['p90']} at p90; {found.latency_order_violations} profiles out of order in live p50"
    )
    table = Table(
        "profile", "live p50 ms", "interval", "p90", *(["accuracy"] if found.accuracy else [])
    )
    for name, live in found.live.items():
        low, high = live.ci95
        row = [name, f"{live.p50:.3f}", f"{low:.3f} to {high:.3f}", f"{live.p90:.3f}"]
        table.add_row(*row, *([f"{found.accuracy[name]:.4f}"] if found.accuracy else []))
    console.print(table)
    if found.speed is not None:
        console.print(f"the machine runs at {found.speed:.2f}x its calibrated times")
    if found.conditions:
        print_conditions(found.conditions, console)
