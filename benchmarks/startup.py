"""`make bench-startup`: `t3c --help` beside an interpreter that imports Typer and Rich alone."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lab.figures import Figure, finish

OUT = Path("out/bench-startup.json")
RUNS = 40
MOST = 1.5  # times what the libraries of the command line take by themselves
HELP = "import sys; sys.argv = ['t3c', '--help']; from t3c.cli import main; main()"
COMMANDS = {
    "import typer, rich": "import typer, rich",
    "t3c --help": HELP,
    "import t3c": "import t3c",
    "python": "",
}


def seconds(code: str) -> float:
    """Return how long an interpreter takes to run some code and exit."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main(arguments: Sequence[str]) -> int:
    """Time each command in turns, and hold the median of the help against the libraries'."""
    for code in COMMANDS.values():
        seconds(code)  # the first one may compile
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(int(arguments[0]) if arguments else RUNS):
        for name, code in COMMANDS.items():
            times[name].append(seconds(code))
    p50 = {name: statistics.median(taken) for name, taken in times.items()}
    ratio = p50["t3c --help"] / p50["import typer, rich"]
    rows = [
        {
            "command": name,
            "runs": len(taken),
            "p50 ms": 1e3 * p50[name],
            "least ms": 1e3 * min(taken),
        }
        for name, taken in times.items()
    ]
    figures = [Figure("help_over_libraries", ratio, MOST)]
    return finish(OUT, figures, {"starting": rows})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
