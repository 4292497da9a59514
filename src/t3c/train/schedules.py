"""What changes over a run: learning rate, coefficients, temperature, draws (paper B.2, E.2)."""

from __future__ import annotations

import math

import numpy as np
import torch

from t3c.nn.masks import temperature_at
from t3c.nn.weight import Relaxation
from t3c.train.config import ANNEAL, BROAD, CONTROLLER_WEIGHTS, RAMP, TrainConfig

RAMPED = ("distill", "augment")


def learning_rate_share(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine to zero, as a share of the peak."""
    warm = max(1, round(config.warmup * config.steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, config.steps - warm)))


def coefficient(term: str, step: int, config: TrainConfig) -> float:
    """What a term weighs at a step: its weight, linearly ramped up where the paper ramps it."""
    weight = (config.objective.weights | CONTROLLER_WEIGHTS)[term]
    if term in RAMPED:
        return weight * _rise(step, RAMP * config.steps)
    if term == "certificate":
        return weight * _rise(step, ANNEAL * config.steps)
    if term == "entropy":  # to explore first
        return weight * (1 - step / config.steps)
    return weight


def broad_share(step: int, config: TrainConfig) -> float:
    """gamma_t: how much of the draws is still broad (paper E.2)."""
    if config.curriculum == "aimed":
        return 0.0
    if config.curriculum != "profiles":
        return 1.0
    return max(BROAD, 1 - _rise(step, ANNEAL * config.steps))


def temperature(step: int, config: TrainConfig) -> float:
    """Of masks and of the controller's choices: it falls by half in every third of the run."""
    return temperature_at(step, max(1, config.steps // 3))


def relaxation(step: int, config: TrainConfig) -> Relaxation | None:
    """The masks of a step, if ranks are relaxed."""
    if not config.masks:
        return None
    return Relaxation(temperature(step, config), noise(config.seed, step, "masks"))


def draws(seed: int, step: int, what: str) -> np.random.Generator:
    """Random numbers of one step for one purpose: they depend on nothing that ran before, so a run
    that goes on from any step draws what it would have drawn."""
    return np.random.default_rng([seed, step, *what.encode()])


def noise(seed: int, step: int, what: str) -> torch.Generator:
    """`draws` for tensors."""
    return torch.Generator().manual_seed(int(draws(seed, step, what).integers(2**62)))


def _rise(step: int, over: float) -> float:
    return min(1.0, step / over)
