"""Device tables from elsewhere: read, checked against an artifact, merged with what it has."""

from __future__ import annotations

from pathlib import Path

from t3c.artifact.devices import AS_FAST, DeviceTable
from t3c.artifact.plain import parse, read_plain
from t3c.artifact.reader import Artifact
from t3c.errors import CorruptError, SpecError
from t3c.measure.quiet import combined
from t3c.spec import Latency


def read_table(artifact: Artifact, path: Path) -> DeviceTable:
    """A table that was shared as JSON; it has to belong to the artifact's content."""
    table = parse(DeviceTable, read_plain(path), path)
    if table.content != artifact.content:
        raise CorruptError(
            f"{path}: measured on other content ({table.content[:12]}, this artifact is "
            f"{artifact.content[:12]}): calibrate this one on that device"
        )
    return table


def merge(mine: DeviceTable, other: DeviceTable) -> DeviceTable:
    """Two calibrations of one device as one: more samples, a wider spread, the union of layers.

    What was measured stands against what was predicted. Times of profiles that ran in the same
    forms are pooled; where forms differ, those of `mine` stand, which certificates may be for,
    unless the others are clearly faster. The grid is that of the first, its proxies stay with it.
    """
    if mine.device != other.device or mine.content != other.content:
        raise SpecError(
            f"tables of {mine.device.title} and {other.device.title} are not of one device"
        )
    if mine == other or mine.measured != other.measured:
        return mine if mine.measured else other
    profiles, forms = dict(mine.profiles), dict(mine.forms)
    for name, theirs in other.profiles.items():
        if name not in profiles:
            profiles[name], forms[name] = theirs, other.forms.get(name, {})
        elif forms.get(name) == other.forms.get(name):
            profiles[name] = pooled(profiles[name], theirs)
        elif theirs.p50 * AS_FAST < profiles[name].p50:
            profiles[name], forms[name] = theirs, other.forms.get(name, {})
    layers = {(t.layer, t.rank): t for t in (*other.layers, *mine.layers)}
    groups = {(t.layers, t.ranks, t.form): t for t in (*other.groups, *mine.groups)}
    update = {
        "profiles": profiles, "forms": forms, "layers": tuple(layers.values()),
        "groups": tuple(groups.values()), "starts": other.starts | mine.starts,
        "grid": mine.grid or other.grid, "proxies": mine.proxies or other.proxies,
        "energy": mine.energy if mine.energy_mj or not other.energy_mj else other.energy,
        "energy_mj": other.energy_mj | mine.energy_mj,
        "energy_proxy": mine.energy_proxy or other.energy_proxy,
        "conditions": combined(mine.conditions, other.conditions)
        if other.conditions else mine.conditions,
    }  # fmt: skip
    return mine.model_copy(update=update)


def pooled(a: Latency, b: Latency) -> Latency:
    """Two runs of the same thing: quantiles weighed by samples, what they differ by as spread."""
    share = a.samples / (a.samples + b.samples)

    def mean(x: float, y: float) -> float:
        return share * x + (1 - share) * y

    p50 = mean(a.p50, b.p50)
    apart = max(a.p50, b.p50) / p50 - 1
    return Latency(
        p50, mean(a.p90, b.p90), mean(a.p99, b.p99),
        (min(a.ci95[0], b.ci95[0]), max(a.ci95[1], b.ci95[1])),
        a.samples + b.samples, max(a.spread, b.spread, apart),
    )  # fmt: skip
