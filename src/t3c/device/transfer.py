"""Calibrate a device by three profiles and the proxy of another device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from t3c.artifact.devices import DeviceTable
from t3c.artifact.reader import Artifact
from t3c.cost.proxy import Proxy, Row, refit, solver
from t3c.device.calibrate import CalibrationConfig
from t3c.device.execution import example_inputs, execution_of
from t3c.device.machine import describe
from t3c.device.measured import Watch, runners
from t3c.device.predict import nearest, predicted, work_of
from t3c.engines import Engine
from t3c.errors import SpecError
from t3c.measure.latency import interleave, paced
from t3c.measure.pinning import pinned
from t3c.measure.quiet import settle, watchful

POINTS = 3


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
            graph = execution_of(artifact, donor, profile).graph(artifact, device.weight_bits)
            sessions[profile.name] = engine.compile(graph)
        calls = runners(sessions, example_inputs(artifact))
        measured = interleave(
            calls, paced(calls, config.rounds), quiet=quiet,
            tick=lambda done, total: watch("timing three profiles", done, total),
        )  # fmt: skip
    rows = [work_of(artifact, execution_of(artifact, donor, profile)) for profile in points]
    times = [measured[profile.name].p50 for profile in points]
    proxy, error = _refitted(donor.proxy, rows, times)
    guesses = {p.name: predicted(artifact, donor, proxy, p) for p in chain}
    profiles = guesses | measured
    return DeviceTable(
        content=artifact.content, device=device, layers=donor.layers, groups=donor.groups,
        forms=donor.forms, profiles=profiles, error=error,
        predicted=tuple(name for name in profiles if name not in measured),
        proxies={"hybrid": proxy}, conditions=quiet.conditions,
        source=f"{len(points)} profiles measured, others by the proxy of {donor.device.title}",
    )  # fmt: skip


def _refitted(proxy: Proxy, rows: Sequence[Row], times: Sequence[float]) -> tuple[Proxy, float]:
    """Fit a proxy to a few profiles of a device; also its error on each when fitted without it."""
    errors = [0.0]
    for index, (row, time) in enumerate(zip(rows, times, strict=True)):
        rest = [i for i in range(len(rows)) if i != index]
        if rest:
            without = refit(proxy, [rows[i] for i in rest], [times[i] for i in rest])
            errors.append(abs(without.predict(row) - time) / time)
    return refit(proxy, rows, times), max(errors)
