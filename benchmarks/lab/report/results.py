"""A results page in Markdown: what T3C and the baselines reach, as tables that say what is missing.

Tables are lists of flat rows. Accuracies, drops, coverages, ranks and errors are shares of 1,
times are milliseconds; whatever is absent, null or not finite is shown as not measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
Columns = Mapping[str, Cell]
MISSING = "not measured"
UNMEASURED = "Not measured yet.\n"
FULL, PREFIX = "full", "t3c-"
MATCHED = 0.005  # the loss of accuracy that the paper compares methods within
NEAR = 0.02  # and what a perplexity may be over the original's


def number(row: Row, key: str) -> float | None:
    """The finite number at a key, or none."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def results_text(model: str, payload: Mapping[str, Any], pictures: Collection[str] = ()) -> str:
    """Everything a page shows of one model, below its heading; `pictures` are those drawn."""
    tables, parts = payload.get("tables", {}), []
    for key, heading, words, section in SECTIONS:
        rows = tables.get(key) or []
        shown, alternative = PICTURES.get(key, ("", ""))
        lines = [f"### {heading}", ""] if heading else []
        reason = next((row["reason"] for row in rows if set(row) == {"reason"}), None)
        if reason:
            parts.append("\n".join([*lines, f"Not measured: {reason}.", ""]))
            continue
        if shown in pictures:
            lines += [f"![{alternative}](results-{model}-{shown}.svg)", ""]
        if rows:
            body = _table(rows, section) if isinstance(section, Mapping) else section(rows)
            lines += [*([words, ""] if words else []), body]
        if rows or shown in pictures:
            parts.append("\n".join(lines))
    if payload.get("figures"):
        parts.append("\n".join(["### Limits", "", _table(payload["figures"], LIMITS)]))
    return "\n".join([*parts, _where(payload.get("machine", {}))]) if parts else UNMEASURED


def speaks(rows: Sequence[Row]) -> bool:
    """Whether the rows are of language models, which have a perplexity."""
    return any(number(row, "perplexity") is not None for row in rows)


def headline(rows: Sequence[Row]) -> str:
    """Who is matched in quality, who of these is fastest and smallest, and who is on the front."""
    made = [row for row in rows if row["name"] != FULL]
    near, beside = _matched(made), "ptq8w" if speaks(rows) else "ptq8"
    names = ", ".join(row["name"] for row in near) or "none"
    within = f"{100 * MATCHED:g} points below the original"
    if speaks(rows):
        within = f"{100 * NEAR:g}% over the original's perplexity"
    first = f"- At most {within} are {len(near)} of {len(made)}: {names}."
    for key, word, unit, to in (
        ("p50", "Fastest", "ms", f"to_{beside}"),
        ("size_mb", "Smallest", "MB", f"size_to_{beside}"),
    ):
        known = [row for row in near if number(row, key) is not None]
        if known:
            least = min(known, key=lambda row: row[key])
            ratio = number(least, to)
            share = "" if ratio is None else f", {ratio:.2f} of {beside}"
            first += f" {word} of them: {least['name']} ({_three(key)(least)} {unit}{share})."
    front = ", ".join(row["name"] for row in pareto_front(made))
    better = "less perplexed" if speaks(rows) else "more accurate"
    second = f"- None is both faster and {better} than any of: {front}." if front else ""
    return "\n".join(line for line in (first, second) if line) + "\n"


def pareto_front(rows: Sequence[Row], cost: str = "p50") -> list[Row]:
    """Rows that no other beats in cost or quality while being as good in the other."""
    key, sign = ("perplexity", -1) if speaks(rows) else ("accuracy", 1)
    known = [r for r in rows if None not in (number(r, key), number(r, cost))]
    return [
        row
        for row in known
        if not any(
            sign * other[key] >= sign * row[key]
            and other[cost] <= row[cost]
            and (other[key], other[cost]) != (row[key], row[cost])
            for other in known
        )
    ]


