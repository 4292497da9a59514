"""`t3c demo`: the whole path on a network that is trained first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from t3c.cli.console import JsonOpt, need, out_console, print_json
from t3c.report.terminal import print_variants


def demo(
    out: Annotated[Path, typer.Option(help="Where to write")] = Path("out/demo"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew instead of going on with what is in OUT")
    ] = False,
    as_json: JsonOpt = False,
) -> None:
    """Train a network on digits, make one artifact of it, and ask it for three budgets."""
    need("torch", "train")
    from t3c.zoo.demo import run_demo

    done = run_demo(out, fresh=fresh)
    if as_json:
        print_json(done.result.model_dump(mode="json"))
        return
    print_variants(done.result)
    console, artifact = out_console, done.artifact
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
    console.print(
        f"\nreport: {artifact.with_suffix('.html')}\ntry next:\n"
        f"  t3c inspect {artifact} --verify\n"
        f"  t3c run {artifact} --input {out / 'digit.png'} --latency-ms 2 --explain\n"
        f"  t3c bench {artifact} --against full,ptq8\n"
        f"  t3c audit {artifact} --budgets 1000",
        soft_wrap=True,
    )
