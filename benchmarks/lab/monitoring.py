"""The monitor on streams of pictures, usual ones and shifted ones; what the penalty costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from lab.certified import Made
from lab.spectral_penalty import SpectralPenalty
from lab.zoo.corrupt import CORRUPTIONS
from lab.zoo.imagenet_sample import imagenet_as_cifar
from t3c.artifact.ledger import Certification
from t3c.artifact.shift import ShiftModel
from t3c.certify.drift import Array
from t3c.certify.penalty import first_order_penalty
from t3c.certify.slices import sample_keys
from t3c.convert import elasticize_
from t3c.device.measured import time_sessions
from t3c.engines import Session
from t3c.evidence.shift import seen_features
from t3c.graph.watching import watched
from t3c.runtime.monitor import Monitor
from t3c.train import Objective, TrainConfig, fit, terms
from t3c.zoo.digits import DigitsNet, load_digits, train_digits

SHIFTED, STREAMS, LENGTH, GOOD = 300, 200, 500, 200
Say = Callable[[str], object]
Row = dict[str, Any]


def monitor_rows(made: Made, say: Say, rate: float = 1e-3) -> list[Row]:
    """False alarms on streams of the pool, and samples until shifts of it are noticed."""
    found = _latest(made)
    name = _middle(made)
    model, session = found.monitors[name], _watched(made, found, name)
    used = {key for part in ("scaling", "certificate") for key in found.keys[part]}
    images = _unused(made, used)
    usual = seen_features(session, [images.numpy()])
    rows = [_false_alarms(model, usual, rate, made.subject.name)]
    shifts = {n: change(images[:SHIFTED]) for n, change in CORRUPTIONS.items()}
    shifts["another data set"] = imagenet_as_cifar(SHIFTED)
    for kind, moved in shifts.items():
        say(f"monitor: {kind}")
        features = seen_features(session, [moved.numpy()])
        rows.append(_delay(model, usual, features, rate, made.subject.name, kind))
    return rows


def watching_row(made: Made, rounds: int = 300) -> Row:
    """What a watched call takes beside one that is not, in turns."""
    name = _middle(made)
    sessions = {
        "plain": made.runtime.session(name),
        "watched": _watched(made, _latest(made), name),
    }
    times = time_sessions(sessions, [value[:1] for value in made.pool], rounds)
    return {
        "model": made.subject.name, "profile": name, "rounds": rounds,
        "p50_ratio": times["watched"].p50 / times["plain"].p50,
        "p90_ratio": times["watched"].p90 / times["plain"].p90,
    }  # fmt: skip


def _latest(made: Made) -> Certification:
    ledger = made.runtime.artifact.ledger()
    assert ledger is not None
    return ledger.certifications[-1]


def _middle(made: Made) -> str:
    return made.names[len(made.names) // 2]


def _watched(made: Made, found: Certification, name: str) -> Session:
    runtime, model = made.runtime, found.monitors[name]
    thresholds = dict(zip(model.tensors, model.thresholds, strict=True))
    graph = watched(runtime.graph(runtime.chain[name]), model.tensors, thresholds)
    return runtime.engine.compile(graph)


def _unused(made: Made, used: set[str]) -> Tensor:
    """Samples of the pool that the certificate was not made of."""
    fresh = [i for i, key in enumerate(sample_keys(made.pool)) if key not in used]
    return torch.from_numpy(made.pool[0][fresh])


def _false_alarms(model: ShiftModel, usual: Array, rate: float, name: str) -> Row:
    rng = np.random.default_rng(0)
    length = min(LENGTH, len(usual))
    alarms = []
    for stream in range(STREAMS):
        monitor = Monitor(model, rate=rate, seed=stream)
        order = rng.permutation(len(usual))[:length]
        alarms.append(sum(monitor.observe(usual[[i]]) is not None for i in order))
    seen = np.array(alarms) / length
    return {
        "model": name, "stream": "as calibrated", "streams": STREAMS, "samples": length,
        "stated_rate": rate, "alarms_per_sample": float(seen.mean()),
        "standard_error": float(seen.std(ddof=1) / np.sqrt(STREAMS)), "noticed": None,
        "after_p50": None, "after_p90": None,
    }  # fmt: skip


def _delay(model: ShiftModel, usual: Array, moved: Array, rate: float, name: str, kind: str) -> Row:
    """Samples from the shift to the alarm, after some good ones; without one, all there are."""
    rng = np.random.default_rng(1)
    delays, noticed = [], 0
    for stream in range(STREAMS):
        monitor = Monitor(model, rate=rate, seed=stream)
        monitor.observe(usual[rng.permutation(len(usual))[:GOOD]])
        delay = len(moved)
        for count, index in enumerate(rng.permutation(len(moved)), start=1):
            if monitor.observe(moved[[index]]) is not None:
                delay, noticed = count, noticed + 1
                break
        delays.append(delay)
    return {
        "model": name, "stream": kind, "streams": STREAMS, "samples": len(moved),
        "stated_rate": rate, "alarms_per_sample": None, "standard_error": None,
        "noticed": noticed / STREAMS, "after_p50": float(np.median(delays)),
        "after_p90": float(np.quantile(delays, 0.9)),
    }  # fmt: skip


def penalty_rows(blocks: int = 12, steps: int = 10) -> list[Row]:
    """What the certificate penalty adds to a mean training step, in turns with none."""
    digits = load_digits()
    torch.manual_seed(0)
    model = DigitsNet()
    train_digits(model, digits, 1, 0)
    elasticize_(model, digits.train[0][:2], calibration=digits.loader(64))
    kinds = {
        "none": TrainConfig(steps=steps),
        "first_order": TrainConfig(steps=steps, objective=Objective(certificate=0.1)),
        "spectral": TrainConfig(steps=steps, objective=Objective(certificate=1e-3)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    batches = list(digits.loader(32))
    for _ in range(blocks + 1):
        for name, config in kinds.items():
            penalty = SpectralPenalty() if name == "spectral" else first_order_penalty
            started = time.perf_counter()
            with patch.object(terms, "first_order_penalty", penalty):
                fit(model, batches, config)
            seconds[name].append(time.perf_counter() - started)
    plain = np.array(seconds["none"][1:])
    return [
        {
            "penalty": name, "blocks": blocks, "steps": steps,
            "mean_ratio": float(np.mean(times[1:]) / plain.mean()),
            "p50_ratio": float(np.median(np.array(times[1:]) / plain)),
            "p90_ratio": float(np.quantile(np.array(times[1:]) / plain, 0.9)),
        }
        for name, times in seconds.items()
        if name != "none"
    ]  # fmt: skip
