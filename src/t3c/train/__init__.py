"""Training once, for every profile."""

from t3c.train.loop import TrainConfig, fit

__all__ = ["TrainConfig", "fit"]
