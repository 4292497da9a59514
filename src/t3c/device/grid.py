"""The grid of profiles a device's proxies are fitted to, and judged on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from t3c.artifact.devices import DeviceTable, GridRow
from t3c.artifact.reader import Artifact
from t3c.cost.proxy import FEATURES, PROXIES, Proxy, fit_proxy, judge
from t3c.device.execution import Execution
from t3c.device.predict import vector_of, work_of
from t3c.graph.builder import Ranges
from t3c.spec import Profile

HELD_OUT = 3  # every third profile of the grid is kept out of the fit


def mixtures(artifact: Artifact, count: int, seed: int) -> list[Profile]:
    """Profiles that take each layer's point from one of the artifact's, so all are stored.

    Layers that are narrowed together take those of one. From mostly the smallest profile to mostly
    the largest, evenly; none is drawn twice or is one of the artifact's own, so that what is held
    out is new.
    """
    rng = np.random.default_rng(seed)
    chain = list(artifact.manifest.chain)
    top, specs = len(chain) - 1, artifact.manifest.specs
    units = tuple(dict.fromkeys(spec.unit or name for name, spec in specs.items()))
    seen = {tuple(profile.points.values()) for profile in chain}
    found: list[Profile] = []
    for index in range(count if top else 0):
        middle = top * (index + 0.5) / count
        for _ in range(20):
            drawn = np.rint(middle + rng.normal(size=len(units)) * top / 4)
            levels = dict(zip(units, np.clip(drawn, 0, top).astype(int), strict=True))
            points = {n: chain[levels[s.unit or n]].points[n] for n, s in specs.items()}
            if tuple(points.values()) not in seen:
                seen.add(tuple(points.values()))
                found.append(Profile(f"mixture{index}", points))
                break
    return found


def widest_ranges(artifact: Artifact) -> Ranges:
    """Ranges any mixture can run with."""
    widest: dict[str, tuple[float, float]] = {}
    for profile in artifact.manifest.profiles:
        for name, (low, high) in artifact.ranges(profile.name).items():
            before = widest.get(name, (low, high))
            widest[name] = (min(low, before[0]), max(high, before[1]))
    return widest


def grid_row(artifact: Artifact, execution: Execution, ms: float, energy: float | None) -> GridRow:
    """A measured profile, with its work counted."""
    work = work_of(artifact, execution)
    named = {name: float(value) for name, value in zip(FEATURES, work, strict=True) if value}
    return GridRow(features=named, ms=ms, held_out=False, energy_mj=energy)


def held_out(rows: Sequence[GridRow]) -> list[GridRow]:
    """The rows, every third of them marked as held out of the fit."""
    return [
        row.model_copy(update={"held_out": index % HELD_OUT == HELD_OUT - 1})
        for index, row in enumerate(rows)
    ]


def with_grid(table: DeviceTable, rows: Sequence[GridRow]) -> DeviceTable:
    """The table with a grid, and the proxies fitted to it."""
    proxies = {name: _fitted(rows, [row.ms for row in rows], use) for name, use in PROXIES.items()}
    powered = [row for row in rows if row.energy_mj]
    spent = [row.energy_mj for row in powered if row.energy_mj]
    energy = _fitted(powered, spent, FEATURES) if any(not r.held_out for r in powered) else None
    update = {"grid": tuple(rows), "proxies": proxies, "energy_proxy": energy}
    return table.model_copy(update=update)


def _fitted(rows: Sequence[GridRow], measured: Sequence[float], use: Sequence[str]) -> Proxy:
    pairs = list(zip(rows, measured, strict=True))
    fit = [(vector_of(row), value) for row, value in pairs if not row.held_out]
    held = [(vector_of(row), value) for row, value in pairs if row.held_out]
    proxy = fit_proxy([x for x, _ in fit], [y for _, y in fit], use)
    return judge(proxy, [x for x, _ in held], [y for _, y in held], [y for _, y in fit])
