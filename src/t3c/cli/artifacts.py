"""`t3c inspect | run | bench | report`: what is done with an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from t3c.artifact.reader import Artifact
from t3c.cli import text
from t3c.cli.console import (
    ArtifactArg,
    EngineOpt,
    JsonOpt,
    ThreadsOpt,
    err,
    need,
    out_console,
    print_json,
    say_kept,
)
from t3c.compression.kept import BENCH, CALIBRATION, ORIGINAL, TEST, find_kept, work_of
from t3c.errors import SpecError
from t3c.files import write_atomic
from t3c.report.terminal import answered, cell, print_variants, summarize
from t3c.runtime.reading import read_input
from t3c.runtime.runtime import load
from t3c.runtime.tokens import Tokenizer, text_inputs
from t3c.spec import Budget


def inspect(
    artifact: ArtifactArg,
    verify: Annotated[bool, typer.Option("--verify", help="Recompute the hashes")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Say what an artifact is: its layers, profiles, devices and certificates."""
    opened = Artifact(artifact, verify=verify)
    summary = summarize(opened, verify)
    if as_json:
        print_json(summary.to_json())
        return
    console = out_console
    model = opened.manifest.model
    console.print(
        f"{model.name}: {model.parameters:,} parameters, "
        f"{len(opened.manifest.layers)} elastic layers, {summary.bytes / 1e6:.3f} MB on disk"
    )
    titles = ("size MB", "mean bits", "mean width", "epsilon", "quality", "drop (95%)")
    table = Table("profile", *titles, *summary.devices)
    for row in summary.profiles:
        times = [cell(row.p50_ms.get(device), ".3f") for device in summary.devices]
        size, bits = f"{row.size_bytes / 1e6:.3f}", f"{row.mean_bits:.1f}"
        quality = ("-", "-")
        if (found := row.quality) is not None:
            low, high = found.ci95
            drop = f"{found.drop:.4f} ({low:.4f} to {high:.4f})"
            quality = (f"{found.metric} {found.value:.4g}", drop)
        width = cell(row.mean_width, ".2f")
        table.add_row(row.name, size, bits, width, cell(row.epsilon, ".4f"), *quality, *times)
    console.print(table)
    for device, told in summary.disturbed.items():
        console.print(f"warning: {device}: {told}", soft_wrap=True)
    console.print(f"content {summary.content}{', content hashes verified' if verify else ''}")


def run(
    artifact: ArtifactArg,
    input: Annotated[  # noqa: A002
        Path | None, typer.Option(help="A picture, an .npy or an .npz")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to go on with, or to answer")] = None,
    tokens: Annotated[int | None, typer.Option(help="Write at most so many; default 64")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of what is drawn; default 0, the likeliest token")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of what is drawn; default 0")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json; default the artifact's own")
    ] = None,
    latency_ms: Annotated[float | None, typer.Option(help="At most so many milliseconds")] = None,
    size_mb: Annotated[float | None, typer.Option(help="At most so many megabytes")] = None,
    energy_mj: Annotated[float | None, typer.Option(help="At most so many millijoules")] = None,
    drift: Annotated[float | None, typer.Option(help="At most so much relative drift")] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="At most so much of accuracy lost, by the ledger")
    ] = None,
    quantile: Annotated[str, typer.Option(help="Of latencies: p50, p90 or p99")] = "p50",
    engine: EngineOpt = "openvino",
    threads: ThreadsOpt = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why this profile")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Answer one input, or go on with a text, within a budget."""
    budget = Budget(latency_ms, size_mb, energy_mj, drift, max_drop, quantile)
    drawn = {"tokens": tokens, "temperature": temperature, "seed": seed}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    _check_given(input, prompt, "tokenizer" if tokenizer else next(iter(drawn), None))
    runtime = load(artifact, engine, threads)
    model = runtime.artifact.manifest.model
    if prompt is not None:
        words = Tokenizer.of(runtime.artifact, tokenizer)
        if model.states:
            text.go_on(runtime, words, prompt, budget, drawn, explain=explain, as_json=as_json)
            return
        if drawn:
            raise SpecError(f"--{next(iter(drawn))} is for a model that has states")
        given, warnings = text_inputs(words, prompt, model)
    else:
        assert input is not None
        given, warnings = read_input(input, model), []
    answer = runtime.answer(given, budget)
    answer = answer._replace(warnings=(*warnings, *answer.warnings))
    shown = answered(runtime, answer, budget if explain else None)
    if as_json:
        print_json(shown.to_json())
        return
    for row in shown.answers:
        top = ", ".join(f"{one.name} ({one.probability:.3f})" for one in row.classes)
        out_console.print(top or f"output of shape {row.shape}")
    out_console.print(f"profile {shown.profile}: {shown.reason}")
    text.print_standing(shown, out_console, quantile)