def results_table(rows: Sequence[Row]) -> str:
    """The table of the paper: accuracy, its loss, p50 [p90], size and epsilon of every method.

    Of language models it is perplexity, and times are of a token.
    """
    made = [row for row in rows if row["name"] != FULL]
    near = _matched(made)
    fast, small = _least(near, "p50", _three("p50")), _least(near, "size_mb", _three("size_mb"))
    if speaks(rows):
        return _table(rows, {
            "method": _text("name"),
            "perplexity": _three("perplexity"),
            "over full, % [95%]": _ranged(*_with_ends("over", 2)),
            "p50 [p90] of a token, ms": _ranged(_bold(_three("p50"), fast), _three("p90")),
            "tokens/s": _count("tokens_per_second"),
            "tokens/s to ptq8w": _two("speed_to_ptq8w"),
            "first token [p90], ms": _ranged(_three("first_ms"), _three("first_p90")),
            "size, MB": _bold(_three("size_mb"), small),
            "blocks, MB": _three("blocks_mb"),
            "blocks to ptq8w": _two("blocks_to_ptq8w"),
            "epsilon": _epsilon,
            "mean drift": _three("drift"),
        })  # fmt: skip
    return _table(rows, {
        "method": _text("name"),
        "accuracy, %": _bold(_percent("accuracy"), _most_accurate(made)),
        "below full, points [95%]": _ranged(*_with_ends("drop", 2)),
        "p50 [p90], ms": _ranged(_bold(_three("p50"), fast), _three("p90")),
        "to ptq8": _ranged(_two("to_ptq8"), _two("to_ptq8_p90")),
        "size, MB": _bold(_three("size_mb"), small),
        "size to ptq8": _two("size_to_ptq8"),
        "without the vocabulary's table, MB": _three("blocks_mb"),
        "that to ptq8": _two("blocks_to_ptq8"),
        "epsilon": _epsilon,
        "mean drift": _three("drift"),
    })  # fmt: skip


def _results(rows: Sequence[Row]) -> str:
    key, what = ("tokens", "tokens") if speaks(rows) else ("samples", "samples")
    counts = sorted({int(row[key]) for row in rows if number(row, key) is not None})
    tested = f"Tested on {' or '.join(f'{n:,}' for n in counts)} {what}. " if counts else ""
    note = (
        f"{tested}Bold: the best accuracy and those with intervals that overlap its own; the least "
        f"p50 and size among those at most {100 * MATCHED:g} points below full."
    )
    if speaks(rows):
        note = (
            f"{tested}Blocks: all but the vocabulary's table, which is the head too. Bold: the "
            f"least p50 and size among those at most {100 * NEAR:g}% over full."
        )
    return "\n".join([headline(rows), results_table(rows), note, "", _table(rows, MADE)])


def _allocation(rows: Sequence[Row]) -> str:
    rank, bits = _two("rank"), _show("bits", ".1f")
    return _pivot(rows, "profile", "block", lambda row: f"{rank(row)}, {bits(row)}")


def _devices(rows: Sequence[Row]) -> str:
    return _pivot(rows, "profile", "device", _ranged(_three("p50"), _three("p90")))


def _proxies(rows: Sequence[Row]) -> str:
    cell = _percent("mape", 1)
    best = {
        (name, row["device"])
        for row in rows
        for name in _least([r for r in rows if r["device"] == row["device"]], "mape", cell, "proxy")
    }
    return _pivot(
        rows, "proxy", "device",
        lambda row: _strong(cell(row)) if (row["proxy"], row["device"]) in best else cell(row),
    )  # fmt: skip


def _matched(rows: Sequence[Row]) -> list[Row]:
    key, most = ("over", NEAR) if speaks(rows) else ("drop", MATCHED)
    lost = ((row, number(row, key)) for row in rows)
    return [row for row, loss in lost if loss is not None and loss <= most + 1e-12]


def _most_accurate(rows: Sequence[Row]) -> set[str]:
    """The best, and whatever has an interval of its loss that overlaps the best's."""
    known = [row for row in rows if number(row, "accuracy") is not None]
    best = max(known, key=lambda row: row["accuracy"], default={})
    high = number(best, "drop_high")
    names = set()
    for row in known:
        low = number(row, "drop_low")
        overlaps = high is not None and low is not None and low <= high
        if overlaps or row["accuracy"] == best["accuracy"]:
            names.add(row["name"])
    return names


def _least(rows: Sequence[Row], key: str, cell: Cell, name: str = "name") -> set[str]:
    """The rows with the least value, and those that print as it does."""
    known = [row for row in rows if number(row, key) is not None]
    if not known:
        return set()
    best = cell(min(known, key=lambda row: row[key]))
    return {row[name] for row in known if cell(row) == best}


