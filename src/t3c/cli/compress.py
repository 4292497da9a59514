"""`t3c compress`: the best artifact of a trained model, in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from t3c.cli.console import JsonOpt, ThreadsOpt, need, out_console, print_json


def compress(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face folder or hub name, or file.py:function")
    ],
    data: Annotated[
        Path, typer.Option(help="A folder of images, CSV, TSV, JSONL, a text file or .npz")
    ],
    test: Annotated[
        Path | None, typer.Option(help="Data to judge on; default a fifth of the data")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The artifact to write; default MODEL.t3c")
    ] = None,
    minutes: Annotated[float, typer.Option(help="How long the whole run may take")] = 30.0,
    max_drop: Annotated[
        float | None, typer.Option(help="What med may lose, e.g. 0.005; default by task")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a text; default 128")] = None,
    engine: Annotated[str, typer.Option(help="openvino, onnxruntime or torch")] = "openvino",
    threads: ThreadsOpt = None,
    seed: Annotated[int, typer.Option(help="Decides every random draw")] = 3407,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew instead of going on with OUT.work")
    ] = False,
    replay: Annotated[
        Path | None, typer.Option(help="A record.json: decide as that run did, not by measuring")
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Compress a trained model: convert, train once, measure, certify and pack it."""
    need("torch", "train")
    from t3c.compression.door import compress as run_compress
    from t3c.report.terminal import print_variants

    name = model.rpartition(":")[2] if ".py:" in model else Path(model).name
    made = run_compress(
        model, data, out or Path(f"{name}.t3c"), test=test, minutes=minutes, max_drop=max_drop,
        length=length, engine=engine, threads=threads, seed=seed, fresh=fresh, replay=replay,
    )  # fmt: skip
    if as_json:
        print_json(made.result.model_dump(mode="json"))
        return
    print_variants(made.result)
    for choice in made.choices:
        out_console.print(f"· {choice}", soft_wrap=True)
    out_console.print(str(made), soft_wrap=True)
