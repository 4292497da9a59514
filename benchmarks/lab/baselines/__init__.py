"""What one would use instead: each baseline one file, all in the same harness.

Each is called with a `Task`. Those that are `TRAINED`, and those that look at the inputs of layers,
need the original in torch; `ptq8` and `ptq8w` can do with ONNX and samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from lab.baselines.baseline import Baseline, Task, plain

__all__ = ["BASELINES", "TRAINED", "Baseline", "Task"]


def _lazy(name: str) -> Callable[..., Baseline]:
    """The function of the module of that name, imported when it is called: not all need torch."""

    def make(task: Task, **options: Any) -> Baseline:
        made: Baseline = getattr(import_module(f"lab.baselines.{name}"), name)(task, **options)
        return made

    return make


BASELINES: dict[str, Callable[..., Baseline]] = {
    "ptq8": partial(plain, "ptq8"),
    "ptq8w": partial(plain, "ptq8w"),
    "ptq4": _lazy("ptq4"),
    "qat8": _lazy("qat8"),
    "mpqat": _lazy("mpqat"),
    "magprune": _lazy("magprune"),
    "moveprune": _lazy("moveprune"),
    "lrft": _lazy("lrft"),
    "loracomp": _lazy("loracomp"),
    "sparsegpt": _lazy("sparsegpt"),
    "kdptq": _lazy("kdptq"),
}
TRAINED = frozenset({"qat8", "mpqat", "magprune", "moveprune", "lrft", "loracomp", "kdptq"})
