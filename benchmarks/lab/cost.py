"""Whether budgets hold: proxies, their transfer, and audits, on several models and devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from lab.uniform import uniform_artifact
from lab.zoo.imagenet_sample import imagenet_sample, resnet50
from lab.zoo.minilm import minilm, sst2_sentences
from t3c.artifact.devices import DeviceTable, GridRow
from t3c.artifact.reader import Artifact
from t3c.convert import ElasticConfig
from t3c.cost.proxy import PROXIES, Proxy, mape, refit
from t3c.device.calibrate import calibrate
from t3c.device.measured import Watch
from t3c.device.predict import vector_of
from t3c.engines import Engine, open_engine
from t3c.errors import DisturbedError
from t3c.evidence.audit import Audit, audit
from t3c.nn.inputs import Inputs, batches_of, select
from t3c.runtime.runtime import load
from t3c.spec import MAX_BITS
from t3c.zoo.digits import DigitsNet, load_digits, train_digits

DEVICES = (("openvino", 2), ("openvino", 1), ("onnxruntime", 2), ("onnxruntime", 1))
# Ranks low enough for times to span a wide range; how good such profiles are is not asked here.
ELASTIC = ElasticConfig(store_ratio=1.0)
SHARES = (1 / 8, 1 / 4, 3 / 8, 5 / 8, 1.0)
PATIENCE, PAUSE_SECONDS = 3, 20.0
Say = Callable[[str], object]
T = TypeVar("T")
Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model, data for its factors, and data for its activation ranges."""

    name: str
    model: nn.Module
    statistics: Sequence[Inputs]
    calibration: Inputs


def subjects() -> dict[str, Callable[[], Subject]]:
    """The digits network, MiniLM-L6 and ResNet-50, made when asked for."""
    return {"digits": _digits, "minilm-l6": _minilm, "resnet-50": _resnet50}


def make_artifact(subject: Subject, path: Path) -> Artifact:
    """An artifact of profiles at even shares of rank, as far down as ranks go; not certified."""
    points = [(share, MAX_BITS) for share in SHARES]
    return uniform_artifact(
        path, subject.model, subject.statistics, subject.calibration, points, ELASTIC
    )


@dataclass(frozen=True)
class Calibrated:
    """A device's table of one model, and how long it took."""

    model: str
    table: DeviceTable
    minutes: float

    @property
    def device(self) -> str:
        return name_of(self.table)


def name_of(table: DeviceTable) -> str:
    """A device of this machine in short."""
    return f"{table.device.engine}-{table.device.threads}t"


def calibrate_all(artifact: Artifact, model: str, say: Say, watch: Watch) -> list[Calibrated]:
    """The artifact calibrated on each device, one after the other."""
    found = []
    for engine, threads in DEVICES:
        say(f"calibrating {model} on {engine}, {threads} threads")
        started = open_engine(engine, threads)

        def timed(started: Engine = started) -> Calibrated:
            start = time.perf_counter()
            table = calibrate(artifact, started, watch=watch)
            return Calibrated(model, table, (time.perf_counter() - start) / 60)

        found.append(patiently(timed, say))
        artifact.add_device(found[-1].table)
    return found


def patiently(measure: Callable[[], T], say: Say) -> T:
    """A measurement, begun again after a pause where the machine was too busy for it."""
    for _ in range(PATIENCE):
        try:
            return measure()
        except DisturbedError as busy:
            say(f"{busy}; beginning again")
            time.sleep(PAUSE_SECONDS)
    return measure()


def audit_all(path: Path, budgets: int, say: Say) -> dict[str, Audit]:
    """An audit of the artifact on each device, by the name of the device."""
    found = {}
    for engine, threads in DEVICES:
        say(f"auditing {path.stem} on {engine}, {threads} threads")
        runtime = load(path, engine, threads)
        assert runtime.table is not None
        found[name_of(runtime.table)] = patiently(partial(audit, runtime, budgets), say)
    return found