def _pivot(rows: Sequence[Row], down: str, across: str, cell: Cell) -> str:
    """A line for each value of `down`, a column for each of `across`."""
    found = {(row[down], row[across]): cell(row) for row in rows}
    lines = [{down: name} for name in dict.fromkeys(row[down] for row in rows)]

    def of(column: str) -> Cell:
        return lambda line: found.get((line[down], column), MISSING)

    columns = dict.fromkeys(row[across] for row in rows)
    return _table(lines, {down: _text(down)} | {name: of(name) for name in columns})


def _table(rows: Sequence[Row], columns: Columns) -> str:
    """A table of the columns that at least one row has a value for."""
    texts = {
        title: [" ".join(cell(row).split()).replace("|", "\\|") for row in rows]
        for title, cell in columns.items()
    }
    known = {title: cells for title, cells in texts.items() if set(cells) != {MISSING}}
    lines = [f"| {' | '.join(known)} |", "|---" * len(known) + "|"]
    lines += [f"| {' | '.join(cells)} |" for cells in zip(*known.values(), strict=True)]
    return "\n".join([*lines, ""])


def _text(*keys: str) -> Cell:
    return lambda row: next((str(row[key]) for key in keys if row.get(key)), MISSING)


def _show(key: str, form: str, times: float = 1.0) -> Cell:
    def cell(row: Row) -> str:
        value = number(row, key)
        return MISSING if value is None else format(value * times, form)

    return cell


def _two(key: str) -> Cell:
    return _show(key, ".2f")


def _percent(key: str, digits: int = 2) -> Cell:
    return _show(key, f".{digits}f", 100)


def _count(key: str) -> Cell:
    return _show(key, ",.0f")


def _three(key: str) -> Cell:
    """Three digits, with the zeros that were measured and without exponents."""
    small, large = _show(key, "#.3g"), _count(key)
    return lambda row: small(row) if 0 < abs(number(row, key) or 0.0) < 99.95 else large(row)


def _share(key: str, of: str = "") -> Cell:
    """A count, with its share of another; what is a share itself is a float, in percent."""
    share, count = _show(key, ".1%"), _count(key)

    def cell(row: Row) -> str:
        whole, value = number(row, of), number(row, key)
        part = f" ({value / whole:.1%})" if whole and value is not None else ""
        return share(row) if isinstance(row.get(key), float) else count(row) + part

    return cell


def _with_ends(key: str, digits: int) -> tuple[Cell, Cell, Cell]:
    return _percent(key, digits), _percent(f"{key}_low", digits), _percent(f"{key}_high", digits)


def _ranged(cell: Cell, *ends: Cell, form: str = " [{}]") -> Cell:
    """A value with others in brackets, or alone where it or one of those is missing."""

    def both(row: Row) -> str:
        value, texts = cell(row), [end(row) for end in ends]
        return value if MISSING in (value, *texts) else value + form.format(", ".join(texts))

    return both


def _bold(cell: Cell, best: Collection[str]) -> Cell:
    return lambda row: _strong(cell(row)) if row["name"] in best else cell(row)


def _strong(text: str) -> str:
    return f"**{text}**"


def _epsilon(row: Row) -> str:
    known = row["name"].startswith(PREFIX) or row.get("epsilon") is not None
    return _three("epsilon")(row) if known else "none"


def _where(machine: Row) -> str:
    forms = (("cpu", "{}"), ("cores", "{} cores"), ("memory_gb", "{} GB"))
    known = [form.format(machine[key]) for key, form in forms if machine.get(key)]
    return f"Measured on {', '.join(known)}.\n" if known else ""


