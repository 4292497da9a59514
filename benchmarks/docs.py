"""`make docs`: put tables and pictures of out/bench-*.json and out/results-*.json into docs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from lab.report.certificates import figures_picture
from lab.report.cost import cost_picture
from lab.report.fidelity import fidelity_picture
from lab.report.results import results_text
from lab.report.results_charts import results_pictures
from lab.report.runtime import sizes_picture
from lab.report.serving import serving_picture
from lab.report.training import training_picture
from lab.schema import schemas
from t3c.files import write_atomic

DOCS, OUT = Path("docs"), Path("out")
BLOCK = re.compile(r"(<!-- table ([\w-]+) (\w+)((?: \w+)*) -->\n).*?(<!-- end -->)", re.S)
RESULTS = re.compile(r"(<!-- results ([\w-]+) -->\n).*?(<!-- end -->)", re.S)


def main() -> int:
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        write_atomic(page, RESULTS.sub(_results, BLOCK.sub(_filled, text)).encode())
    for name, schema in schemas().items():
        (DOCS / "schema").mkdir(exist_ok=True)
        write_atomic(DOCS / "schema" / name, schema.encode())
    fidelity = _read("bench-fidelity")
    if fidelity:
        picture = fidelity_picture(fidelity["tables"]["ranks"])
        write_atomic(DOCS / "fidelity.svg", picture.encode())
    certify = _read("bench-certify")
    if certify:
        picture = figures_picture(certify["tables"]["figures"], certify["tables"]["study"])
        write_atomic(DOCS / "certificates.svg", picture.encode())
    train = _read("bench-train")
    if train:
        tables = train["tables"]
        picture = training_picture(tables.get("profiles", []), tables.get("policies", []))
        write_atomic(DOCS / "training.svg", picture.encode())
    runtime = _read("bench-runtime")
    if runtime and runtime["tables"].get("sizes"):
        picture = sizes_picture(runtime["tables"]["sizes"])
        write_atomic(DOCS / "sizes.svg", picture.encode())
    serve = _read("bench-serve")
    if serve:
        (about,) = serve["tables"]["about"]
        picture = serving_picture(
            serve["tables"]["series"], about["objective_ms"], about["profiles"]
        )
        write_atomic(DOCS / "serving.svg", picture.encode())
    cost = _read("bench-cost")
    if cost:
        write_atomic(DOCS / "cost.svg", cost_picture(cost["tables"]["held_out"]).encode())
    return 0


def _results(block: re.Match[str]) -> str:
    """The block of a model with its results anew, their pictures beside the page; or as it is."""
    model = block[2]
    measured = _read(f"results-{model}")
    if not measured:
        return block[0]
    pictures = results_pictures(model, measured["tables"])
    for shown, picture in pictures.items():
        write_atomic(DOCS / f"results-{model}-{shown}.svg", picture.encode())
    return f"{block[1]}{results_text(model, measured, pictures)}{block[3]}"


def _filled(block: re.Match[str]) -> str:
    """The block with its table anew; as it is where nothing was measured here."""
    measured = _read(block[2])
    if not measured or not measured["tables"].get(block[3]):
        return block[0]
    columns = block[4].split()
    rows = [
        {column: row.get(column) for column in columns or row}
        for row in measured["tables"][block[3]]
    ]
    return f"{block[1]}{_markdown(rows, measured)}{block[5]}"


def _markdown(rows: list[dict[str, Any]], measured: dict[str, Any]) -> str:
    machine, commit = measured["machine"], measured.get("commit")
    names = list(rows[0])
    lines = [f"| {' | '.join(n.replace('_', ' ') for n in names)} |", "|---" * len(names) + "|"]
    lines += [f"| {' | '.join(_cell(v) for v in row.values())} |" for row in rows]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB"
    of = f", commit {commit[:7]}" if commit else ""
    return "\n".join([*lines, "", f"Measured on {where}{of}.", ""])


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _read(name: str) -> dict[str, Any] | None:
    path = OUT / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
