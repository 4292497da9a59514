"""Which profile a step trains (paper 3.2, B.2, E.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from t3c.convert import LayerPlan, units
from t3c.spec import LayerPoint, Level, Profile, ProfileChain
from t3c.train.config import ANNEAL, TrainConfig
from t3c.train.schedules import broad_share, draws

ALPHA = 0.75  # of the Beta distribution that levels come from


def draw(
    step: int, plans: Sequence[LayerPlan], targets: ProfileChain | None, config: TrainConfig
) -> Profile:
    """The profile of a step: broad early on, then more and more one of the targets."""
    rng = draws(config.seed, step, "profile")
    broad = rng.random() < broad_share(step, config)
    if targets is not None and not broad:
        return targets.profiles[int(rng.integers(len(targets)))]
    least = 0.0
    if config.curriculum == "falling":
        least = max(0.0, 1 - step / max(1.0, ANNEAL * config.steps))
    return sample_profile(plans, rng, least)


def sample_profile(
    plans: Sequence[LayerPlan], rng: np.random.Generator, least: float = 0.0
) -> Profile:
    """A profile around a level of rank and a level of bits, each from Beta(0.75, 0.75) (B.2).

    Levels go from `least`, of 0 to 1, to the top.
    """

    def pick(choices: Sequence[int], level: float) -> int:
        level = least + (1 - least) * level
        index = level * (len(choices) - 1) + rng.uniform(-0.75, 0.75)
        return choices[int(np.clip(round(index), 0, len(choices) - 1))]

    rank_level, bit_level = rng.beta(ALPHA, ALPHA, size=2)
    points: dict[str, LayerPoint] = {}
    for unit in units(plans):
        levels, bits = ({getattr(p, axis) for p in unit.points()} for axis in ("level", "bits"))
        level = Level(pick(sorted(levels), rank_level), pick(sorted(bits), bit_level))
        points |= unit.layer_points(level)
    return Profile("sampled", points)
