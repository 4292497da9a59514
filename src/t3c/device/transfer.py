"""A device that was never calibrated, served by what is known of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from t3c.artifact.devices import Device, DeviceTable
from t3c.artifact.reader import Artifact
from t3c.cost.proxy import LARGEST, Proxy, Row, refit, solver
from t3c.device.calibrate import CalibrationConfig, subject_of
from t3c.device.grid import vector_of, work_of
from t3c.device.measured import Watch, describe, example_inputs, runners
from t3c.engines import Engine
from t3c.errors import SpecError
from t3c.measure.latency import interleave, paced
from t3c.measure.pinning import pinned
from t3c.measure.quiet import settle, watchful
from t3c.spec import Latency, Profile

POINTS = 3


def nearest(tables: Sequence[DeviceTable], device: Device) -> DeviceTable | None:
    """The calibrated device most like this one: same engine, then weights, machine, threads."""

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
    """How far the donor's proxy is off at most on other devices; None if there is none."""
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
    """A table for a device that was not measured: the donor's forms, and times by its proxy."""
    error = transfer_error(donor, tables)
    profiles = {
        profile.name: _predicted(artifact, donor, donor.proxy, profile)
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


def calibrate_quickly(
    artifact: Artifact,
    engine: Engine,
    config: CalibrationConfig,
    watch: Watch = lambda what, done, total: None,
) -> DeviceTable:
    """A table from three measured profiles and the proxy of another device fitted to them."""
    solver()
    device = describe(engine)
    tables = artifact.devices()
    if any(table.device == device and table.measured for table in tables):
        raise SpecError("this device was calibrated in full: three points would know less")
    names = {profile.name for profile in artifact.manifest.chain}
    others = [t for t in tables if t.device != device and names <= t.profiles.keys()]
    donor = nearest(others, device)
    if donor is None or donor.proxy is None:
        raise SpecError(
            "three points re-fit the proxy of another device, and no other was calibrated: "
            "calibrate in full, without --quick"
        )
    chain = list(artifact.manifest.chain)
    picks = sorted({round(i * (len(chain) - 1) / (POINTS - 1)) for i in range(POINTS)})
    points = [chain[index] for index in picks]
    quiet = watchful(config.busy)
    settle(quiet)
    sessions = {}
    with pinned(engine.threads) if config.pin else nullcontext():
        for index, profile in enumerate(points):
            watch("compiling", index, len(points))
            graph = subject_of(artifact, donor, profile).graph(artifact, device.weight_bits)
            sessions[profile.name] = engine.compile(graph)
        calls = runners(sessions, example_inputs(artifact))
        measured = interleave(
            calls, paced(calls, config.rounds), quiet=quiet,
            tick=lambda done, total: watch("timing three profiles", done, total),
        )  # fmt: skip
    fitted = refit_points(artifact, donor, points, measured)
    profiles = {}
    for profile in chain:
        guess = _predicted(artifact, donor, fitted.proxy, profile)
        profiles[profile.name] = measured.get(profile.name, guess)
    return DeviceTable(
        content=artifact.content, device=device, layers=donor.layers, groups=donor.groups,
        forms=donor.forms, profiles=profiles, error=fitted.error,
        predicted=tuple(name for name in profiles if name not in measured),
        proxies={"hybrid": fitted.proxy}, conditions=quiet.conditions,
        source=f"{len(points)} profiles measured, others by the proxy of {donor.device.title}",
    )  # fmt: skip


@dataclass(frozen=True)
class Refitted:
    """A proxy on another device, and its error on each point when fitted without it."""

    proxy: Proxy
    error: float


def refit_points(
    artifact: Artifact,
    donor: DeviceTable,
    points: Sequence[Profile],
    measured: Mapping[str, Latency],
) -> Refitted:
    """The donor's proxy fitted to a few profiles of another device."""
    assert donor.proxy is not None
    rows = [_work(artifact, donor, profile) for profile in points]
    times = [measured[profile.name].p50 for profile in points]
    errors = []
    for index, (row, time) in enumerate(zip(rows, times, strict=True)):
        rest = [i for i in range(len(rows)) if i != index]
        if rest:
            without = refit(donor.proxy, [rows[i] for i in rest], [times[i] for i in rest])
            errors.append(abs(without.predict(row) - time) / time)
    proxy = refit(donor.proxy, rows, times)
    return Refitted(proxy, max(errors, default=0.0))


def _work(artifact: Artifact, donor: DeviceTable, profile: Profile) -> Row:
    return work_of(artifact, subject_of(artifact, donor, profile))


def _predicted(
    artifact: Artifact, donor: DeviceTable, proxy: Proxy | None, profile: Profile
) -> Latency:
    """The donor's latency, scaled to what the proxy says."""
    mine = donor.profiles[profile.name]
    if proxy is None:
        return mine
    guess = proxy.predict(_work(artifact, donor, profile))
    scale = guess / mine.p50 if guess > 0 else 1.0
    low, high = mine.ci95
    return Latency(
        mine.p50 * scale, mine.p90 * scale, mine.p99 * scale, (low * scale, high * scale),
        mine.samples, mine.spread,
    )  # fmt: skip
