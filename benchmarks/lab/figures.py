"""What `make bench-X` and `make results-X` leave: figures with limits, tables, the machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from t3c.device.machine import cpu_name
from t3c.files import write_atomic

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """One acceptance figure; at most its limit, or at least where `at_least` is set."""

    name: str
    value: float | None
    limit: float
    at_least: bool = False

    @property
    def ok(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(pages * size / 1e9, 1),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def commit() -> str | None:
    """Return the commit that is measured, with a `+` where files differ; None outside git."""

    def git(*command: str) -> str:
        told = subprocess.run(
            ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
        return told.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write_result(
    path: Path, figures: Sequence[Figure], tables: Mapping[str, Sequence[Row]]
) -> None:
    """Write figures and tables as JSON, with the machine and the commit they are of."""
    payload = {
        "figures": [
            {k: v for k, v in asdict(f).items() if k != "at_least"} | {"ok": f.ok} for f in figures
        ],
        "tables": {name: list(rows) for name, rows in tables.items()},
        "machine": machine(),
        "commit": commit(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(payload, indent=1).encode())


def finish(path: Path, figures: Sequence[Figure], tables: Mapping[str, Sequence[Row]]) -> int:
    """Print tables and figures, write them as JSON, and say by the exit code whether all hold."""
    write_result(path, figures, tables)
    console = Console(width=160, markup=False, highlight=False)
    for name, rows in tables.items():
        console.print(_table(name, rows))
    for figure in figures:
        value = "none" if figure.value is None else f"{figure.value:.4g}"
        sys.stdout.write(
            f"{figure.name} {value} {figure.limit:.4g} {'ok' if figure.ok else 'short'}\n"
        )
    return 0 if all(figure.ok for figure in figures) else 1


def _table(name: str, rows: Sequence[Row]) -> Table:
    table = Table(*(rows[0] if rows else ()), title=name)
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    return table
