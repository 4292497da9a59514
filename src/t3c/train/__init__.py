"""Training once, for every profile."""

from t3c.train.blocks import BlockConfig, reconstruct
from t3c.train.config import Objective, TrainConfig
from t3c.train.loop import History, fit
from t3c.train.run import Keep

__all__ = ["BlockConfig", "History", "Keep", "Objective", "TrainConfig", "fit", "reconstruct"]