def proxy_row(one: Calibrated) -> Row:
    """How the proxies do on the device they were fitted on."""
    held = [row.ms for row in one.table.grid if row.held_out]
    hybrid, flops, per_byte = (one.table.proxies[name] for name in PROXIES)
    shortest, longest = min(held), max(held)
    return {
        "model": one.model, "device": one.device, "fitted": hybrid.fitted, "held_out": len(held),
        "p50_from": shortest, "p50_to": longest, "span": longest / shortest,
        "hybrid": hybrid.mape, "flops": flops.mape,
        "bytes": per_byte.mape, "constant": hybrid.constant_mape, "r2": hybrid.r2,
        "minutes": one.minutes,
    }  # fmt: skip


def held_out_rows(one: Calibrated) -> list[Row]:
    """Each held-out profile: what was measured, and what the hybrid proxy says."""
    assert one.table.proxy is not None
    return [
        {
            "model": one.model, "device": one.device, "measured": row.ms,
            "predicted": one.table.proxy.predict(vector_of(row)),
        }
        for row in one.table.grid
        if row.held_out
    ]  # fmt: skip


def transfer_rows(tables: Sequence[Calibrated]) -> list[Row]:
    """The first device's proxies on the others: as they are, and fitted to three profiles."""
    donor = tables[0]
    rows = []
    for name in PROXIES:
        row: Row = {"model": donor.model, "proxy": name, "trained_on": donor.device}
        row[donor.device] = donor.table.proxies[name].mape
        for other in tables[1:]:
            row[other.device] = _error(donor.table.proxies[name], other.table.grid)
        for other in tables[1:]:
            points = three_points(other.table)
            fitted = refit(
                donor.table.proxies[name], [vector_of(p) for p in points], [p.ms for p in points]
            )
            row[f"{other.device}_refit"] = _error(fitted, other.table.grid)
        rows.append(row)
    return rows


def three_points(table: DeviceTable) -> list[GridRow]:
    """The smallest, the middle and the largest of the artifact's own profiles."""
    own = table.grid[: len(table.profiles)]
    return [own[0], own[len(own) // 2], own[-1]]


def _error(proxy: Proxy, grid: Sequence[GridRow]) -> float:
    held = [row for row in grid if row.held_out]
    guess = np.array([proxy.predict(vector_of(row)) for row in held])
    return mape(guess, np.array([row.ms for row in held]))


def audit_rows(model: str, audits: Mapping[str, Audit]) -> list[Row]:
    """What each audit found."""
    return [
        {
            "model": model, "device": device, "budgets": found.budgets,
            "monotone": found.monotone_violations, "order": found.latency_order_violations,
            "reachable": found.reachable, "over_p50": found.over["p50"],
            "over_p90": found.over["p90"], "speed": found.speed,
        }
        for device, found in audits.items()
    ]  # fmt: skip


def profile_rows(tables: Sequence[Calibrated]) -> list[Row]:
    """The profiles on each device: p50 [p90] beside one another (paper, cross-device table)."""
    rows = []
    for name in tables[0].table.profiles:
        row: Row = {"model": tables[0].model, "profile": name}
        for one in tables:
            latency = one.table.profiles[name]
            row[one.device] = f"{latency.p50:.3g} [{latency.p90:.3g}]"
        start = tables[0].table.starts.get(name)
        row["cold_ms"] = None if start is None else start.cold_ms
        row["peak_mb"] = None if start is None or not start.peak_bytes else start.peak_bytes / 1e6
        rows.append(row)
    return rows


def _digits() -> Subject:
    digits = load_digits()
    torch.manual_seed(0)
    model = DigitsNet()
    train_digits(model, digits, 3, 0)
    batches = [inputs for inputs, _ in digits.loader(64)]
    return Subject("digits", model, batches, digits.calibration[0][:60])


def _resnet50(statistics: int = 32, calibration: int = 16) -> Subject:
    images, _ = imagenet_sample(statistics + calibration, part="tune")
    batches = list(batches_of(images[:statistics], 16))
    return Subject("resnet-50", resnet50(), batches, images[statistics:])


def _minilm(statistics: int = 64, calibration: int = 32) -> Subject:
    sentences, _ = sst2_sentences("train", statistics + calibration, 48)
    known = select(sentences, slice(0, statistics))
    rest = select(sentences, slice(statistics, statistics + calibration))
    return Subject("minilm-l6", minilm(), list(batches_of(known, 32)), rest)
