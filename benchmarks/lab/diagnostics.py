"""What has to be timed: budgets that runs exceed, audits, devices beside one another, energy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from t3c.artifact.reader import Artifact
from t3c.cost.proxy import mape
from t3c.device.execution import example_inputs
from t3c.device.measured import runners, time_sessions
from t3c.device.predict import work_of
from t3c.engines import Session
from t3c.engines.protocol import Array
from t3c.errors import DataError, EngineError, MissingExtraError, SpecError
from t3c.evidence.audit import broken_promises, draw_pairs
from t3c.measure.energy import (
    EnergyMeter,
    Unavailable,
    energy_per_call,
    find_meter,
    idle_watts,
)
from t3c.measure.latency import sample
from t3c.measure.pinning import pinned
from t3c.runtime.runtime import Runtime
from t3c.spec import Budget, Latency

DEVICES = (("openvino", 2), ("openvino", 1), ("onnxruntime", 2))
SLACK = 1.1  # of a calibrated p50: what a budget allows
Row = dict[str, Any]


def violation_rows(
    runtime: Runtime,
    samples: Any,
    runs: int = 200,
    budgets: Mapping[str, Sequence[Budget]] | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """How many single calls of `runs` took longer than their budget (paper F.1).

    By default two budgets for each profile that serves: 1.1 of its calibrated p50, and its p90
    asked for as such. What serves a budget is the runtime's choice, a larger or a smaller profile.
    Calls are timed in turns, each behind one of the same budget that is not. `mape` is the proxy's
    error of the profile's calibrated p50, to which it was fitted; None where that was predicted.
    """
    if runs < 1:
        raise SpecError(f"runs must be at least 1, got {runs}")
    asked = _usual_budgets(runtime) if budgets is None else budgets
    pairs = [(runtime.chain[n].name, budget) for n, limits in asked.items() for budget in limits]
    limits = [budget.latency_ms for _, budget in pairs if budget.latency_ms is not None]
    if len(limits) < len(pairs):
        raise SpecError("only a budget that limits latency can be exceeded in time")
    inputs = _one_by_one(runtime.check(samples))
    calls = {
        str(index): partial(_serve, runtime, inputs, budget)
        for index, (_, budget) in enumerate(pairs)
    }
    with pinned(runtime.engine.threads):
        times = sample(calls, runs, clock=clock)
    return [
        {
            "profile": name, "budget_ms": limit, "runs": runs,
            "over": sum(ms > limit for block in blocks for ms in block),
            "mape": proxy_error(runtime, name),
        }
        for (name, _), limit, blocks in zip(pairs, limits, times.values(), strict=True)
    ]  # fmt: skip


def _usual_budgets(runtime: Runtime) -> dict[str, list[Budget]]:
    found = {
        c.profile: [Budget(SLACK * c.latency.p50), Budget(c.latency.p90, quantile="p90")]
        for c in runtime.candidates
        if c.latency is not None
    }
    if not found:
        raise DataError(f"no latency is known on {runtime.device.title}: calibrate it")
    return found


def _one_by_one(arrays: Sequence[Array]) -> Iterator[Any]:
    """Samples (n, ...) at batch 1, without end."""
    singles = [tuple(array[i : i + 1] for array in arrays) for i in range(len(arrays[0]))]
    return itertools.cycle(single[0] if len(arrays) == 1 else single for single in singles)


def _serve(runtime: Runtime, inputs: Iterator[Any], budget: Budget) -> object:
    return runtime(next(inputs), budget)


def proxy_error(runtime: Runtime, profile: str) -> float | None:
    """The relative error of the device's hybrid proxy at a profile's measured p50."""
    table = runtime.table
    if table is None or table.proxy is None or profile in table.predicted:
        return None
    if profile not in table.profiles:
        return None
    guess = table.proxy.predict(work_of(runtime.artifact, runtime.executions[profile]))
    return mape(np.array([guess]), np.array([table.profiles[profile].p50]))


def audit_rows(
    runtime: Runtime,
    right: Mapping[str, Array] | None,
    checked: int = 2000,
    *,
    live: Mapping[str, Latency] | None = None,
    rounds: int = 50,
    seed: int = 0,
) -> list[Row]:
    """Random pairs of budgets, one looser than the other, and what the choices broke (paper F.6).

    `right` (n,) says which test samples each profile answers rightly: an accuracy violation is a
    looser budget that got a profile less accurate beyond the 95% paired interval; without `right`
    it is None. A latency violation is one that got a profile that is faster than the tighter
    budget's, beyond the calibrated intervals. A budget violation is a tighter budget that some
    profile keeps by its live p50, and its choice does not; `live` are measured if not given.
    """
    if checked < 1:
        raise SpecError(f"at least 1 pair has to be checked, got {checked}")
    names = [candidate.profile for candidate in runtime.candidates]
    missing = [name for name in names if right is not None and name not in right]
    if missing:
        raise DataError(f"which answers are right is not known of {', '.join(missing)}")
    if live is None:
        live = _times(runtime, rounds)
    pairs = draw_pairs(runtime, checked, seed)
    broken = [broken_promises(runtime, tight, loose, right) for tight, loose in pairs]
    return [
        {
            "method": "t3c", "checked": checked,
            "accuracy_violations": None if right is None else sum("accuracy" in b for b in broken),
            "latency_violations": sum("cost" in b for b in broken),
            "budget_violations": sum(_missed(runtime, tight, live) for tight, _ in pairs),
        }
    ]  # fmt: skip


def _missed(runtime: Runtime, budget: Budget, live: Mapping[str, Latency]) -> bool:
    """Whether some profile keeps the budget by its live p50, and the one chosen does not."""
    latency, size, _ = budget.limits
    bytes_of = runtime.artifact.manifest.size_bytes
    kept = {n for n, now in live.items() if now.p50 <= latency and bytes_of(n) / 1e6 <= size}
    return bool(kept) and runtime.choose(budget).profile not in kept


def device_rows(
    artifact: Artifact,
    devices: Sequence[tuple[str, int]] = DEVICES,
    rounds: int = 50,
) -> list[Row]:
    """p50 and p90 of each profile on each (engine, threads), profiles in turns.

    Devices come one after the other; what an engine does not run, or an engine that is not there,
    is None.
    """
    rows = []
    for engine, threads in devices:
        times = _times_on(artifact, engine, threads, rounds)
        for profile in artifact.manifest.chain:
            latency = times.get(profile.name)
            rows.append(
                {
                    "profile": profile.name, "device": f"{engine}-{threads}t",
                    "p50": None if latency is None else latency.p50,
                    "p90": None if latency is None else latency.p90,
                }
            )  # fmt: skip
    return rows


def _times_on(artifact: Artifact, engine: str, threads: int, rounds: int) -> dict[str, Latency]:
    try:
        runtime = Runtime(artifact, engine, threads)
    except (EngineError, MissingExtraError):
        return {}
    with runtime:
        return _times(runtime, rounds)


def _times(runtime: Runtime, rounds: int) -> dict[str, Latency]:
    """Latencies of the profiles that the engine runs, at batch 1, in turns."""
    with pinned(runtime.engine.threads):
        return time_sessions(_sessions(runtime), example_inputs(runtime.artifact), rounds)


def _sessions(runtime: Runtime) -> dict[str, Session]:
    """Those of the profiles that the engine runs."""
    found = {}
    for profile in runtime.chain:
        if profile.name in runtime.refused:
            continue
        try:
            found[profile.name] = runtime.session(profile.name)
        except EngineError:
            continue
    return found


def energy_rows(
    runtime: Runtime,
    inputs: Any,
    runs: int = 200,
    *,
    meter: EnergyMeter | Unavailable | None = None,
    seconds: float = 1.0,
) -> tuple[list[Row], str]:
    """Energy of a call beside its p50, by profile (paper F.8); or none, and why there is none.

    `runs` calls or more, over `seconds` or more, are metered, and what the machine uses when idle
    is taken off.
    """
    found = find_meter() if meter is None else meter
    if isinstance(found, Unavailable):
        return [], found.reason
    with pinned(runtime.engine.threads):
        arrays = runtime.check(inputs)
        sessions = _sessions(runtime)
        times = time_sessions(sessions, arrays, runs)
        idle = idle_watts(found, seconds)
        rows = [
            {
                "profile": name, "runs": runs, "p50": times[name].p50,
                "energy_mj": energy_per_call(found, call, idle, seconds=seconds, least=runs),
            }
            for name, call in runners(sessions, arrays).items()
        ]  # fmt: skip
    return rows, ""
