"""A recipe that takes moments, for the subject of the fixture `subject`."""

from __future__ import annotations

from t3c.convert import ElasticConfig
from t3c.spec import Goal
from t3c.train import TrainConfig
from t3c.zoo.recipe import Recipe

RECIPE = Recipe(
    "digits", batch=16, samples=48,
    elastic=ElasticConfig(
        bits=(2, 4, 8), rank_fractions=(0.5,), include=("blocks.[01].conv?", "head")
    ),
    train=TrainConfig(
        steps=4, learning_rate=0.01, goal=Goal(profiles=3, worst_drift=9.0),
    ),
)  # fmt: skip
TESTED = 90


class StopError(Exception):
    """A run that is cut off."""
