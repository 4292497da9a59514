"""`make bench-convert`: every architecture of the paper at full size, each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from lab.conversion import measure_conversion
from lab.figures import Figure, finish
from t3c.compression.hugging_face import bundled

OUT = Path("out/bench-convert.json")
LARGEST = "tinyllama-1.1b"


def main(names: list[str]) -> int:
    rows = [measured(name) for name in names]
    figures = []
    for row in rows:
        name = row["model"]
        figures += [
            Figure(f"{name}.elastic", row["elastic"], 0.95, at_least=True),
            Figure(f"{name}.rank_elastic", row["rank_elastic"], 0.80, at_least=True),
            Figure(f"{name}.error", row["error"], 1e-4),
            Figure(f"{name}.factored_error", row["factored_error"], 1e-4),
        ]
        if name == LARGEST:
            figures += [
                Figure(f"{name}.peak_gb", row["peak_gb"], 14),
                Figure(f"{name}.minutes", row["seconds"] / 60, 25),
            ]
    return finish(OUT, figures, {"conversion": rows})


def measured(name: str) -> dict[str, Any]:
    """One model in a process of its own, so that its peak memory is its own."""
    sys.stderr.write(f"converting {name}\n")
    done = subprocess.run(
        [sys.executable, __file__, "--one", name], check=True, stdout=subprocess.PIPE
    )
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure_conversion(sys.argv[2])))
    else:
        sys.exit(main(sys.argv[1:] or list(bundled())))