MADE: Columns = {
    "method": _text("name"), "made by": _text("method"), "minutes": _count("minutes"),
    "steps": _count("steps"),
}  # fmt: skip
LIMITS: Columns = {
    "figure": _text("name"), "value": _three("value"), "limit": _three("limit"),
    "": lambda row: "holds" if row.get("ok") else "**short**",
}  # fmt: skip
CERTIFICATES: Columns = {
    "method": _text("name"),
    "epsilon": _three("epsilon"),
    "coverage, % [expected]": _ranged(*_with_ends("coverage", 1)),
    "mean drift": _three("mean_drift"),
    "95th percentile": _three("p95_drift"),
    "first order": _three("first_order"),
    "spectral": _three("spectral"),
    "Pearson": _two("pearson"),
    "Spearman": _two("spearman"),
}
ABLATIONS: Columns = {
    "variant": _text("variant"),
    "detail": lambda row: str(row.get("detail") or ""),
    "accuracy, %": _percent("accuracy"),
    "below full, points [95%]": _ranged(*_with_ends("drop", 2)),
    "p50, ms": _three("p50"),
    "to ptq8": _two("to_ptq8"),
    "size, MB": _three("size_mb"),
    "violations": _share("violations"),
    "epsilon": _three("epsilon"),
    "first order": _three("first_order"),
}
AUDIT: Columns = {
    "method": _text("method"), "checked": _count("checked"),
    "less accurate": _share("accuracy_violations"), "less latency": _share("latency_violations"),
    "missed": _share("budget_violations"),
}  # fmt: skip
VIOLATIONS: Columns = {
    "profile": _text("profile"), "budget, ms": _three("budget_ms"), "runs": _count("runs"),
    "over it": _share("over", "runs"), "error of the proxy, %": _percent("mape", 1),
}  # fmt: skip
SEEDS: Columns = {
    "method": _text("name"),
    "seeds": _count("seeds"),
    "accuracy, %": _ranged(_percent("accuracy"), _percent("accuracy_sem"), form=" ± {}"),
    "p50, ms": _ranged(_three("p50"), _three("p50_sem"), form=" ± {}"),
    "p90 - p50, ms": _three("tail_gap"),
}
ENERGY: Columns = {
    "method": _text("name", "profile"), "p50, ms": _three("p50"), "energy, mJ": _three("energy_mj"),
}  # fmt: skip
SWEEP: Columns = {
    "budget": _text("budget"), "profile": _text("profile"), "perplexity": _three("perplexity"),
    "over full, % [95%]": _ranged(*_with_ends("over", 2)), "accuracy, %": _percent("accuracy"),
    "below full, points [95%]": _ranged(*_with_ends("drop", 2)), "p50, ms": _three("p50"),
    "size, MB": _three("size_mb"), "epsilon": _three("epsilon"),
}  # fmt: skip
SWEPT = (
    "Budgets evenly spread from what the smallest profile takes to what the largest does, and the "
    "profile that the runtime serves each with."
)
COVERAGE = (
    "Coverage is the share of test samples that drift at most epsilon, beside the range expected "
    "of it before it was seen; only one below that range is a finding. Correlations are over "
    "profiles, of first order with mean drift."
)
AUDITED = (
    "Random pairs of budgets: how often the looser one got a profile that is less accurate or "
    "takes less time, and how often a budget was missed that another profile keeps."
)
ABLATED = (
    "Each variant allocates the same trained network at the cost of the middle profile. Times are "
    "sums over measured layers, accuracy is with activations in float."
)
OVER = "Single calls that took longer than their budget, and the proxy's error at that profile."
ALLOCATED = "Share of full rank as executed, and bits: means weighted by parameters."
SECTIONS: tuple[tuple[str, str, str, Columns | Callable[[Sequence[Row]], str]], ...] = (
    ("results", "", "", _results),
    ("sweep", "Sweep of budgets", SWEPT, SWEEP),
    ("violations", "Budgets kept", OVER, VIOLATIONS),
    ("audit", "Monotone budgets", AUDITED, AUDIT),
    ("seeds", "Seeds", "Means over seeds, with their standard errors.", SEEDS),
    ("certificates", "Certificates", COVERAGE, CERTIFICATES),
    ("ablations", "Ablations", ABLATED, ABLATIONS),
    ("allocation_blocks", "Allocation", ALLOCATED, _allocation),
    ("devices", "Devices", "The same artifact elsewhere, p50 [p90] in ms.", _devices),
    ("proxies", "Predicted latency", "Mean error of each proxy, %; bold is the least.", _proxies),
    ("energy", "Energy", "", ENERGY),
)
PICTURES = {
    "results": ("pareto", "Accuracy against latency and against size, T3C's profiles on a line"),
    "certificates": ("certificates", "Drift that was seen against epsilon, with the diagonal"),
    "ablations": ("ablations", "Accuracy lost by each variant, as bars"),
    "allocation_blocks": ("allocation", "Rank as colour and bits as text, by layer and profile"),
}
