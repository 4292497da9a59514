"""What training once takes, next to training one int8 network: step beside step, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from lab.baselines.finetune import adamw, descend
from lab.baselines.qat8 import build_kernels, prepare_qat
from t3c.convert import elasticize_, state_of
from t3c.nn.inputs import call, evaluating
from t3c.nn.view import at, elastic_weights
from t3c.train import TrainConfig
from t3c.train.augment import Augmentation
from t3c.train.loop import advance
from t3c.train.losses import loss_of
from t3c.train.processes import Processes
from t3c.train.run import Run, moving
from t3c.train.terms import NetworkTerms
from t3c.zoo.subjects import SUBJECTS, Subject

WARM = 2
Say = Callable[[str], object]


def overhead_rows(
    subject: str, batch: int, rounds: int, say: Say, config: TrainConfig | None = None
) -> list[dict[str, Any]]:
    """Seconds of one step of each, round-robin, with the ratio; and what is done once before."""
    found = SUBJECTS[subject]()
    say(f"{subject}: preparing qat8")
    build_kernels()
    started = time.perf_counter()
    quantized = prepare_qat(found.model, found.train[0][:64])
    before = {"qat8": time.perf_counter() - started}
    optimizer = adamw(quantized, learning_rate=1e-4)
    say(f"{subject}: preparing t3c")
    started = time.perf_counter()
    elasticize_(found.model, found.example, calibration=found.statistics)
    config = config or TrainConfig(steps=rounds + WARM, augmentations=("crop_and_flip",))
    run = Run(found.model, found.batches(batch, config.seed), config, None)
    before["t3c"] = time.perf_counter() - started
    network = _network(found, config)
    loss, batches = loss_of("classification"), iter(found.batches(batch, 1))
    times: dict[str, list[float]] = {"t3c": [], "qat8": []}
    with evaluating(found.model), moving(found.model, config):
        for step in range(rounds + WARM):
            inputs, target = next(batches)
            times["t3c"].append(timed(lambda: advance(run, network, Processes(), step)))  # noqa: B023
            times["qat8"].append(
                timed(lambda: descend(optimizer, loss(call(quantized, inputs), target)))  # noqa: B023
            )
    ratios = np.array(times["t3c"][WARM:]) / np.array(times["qat8"][WARM:])
    rows = []
    for name, seconds in times.items():
        mine = np.array(seconds[WARM:])
        rows.append(
            {
                "model": subject, "training": name, "batch": batch, "steps": len(mine),
                "p50_s": float(np.median(mine)), "p90_s": float(np.quantile(mine, 0.9)),
                "ratio_p50": float(np.median(ratios)) if name == "t3c" else 1.0,
                "ratio_p90": float(np.quantile(ratios, 0.9)) if name == "t3c" else 1.0,
                "once_s": before[name],
            }
        )  # fmt: skip
    return rows


def parts_rows(subject: str, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Where a step goes: shares of its parts, each timed apart at the profile in the middle."""
    found = SUBJECTS[subject]()
    elasticize_(found.model, found.example, calibration=found.statistics)
    config = TrainConfig(steps=rounds)
    run = Run(found.model, found.batches(batch, config.seed), config, None)
    model, profile = found.model, list(run.profiles)[len(run.profiles) // 2]
    inputs, _ = run.next()
    weights = elastic_weights(model)
    times: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(timed(work))

    kept: dict[str, torch.Tensor] = {}

    def forward() -> None:
        kept["loss"] = call(model, inputs).square().mean()

    def compose() -> None:
        for name, weight in weights.items():
            weight.weight_at(profile.points[name])

    def backward() -> None:
        kept["loss"].backward()  # type: ignore[no-untyped-call]

    with evaluating(model), moving(model, config):
        for _ in range(rounds + 1):
            with torch.no_grad():
                note("original forward", lambda: call(state_of(model).original, inputs))
            note("quantizing and composing weights", compose)
            with at(model, profile):
                note("profile forward", forward)
                note("profile backward", backward)
            note("optimizer", run.optimizer.step)
            run.optimizer.zero_grad(set_to_none=True)
    seconds = {name: float(np.median(values[1:])) for name, values in times.items()}
    seconds["profile forward"] -= seconds["quantizing and composing weights"]
    total = sum(seconds.values())
    return [
        {"model": subject, "part": name, "seconds": value, "share": value / total}
        for name, value in seconds.items()
    ]


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _network(found: Subject, config: TrainConfig) -> NetworkTerms:
    model: nn.Module = found.model
    last: Mapping[str, float] = {}
    return NetworkTerms(
        model, loss_of("classification"), config, Augmentation(config.augmentations, found.image),
        Processes(), last,
    )  # fmt: skip
