"""`make bench-width`: width against rank, engine settings, 4-bit groups, and what the door makes.

    python benchmarks/width.py [PART...] [--out DIR]

Parts are drift, time, settings, groups and door, by default all of them. The door's artifacts are
kept in `--out`: a compression that is there is not made again. Needs T3C_DATA, `make minilm` and
`make base`; about 75 minutes with the door.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.doors import DOORS, door_figures, door_rows
from lab.engine_settings import settings_rows
from lab.figures import Figure, finish, write_result
from lab.groups import group_rows
from lab.width import SHARES, drift_at, drift_rows, time_rows

Rows = list[dict[str, Any]]
LIMITS = {0.75: 0.24, 0.6: 0.33}  # of drift by width, at shares of the feed-forward layers' work
OVER, TIME = 1.15, 0.97


def say(text: str) -> None:
    sys.stderr.write(f"· {text}\n")


def drift(out: Path) -> tuple[list[Figure], Rows]:
    """Return the drift of MiniLM by width, rank and heads."""
    rows, over = drift_rows(say)
    figures = [
        Figure(f"minilm_width_drift_at_{share:g}", drift_at(rows, "width", share), LIMITS[share])
        for share in SHARES
    ]
    return [*figures, Figure("minilm_artifact_over_largest", over, OVER)], rows


def time(out: Path) -> tuple[list[Figure], Rows]:
    """Return what whole networks take by width and by rank."""
    rows = time_rows(say)
    names = dict.fromkeys(row["network"] for row in rows)
    worst = {n: max(r["width_to_rank"] for r in rows if r["network"] == n) for n in names}
    return [Figure(f"{name}_width_to_rank", value, TIME) for name, value in worst.items()], rows


def settings(out: Path) -> tuple[list[Figure], Rows]:
    """Return what OpenVINO's own defaults take and drift beside ours."""
    return [], settings_rows(say)


def groups(out: Path) -> tuple[list[Figure], Rows]:
    """Return tokens a second of stories15M in 4 bits, beside NNCF's."""
    rows: Rows = [dict(row) for row in group_rows()]
    ratio = next(row["ratio"] for row in rows if row["name"] == "t3c 4 bits")
    return [Figure("stories15m_int4_to_nncf", ratio, 1.0, at_least=True)], rows


def door(out: Path) -> tuple[list[Figure], Rows]:
    """Return what `t3c compress` makes with its defaults."""
    rows, figures = Rows(), list[Figure]()
    for name in DOORS:
        mine = door_rows(name, out, say)
        rows += mine
        figures += door_figures(name, mine)
    return figures, rows


PARTS: dict[str, Callable[[Path], tuple[list[Figure], Rows]]] = {
    "drift": drift, "time": time, "settings": settings, "groups": groups, "door": door,
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the parts asked for; print each table, and write it to out/bench-width-PART.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("out/width"))
    given = parser.parse_args(arguments)
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}: known are {', '.join(PARTS)}")
    figures, tables, code = list[Figure](), dict[str, Rows](), 0
    for part in given.parts or PARTS:
        mine, tables[part] = PARTS[part](given.out)
        code |= finish(Path(f"out/bench-width-{part}.json"), mine, {part: tables[part]})
        figures += mine
    if not given.parts:
        write_result(Path("out/bench-width.json"), figures, tables)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
