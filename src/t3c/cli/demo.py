"""`t3c demo`: the whole path on a small network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from t3c.artifact.reader import Artifact
from t3c.cli.artifacts import write_report
from t3c.cli.console import JsonOpt, need, out_console, print_json
from t3c.files import write_atomic
from t3c.progress import showing
from t3c.report.terminal import print_variants


def demo(
    out: Annotated[Path, typer.Option(help="Where to write")] = Path("out/demo"),
    as_json: JsonOpt = False,
) -> None:
    """Train a network on digits, make one artifact of it, and ask it for three budgets."""
    need("torch", "train")
    from t3c.zoo.demo import run_demo

    out.mkdir(parents=True, exist_ok=True)
    with showing() as show:
        done = run_demo(out, show.say, show.watch)
    payload = done.result.model_dump(mode="json")
    bench_file, page = out / "bench.json", out / "report.html"
    write_atomic(bench_file, json.dumps(payload, indent=1).encode())
    write_report(done.result, Artifact(out / "digits.t3c"), page)
    if as_json:
        print_json(payload)
        return
    print_variants(done.result)
    console = out_console
    for asked in done.asked:
        bound = "not certified here"
        if asked.certificate is not None:
            share, epsilon = 1 - asked.certificate.delta, asked.certificate.epsilon
            bound = f"within {epsilon:.3f} of the original for {share:.0%} of inputs"
        console.print(
            f"asked for {asked.budget}: {asked.profile} answered "
            f"{asked.prediction} (truth {asked.truth}), {bound}"
        )
        for warning in asked.warnings:
            console.print(f"  warning: {warning}")
    artifact = out / "digits.t3c"
    console.print(
        f"\nreport: {page}\ntry next:\n"
        f"  t3c inspect {artifact} --verify\n"
        f"  t3c run {artifact} --input {out / 'digit.png'} --latency-ms 0.5 --explain\n"
        f"  t3c bench {artifact}\n"
        f"  t3c audit {artifact} --budgets 1000",
        soft_wrap=True,
    )
