"""Estimate a run before it begins: minutes of each stage, memory, samples."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from t3c.compression.data import Parts
from t3c.compression.source import Source
from t3c.errors import SpecError
from t3c.nn.inputs import call, select

LEAST_MINUTES = 1.0
# Forward passes of one sample that a stage is taken for, and seconds besides: first guesses, too
# low for ResNet-50 (converting took 227 s there, timing 398 s).
PASSES = {"convert": 1600, "time": 2500, "export": 9000, "measure": 4000}
FIXED = {"convert": 5.0, "time": 20.0, "export": 30.0, "measure": 10.0}
COPIES = 10  # of the weights that are in memory at once: model, original, factors, gradients


@dataclass(frozen=True)
class RunPlan:
    """Minutes in all, of the stages and of training, and what is held in memory."""

    minutes: float
    seconds: Mapping[str, float]
    training: float
    gigabytes: float
    samples: Mapping[str, int]

    def lines(self) -> tuple[str, ...]:
        """Return the plan as a user reads it."""
        stages = ", ".join(f"{name} {value / 60:.1f}" for name, value in self.seconds.items())
        samples = ", ".join(f"{count:,} {name}" for name, count in self.samples.items())
        plan = f"plan: {self.minutes:g} minutes: train {self.training / 60:.1f}, {stages}"
        return f"{plan}; at most about {self.gigabytes:.1f} GB of memory", f"samples: {samples}"


def plan_run(source: Source, parts: Parts, minutes: float, spent: float) -> RunPlan:
    """Estimate the stages by a forward pass; training has what they leave of the minutes.

    `spent` are the seconds that reading took.
    """
    if not minutes >= LEAST_MINUTES:
        raise SpecError(f"minutes must be at least {LEAST_MINUTES:g}, got {minutes:g}")
    one = _forward_seconds(source, parts)
    seconds = {name: FIXED[name] + count * one for name, count in PASSES.items()}
    training = max(0.0, 60 * minutes - spent - sum(seconds.values()))
    weights = sum(p.numel() * p.element_size() for p in source.model.parameters())
    held = sum(getattr(parts, name).bytes for name in parts.sizes())
    return RunPlan(
        minutes, seconds, training, (COPIES * weights + 2 * held) / 1e9 + 1.0, parts.sizes()
    )


def training_seconds(plan: RunPlan) -> float:
    """Return what is left for training once the other stages have had their estimate."""
    return plan.training


@torch.no_grad()
def _forward_seconds(source: Source, parts: Parts) -> float:
    """Return what one sample takes in torch, in a small batch, after a first one."""
    batch = select(parts.train.inputs, slice(0, 8))
    call(source.model, batch)
    started = time.perf_counter()
    call(source.model, batch)
    return (time.perf_counter() - started) / 8
