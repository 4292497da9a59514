"""What one would use instead: each baseline one file, the same signature, the same harness."""

from __future__ import annotations

from collections.abc import Callable

from t3c.baselines.baseline import Baseline
from t3c.baselines.ptq8 import ptq8

__all__ = ["BASELINES", "Baseline"]

BASELINES: dict[str, Callable[..., Baseline]] = {"ptq8": ptq8}
