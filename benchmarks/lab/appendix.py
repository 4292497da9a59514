"""The tables of the paper's appendix F that concern one artifact."""

from __future__ import annotations

from collections.abc import Sequence

from lab.diagnostics import audit_rows, device_rows, energy_rows, violation_rows
from lab.extended import (
    allocation_blocks,
    allocation_rows,
    certificate_rows,
    drift_rows,
    proxy_rows,
)
from lab.variants import Comparison, Row
from t3c.device.calibrate import CalibrationConfig, calibrate
from t3c.engines import open_engine
from t3c.engines.protocol import Array
from t3c.runtime.runtime import Runtime

ELSEWHERE = ("openvino", 1)  # the engine and threads that a proxy is taken to


def artifact_tables(
    runtime: Runtime, compared: Comparison, samples: Sequence[Array]
) -> dict[str, list[Row]]:
    """Certificates, allocation, budgets, monotonicity, devices and energy of a compared artifact.

    `samples` (n, ...), of each input, are asked with budgets.
    """
    names = [profile.name for profile in runtime.chain]
    drifts = {name: compared.drifts(f"t3c-{name}") for name in names}
    right = {name: compared.right(f"t3c-{name}") for name in names}
    live = {name: compared.times[f"t3c-{name}"] for name in names}
    energy, why = energy_rows(runtime, tuple(values[:1] for values in samples))
    return {
        "certificates": certificate_rows(runtime, drifts),
        "drifts": drift_rows(runtime, drifts),
        "allocation": allocation_rows(runtime.artifact, runtime.forms),
        "allocation_blocks": allocation_blocks(runtime.artifact, runtime.forms),
        "violations": violation_rows(runtime, tuple(samples)),
        "audit": audit_rows(runtime, right, live=live),
        "devices": device_rows(runtime.artifact),
        "proxies": _proxies(runtime),
        "energy": energy or [{"reason": why}],
    }


def _proxies(runtime: Runtime) -> list[Row]:
    """The proxies fitted on this device, here and on another; none where no grid was measured."""
    home = runtime.table
    if home is None or not home.grid:
        return []
    count = len(home.grid)
    config = CalibrationConfig(rounds=30, grid=count, grid_rounds=15, busy=True, starts=False)
    other = open_engine(*ELSEWHERE)
    tables = {runtime.device.title: home}
    if other.threads != runtime.engine.threads:
        table = calibrate(runtime.artifact, other, config)
        tables[table.device.title] = table
    return proxy_rows(tables)
