"""Predict a device's times from another device's table and its fitted proxy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from t3c.artifact.devices import Device, DeviceTable, GridRow
from t3c.artifact.reader import Artifact
from t3c.cost.proxy import FEATURES, LARGEST, Proxy, Row, features
from t3c.device.execution import Execution, execution_of
from t3c.graph.context import float_outputs
from t3c.spec import Latency, Profile


def nearest(tables: Sequence[DeviceTable], device: Device) -> DeviceTable | None:
    """Return the most similar calibrated device: same engine, then weights, machine, threads."""

    def unlike(table: DeviceTable) -> tuple[bool, bool, bool, float]:
        other = table.device
        threads = abs(np.log(other.threads / device.threads))
        same = (other.engine, other.weight_bits, other.cpu)
        mine = (device.engine, device.weight_bits, device.cpu)
        first, second, third = (a != b for a, b in zip(same, mine, strict=True))
        return first, second, third, float(threads)

    known = [table for table in tables if table.profiles]
    # What was measured itself, and has a proxy, is the better donor.
    good = [table for table in known if table.measured and table.proxy]
    return min(good or known, key=unlike, default=None)


def transfer_error(donor: DeviceTable, tables: Sequence[DeviceTable]) -> float | None:
    """Return how far the donor's proxy is off at most on other devices; None if there is none."""
    if donor.proxy is None:
        return None
    errors = []
    for other in tables:
        if other.device != donor.device and other.grid:
            times = np.array([row.ms for row in other.grid])
            guess = np.array([donor.proxy.predict(vector_of(row)) for row in other.grid])
            errors.append(float(np.max(np.abs(guess - times) / times)))
    return min(max(errors), LARGEST) if errors else None


def transferred(
    artifact: Artifact, donor: DeviceTable, tables: Sequence[DeviceTable], device: Device
) -> DeviceTable:
    """Return a table for an unmeasured device: the donor's forms, and times by its proxy."""
    error = transfer_error(donor, tables)
    profiles = {
        profile.name: predicted(artifact, donor, donor.proxy, profile)
        for profile in artifact.manifest.chain
        if profile.name in donor.profiles
    }
    bar = "its error there is not known" if error is None else f"off by up to {error:.0%} elsewhere"
    return DeviceTable(
        content=artifact.content, device=device, layers=donor.layers, groups=donor.groups,
        forms=donor.forms, profiles=profiles, predicted=tuple(profiles), error=error,
        proxies={} if donor.proxy is None else {"hybrid": donor.proxy},
        source=f"the proxy of {donor.device.title}, {bar}",
    )  # fmt: skip


def work_of(artifact: Artifact, execution: Execution) -> Row:
    """Count the work of a profile as it is executed."""
    to_float = float_outputs(artifact.graph().graph, artifact.manifest.specs)
    return features(artifact.manifest.specs, execution.profile, execution.forms, to_float)


def vector_of(row: GridRow) -> Row:
    """Return the features of a measured profile, in the order of FEATURES."""
    return np.array([row.features.get(name, 0.0) for name in FEATURES])


def predicted(
    artifact: Artifact, donor: DeviceTable, proxy: Proxy | None, profile: Profile
) -> Latency:
    """Return the donor's latency of a profile, scaled to what the proxy predicts."""
    mine = donor.profiles[profile.name]
    if proxy is None:
        return mine
    guess = proxy.predict(work_of(artifact, execution_of(artifact, donor, profile)))
    scale = guess / mine.p50 if guess > 0 else 1.0
    low, high = mine.ci95
    return Latency(
        mine.p50 * scale, mine.p90 * scale, mine.p99 * scale, (low * scale, high * scale),
        mine.samples, mine.spread,
    )  # fmt: skip
