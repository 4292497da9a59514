"""What one would use instead: each baseline one file, all in the same harness.

`BASELINES` are made of the original in ONNX and samples, `TRAINED` of the torch model and batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from t3c.baselines.baseline import Baseline
from t3c.baselines.ptq8 import ptq8

if TYPE_CHECKING:
    from t3c.baselines.qat8 import Trained

__all__ = ["BASELINES", "TRAINED", "Baseline"]


def _qat8(*arguments: Any, **options: Any) -> Trained:
    """Imported when it is called: the others do without torch."""
    from t3c.baselines.qat8 import qat8

    return qat8(*arguments, **options)


BASELINES: dict[str, Callable[..., Baseline]] = {"ptq8": ptq8}
TRAINED: dict[str, Callable[..., Trained]] = {"qat8": _qat8}
