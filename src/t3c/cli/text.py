"""`t3c run --prompt` for a model that writes: its text as it comes, and what stands behind it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from t3c.cli.console import err, print_json
from t3c.report.terminal import Told, Written, cell
from t3c.runtime.answer import Answer
from t3c.runtime.generating import Token, Writing
from t3c.runtime.runtime import Runtime
from t3c.runtime.tokens import Continued, Tokenizer, prompt_ids
from t3c.spec import Budget, TextSpec

TOKENS = 64


def go_on(
    runtime: Runtime,
    tokenizer: Tokenizer,
    prompt: str,
    budget: Budget,
    drawn: Mapping[str, Any],
    *,
    explain: bool,
    as_json: bool,
) -> None:
    """Write what follows a prompt to stdout, and which profiles wrote it to stderr."""
    spec = runtime.artifact.manifest.model.text or TextSpec()
    ids = prompt_ids(tokenizer, prompt, spec)
    settings: dict[str, Any] = {"tokens": TOKENS, **drawn}
    writing = runtime.generate(ids, budget, stop=spec.stop, **settings)
    said = Continued(tokenizer, ids[0].tolist())
    written = []
    for token in writing:
        written.append(token)
        piece = "" if token.stopped[0] else said.add(int(token.ids[0]))
        _stream(piece, as_json)
    _stream(f"{said.rest()}\n", as_json)
    shown = _written(
        runtime, writing, written, said.text, ids.shape[1], budget if explain else None
    )
    if as_json:
        print_json(shown.to_json())
        return
    err.print(f"profile {', '.join(dict.fromkeys(shown.profiles))}: {shown.reason}")
    first, speed = f"{shown.first_ms:.1f}", cell(shown.tokens_per_second, ".1f")
    err.print(f"{len(written)} tokens: the first after {first} ms, then {speed} a second")
    print_standing(shown, err, budget.quantile)


def print_standing(shown: Told, console: Console, quantile: str) -> None:
    """Print the guarantee, the warnings and, if it was asked for, why this profile."""
    console.print(shown.guarantee)
    for warning in shown.warnings:
        console.print(f"warning: {warning}")
    if shown.explain:
        titles = (f"{quantile} ms", "with guard", "size MB", "epsilon", "drop", "why")
        table = Table("profile", *titles)
        for row in shown.explain:
            figures = (row.latency_ms, row.with_guard_ms, row.size_mb, row.epsilon, row.drop)
            table.add_row(row.profile, *(cell(figure, ".4f") for figure in figures), row.why)
        console.print(table)


def _stream(piece: str, as_json: bool) -> None:
    if piece and not as_json:
        sys.stdout.write(piece)
        sys.stdout.flush()


def _written(
    runtime: Runtime,
    writing: Writing,
    written: list[Token],
    text: str,
    begun: int,
    explain: Budget | None,
) -> Written:
    last, first = written[-1], writing.first_seconds
    assert first is not None
    warnings = tuple(dict.fromkeys(w for token in written for w in token.warnings))
    answer = Answer(last.logits[:0], last.profile, last.certificate, last.reason, warnings)
    profiles = [token.profile for token in written]
    mixed = {"guarantee": "not certified: several profiles have read the text"}
    return Written.about(
        runtime, answer, explain, text=text, ids=writing.ids[0, begun:].tolist(),
        prompt_tokens=begun, stopped=bool(last.stopped[0]), profiles=profiles, first_ms=1e3 * first,
        tokens_per_second=writing.tokens_per_second, **(mixed if len(set(profiles)) > 1 else {}),
    )  # fmt: skip
