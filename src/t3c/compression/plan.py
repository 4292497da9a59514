"""What a run will take, estimated before it begins and again when training is due."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from t3c.compression.data import TRAIN, Parts
from t3c.compression.source import Source
from t3c.errors import SpecError
from t3c.nn.inputs import call, select

LEAST_MINUTES = 1.0
# Seconds a stage takes besides, and forward passes of one sample in torch that it is worth; of
# those after training also how often it runs each sample of a part on the engine, where a sample
# takes about a quarter of what it takes in torch. Fitted by eye to runs of ResNet-50, MiniLM and
# the digits' network.
FIXED = {"convert": 5.0, "time": 12.0, "int8": 3.0, "round": 2.0, "export": 28.0, "measure": 4.0}
PASSES = {
    "convert": 1500, "time": 1000, "int8": 900, "round": 800, "export": 6500, "measure": 600
}  # fmt: skip
RUNS = {"export": (("placement", 13.0), ("certificate", 8.0)), "measure": (("test", 9.0),)}
ENGINE = 0.25
AFTER = ("export", "measure")  # training
COPIES = 10  # of the weights that are in memory at once: model, original, factors, gradients


@dataclass(frozen=True)
class RunPlan:
    """Minutes in all, the seconds of each stage, and what is held in memory.

    `started` is the clock when the run began, `forward` what one sample takes in torch.
    """

    minutes: float
    seconds: Mapping[str, float]
    gigabytes: float
    samples: Mapping[str, int]
    started: float
    forward: float = 0.0

    @property
    def training(self) -> float:
        """Return what the other stages leave of the minutes, as estimated at first."""
        return max(0.0, 60 * self.minutes - sum(self.seconds.values()))

    def left(self, spent: float) -> float:
        """Return the seconds there are for training once `spent` are gone."""
        after = sum(self.seconds[name] for name in AFTER)
        return max(0.0, 60 * self.minutes - spent - after)

    @property
    def epochs(self) -> float:
        """Return how often training goes through its samples, about: a step is three passes."""
        passes = self.training / (3 * self.forward) if self.forward else 0.0
        return passes / self.samples[TRAIN]

    def lines(self) -> tuple[str, ...]:
        """Return the plan as a user reads it."""
        stages = ", ".join(f"{name} {value / 60:.1f}" for name, value in self.seconds.items())
        samples = ", ".join(f"{count:,} {name}" for name, count in self.samples.items())
        plan = f"plan: {self.minutes:g} minutes: train {self.training / 60:.1f}, {stages}"
        return f"{plan}; at most about {self.gigabytes:.1f} GB of memory", f"samples: {samples}"


def plan_run(source: Source, parts: Parts, minutes: float, started: float) -> RunPlan:
    """Estimate the stages by a forward pass; training has what they leave of the minutes.

    `started` is the clock when reading began.
    """
    if not minutes >= LEAST_MINUTES:
        raise SpecError(f"minutes must be at least {LEAST_MINUTES:g}, got {minutes:g}")
    one, samples = _forward_seconds(source, parts), parts.sizes()
    seconds = {"read": time.monotonic() - started}
    for name, fixed in FIXED.items():
        runs = sum(times * samples[part] for part, times in RUNS.get(name, ()))
        seconds[name] = fixed + one * (PASSES[name] + ENGINE * runs)
    weights = sum(p.numel() * p.element_size() for p in source.model.parameters())
    held = sum(getattr(parts, name).bytes for name in samples)
    gigabytes = (COPIES * weights + 2 * held) / 1e9 + 1.0
    return RunPlan(minutes, seconds, gigabytes, samples, started, one)


@torch.no_grad()
def _forward_seconds(source: Source, parts: Parts) -> float:
    """Return what one sample takes in torch, in a small batch, after a first one."""
    batch = select(parts.train.inputs, slice(0, 8))
    call(source.model, batch)
    started = time.perf_counter()
    call(source.model, batch)
    return (time.perf_counter() - started) / 8
