"""`make results-tinyllama`: a decoder of 1.1B parameters, from its configuration, on this machine.

Exports it, compresses it by NNCF, loads all of it and writes with each in turns. Stages run as
processes of their own and are kept in out/results-tinyllama; `--fresh` starts anew.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab.figures import Figure, finish
from lab.large import Writing, compress_large, decode_large, export_large
from t3c.errors import T3CError
from t3c.files import write_atomic
from t3c.progress import showing

STAGES = ("export", "compress", "decode")
MEMORY_GB, MINUTES = 16.0, 90.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tinyllama-1.1b", help="a bundled model, or a folder")
    parser.add_argument("--fresh", action="store_true", help="keep nothing of earlier runs")
    parser.add_argument("--stage", choices=STAGES, help="one stage, in this process")
    given = parser.parse_args()
    work = Path("out/results-tinyllama")
    if given.fresh and given.stage is None:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    if given.stage is not None:
        return stage(given.stage, given.model, work)
    for name in STAGES:
        if name != "decode" and (work / f"{name}.json").is_file():
            say(f"{name}: kept")
            continue
        command = [sys.executable, __file__, "--stage", name, "--model", given.model]
        code = subprocess.run(command, check=False).returncode
        if code:
            return code
    found = {name: json.loads((work / f"{name}.json").read_text()) for name in STAGES}
    memory = [
        {"stage": n, "peak_gb": r["peak_gb"], "minutes": r["minutes"]} for n, r in found.items()
    ]
    tables = {"decoding": found["decode"]["rows"], "memory": memory}
    return finish(Path("out/results-tinyllama.json"), figures(tables), tables)


def stage(name: str, model: str, work: Path) -> int:
    """One stage, and what it leaves in a file."""
    begun = time.perf_counter()
    try:
        with showing() as show:
            watch = show.watch
            if name == "export":
                row = export_large(model, work, say, watch)
            elif name == "compress":
                row = compress_large(model, work, say)
            else:
                row = decode_large(work, Writing(), say, watch)
    except T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    row["minutes"] = (time.perf_counter() - begun) / 60
    write_atomic(work / f"{name}.json", json.dumps(row, indent=1).encode())
    return 0


def figures(tables: dict[str, list[dict[str, Any]]]) -> list[Figure]:
    peaks = [
        Figure(f"{row['stage']}.peak_gb", row["peak_gb"], MEMORY_GB) for row in tables["memory"]
    ]
    profiles = sum(row["name"].startswith("t3c-") for row in tables["decoding"])
    spent = sum(row["minutes"] for row in tables["memory"])
    return [
        *peaks,
        Figure("profiles", profiles, 5, at_least=True),
        Figure("minutes", spent, MINUTES),
    ]


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} · {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