def _check_given(file: Path | None, prompt: str | None, option: str | None) -> None:
    """Refuse none of an input and a prompt, both of them, and options of the other."""
    if file is None and prompt is None:
        raise SpecError("missing: give --input FILE or --prompt TEXT")
    if file is not None and prompt is not None:
        raise SpecError("give --input or --prompt, not both")
    if file is not None and option is not None:
        raise SpecError(f"--{option} goes with --prompt, not with --input")


def bench(
    artifact: ArtifactArg,
    engine: EngineOpt = "openvino",
    threads: ThreadsOpt = None,
    against: Annotated[
        str | None, typer.Option(help="full and baselines, by commas; default full and plain int8")
    ] = None,
    original: Annotated[
        Path | None, typer.Option(help="The original in ONNX; default what compress kept")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Test .npz with x and y; default what compress kept")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Baselines' .npz with x; default what compress kept")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each variant")] = 300,
    as_json: JsonOpt = False,
) -> None:
    """Measure the profiles beside the original and baselines, in turns, in one process."""
    need("openvino", "openvino")
    from t3c.evidence.bench import bench as run_bench
    from t3c.evidence.bench import read_data, read_result

    runtime = load(artifact, engine, threads)
    model, work = runtime.artifact.manifest.model, work_of(artifact)
    test = data or find_kept(artifact, TEST, "--data")
    calibrated = calibration or find_kept(artifact, CALIBRATION, "--calibration")
    reference = original or find_kept(artifact, ORIGINAL, "--original")
    say_kept(artifact, test, calibrated, reference)
    measured = test == work / TEST and (work / BENCH).is_file()
    metric = read_result(work / BENCH).variants[0].metric if measured else None
    plain = "ptq8w" if runtime.artifact.weight_only else "ptq8"
    result = run_bench(
        runtime,
        reference,
        read_data(test, calibrated, model, metric),
        tuple(name.strip() for name in (against or f"full,{plain}").split(",") if name.strip()),
        transformer=all(entry.dtype.startswith("int") for entry in model.inputs),
        rounds=rounds,
        say=lambda text: err.print(f"· {text}"),
    )
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        print_variants(result)


def report(
    artifact: ArtifactArg,
    measured: Annotated[
        Path | None, typer.Option("--bench", help="What `t3c bench --json` printed")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The HTML file to write")] = None,
) -> None:
    """Render a measured comparison as one HTML page that needs no network."""
    need("openvino", "openvino")
    from t3c.evidence.bench import read_result

    source = measured or find_kept(artifact, BENCH, "--bench: t3c bench --json prints one")
    result = read_result(source)
    page = out or artifact.parent / "report.html"
    write_report(result, Artifact(artifact), page)
    out_console.print(str(page), soft_wrap=True)


def write_report(result: Any, artifact: Artifact, page: Path) -> None:
    from t3c.report.page import render_report

    write_atomic(page, render_report(result, artifact).encode())
