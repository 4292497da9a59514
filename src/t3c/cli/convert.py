"""`t3c convert`: what of a model becomes elastic."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from t3c.cli.console import JsonOpt, need, out_console, print_json
from t3c.errors import SpecError
from t3c.progress import showing


def convert(
    model: Annotated[
        str, typer.Option(help="A bundled name, a folder, a config.json or a hub name")
    ],
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say what would be converted; needs no weights")
    ] = False,
    include: Annotated[list[str] | None, typer.Option(help="Only layers like '*.mlp.*'")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="No layers like '*.head'")] = None,
    min_weights: Annotated[int, typer.Option(min=0, help="Leave smaller layers alone")] = 512,
    rank_cap: Annotated[
        list[str] | None, typer.Option(help="Share of full rank by role: projection=0.5")
    ] = None,
    convolution: Annotated[
        Literal["tucker1", "tucker2", "cp"],
        typer.Option(help="How kernels wider than a point are factored"),
    ] = "tucker2",
    as_json: JsonOpt = False,
) -> None:
    """Say what of a model becomes elastic and why not; convert it in memory to prove it.

    Nothing is written: the model is checked to compute what it did.
    """
    need("torch", "train")
    from t3c.compression.hugging_face import load_model
    from t3c.convert import ElasticConfig, elasticize_, plan_conversion
    from t3c.report.conversion import print_plan, summarize_plan
    from t3c.spec import Factorization

    config = ElasticConfig(
        include=tuple(include or ("*",)),
        exclude=tuple(exclude or ()),
        min_weights=min_weights,
        rank_caps=dict(_cap(text) for text in rank_cap or ()),
        convolution=Factorization(convolution),
    )
    loaded = load_model(model, meta=plan)
    started = time.perf_counter()
    error = None
    if plan:
        planned = plan_conversion(loaded.model, loaded.example, config)
    else:
        with showing() as show:

            def told(done: int, total: int, name: str) -> None:
                show.watch(f"converting {name}", done, total)

            report = elasticize_(loaded.model, loaded.example, config, on_layer=told)
        planned, error = report.plan, report.error
    payload = {
        "model": loaded.name,
        "pretrained": loaded.pretrained,
        **asdict(summarize_plan(planned)),
    }
    payload |= {"error": error, "seconds": time.perf_counter() - started}
    if as_json:
        print_json(payload)
        return
    print_plan(out_console, planned)
    if error is not None:
        out_console.print(f"largest change of the example's output: {error:.1e}")


def _cap(text: str) -> tuple[str, float]:
    """`role=share`, as in projection=0.5."""
    role, _, share = text.partition("=")
    try:
        return role, float(share)
    except ValueError:
        raise SpecError(f"a rank cap is ROLE=SHARE such as projection=0.5, got {text!r}") from None
