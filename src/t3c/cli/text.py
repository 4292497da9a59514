"""`t3c run --prompt` for a model that writes: its text as it comes, and what stands behind it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from t3c.cli.console import err, print_json
from t3c.report.terminal import answer_json, cell, explain_choice
from t3c.runtime.generating import Token, Writing
from t3c.runtime.runtime import Answer, Runtime
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
    payload = {"text": said.text, **_written_json(runtime, writing, written, ids.shape[1])}
    if explain:
        payload["explain"] = explain_choice(runtime, _answer(written[-1]), budget)
    if as_json:
        print_json(payload)
        return
    names = ", ".join(dict.fromkeys(payload["profiles"]))
    err.print(f"profile {names}: {payload['reason']}")
    first, speed = f"{payload['first_ms']:.1f}", cell(payload["tokens_per_second"], ".1f")
    err.print(f"{len(written)} tokens: the first after {first} ms, then {speed} a second")
    print_standing(payload, err, budget.quantile)


def print_standing(payload: Mapping[str, Any], console: Console, quantile: str) -> None:
    """The guarantee, the warnings and, if it was asked for, why this profile."""
    console.print(payload["guarantee"])
    for warning in payload["warnings"]:
        console.print(f"warning: {warning}")
    if "explain" in payload:
        keys = ("latency_ms", "with_guard_ms", "size_mb", "epsilon")
        table = Table("profile", f"{quantile} ms", "with guard", "size MB", "epsilon", "why")
        for item in payload["explain"]:
            table.add_row(item["profile"], *(cell(item[k], ".4f") for k in keys), item["why"])
        console.print(table)


def _stream(piece: str, as_json: bool) -> None:
    if piece and not as_json:
        sys.stdout.write(piece)
        sys.stdout.flush()


def _written_json(
    runtime: Runtime, writing: Writing, written: list[Token], begun: int
) -> dict[str, Any]:
    last, first = written[-1], writing.first_seconds
    assert first is not None
    payload = answer_json(runtime, _answer(last))
    del payload["answers"]
    profiles = [token.profile for token in written]
    if len(set(profiles)) > 1:
        payload["guarantee"] = "not certified: several profiles have read the text"
    return {
        "ids": writing.ids[0, begun:].tolist(),
        "prompt_tokens": begun,
        "stopped": bool(last.stopped[0]),
        "profiles": profiles,
        "first_ms": 1e3 * first,
        "tokens_per_second": writing.tokens_per_second,
        **payload,
        "warnings": list(dict.fromkeys(w for token in written for w in token.warnings)),
    }


def _answer(token: Token) -> Answer:
    """A token as the answer it is, without its output."""
    nothing = token.logits[:0]
    return Answer(nothing, token.profile, token.certificate, token.reason, token.warnings)
