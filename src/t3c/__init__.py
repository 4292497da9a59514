"""T3C: one trained network, one artifact, any budget.

Importing this starts nothing: names are resolved when they are used, torch with the first that
needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from t3c.errors import T3CError
from t3c.version import __version__

if TYPE_CHECKING:
    from t3c.artifact.trim import trim
    from t3c.compression.door import compress
    from t3c.convert import (
        ElasticConfig,
        elasticize_,
        order_units_,
        plan_conversion,
        settle_,
        smooth_,
    )
    from t3c.evidence.artifact import certify_artifact
    from t3c.evidence.certify import CertifyConfig
    from t3c.evidence.original import write_original
    from t3c.exporter import ExportConfig, export
    from t3c.runtime.calls import Request
    from t3c.runtime.monitor import MonitorConfig
    from t3c.runtime.runtime import Runtime, load
    from t3c.runtime.signals import Pressure
    from t3c.spec import Budget, Certificate, Goal, ImageSpec, LayerPoint, Profile, TextSpec
    from t3c.train import BlockConfig, Keep, Objective, TrainConfig, fit, reconstruct

__all__ = [
    "BlockConfig",
    "Budget",
    "Certificate",
    "CertifyConfig",
    "ElasticConfig",
    "ExportConfig",
    "Goal",
    "ImageSpec",
    "Keep",
    "LayerPoint",
    "MonitorConfig",
    "Objective",
    "Pressure",
    "Profile",
    "Request",
    "Runtime",
    "T3CError",
    "TextSpec",
    "TrainConfig",
    "__version__",
    "certify_artifact",
    "compress",
    "elasticize_",
    "export",
    "fit",
    "load",
    "order_units_",
    "plan_conversion",
    "reconstruct",
    "settle_",
    "smooth_",
    "trim",
    "write_original",
]

_LAZY = {
    "Budget": "t3c.spec",
    "Certificate": "t3c.spec",
    "Goal": "t3c.spec",
    "ImageSpec": "t3c.spec",
    "LayerPoint": "t3c.spec",
    "Profile": "t3c.spec",
    "TextSpec": "t3c.spec",
    "Pressure": "t3c.runtime.signals",
    "Request": "t3c.runtime.calls",
    "trim": "t3c.artifact.trim",
    "CertifyConfig": "t3c.evidence.certify",
    "ElasticConfig": "t3c.convert",
    "MonitorConfig": "t3c.runtime.monitor",
    "certify_artifact": "t3c.evidence.artifact",
    "compress": "t3c.compression.door",
    "write_original": "t3c.evidence.original",
    "elasticize_": "t3c.convert",
    "order_units_": "t3c.convert",
    "plan_conversion": "t3c.convert",
    "settle_": "t3c.convert",
    "smooth_": "t3c.convert",
    "ExportConfig": "t3c.exporter",
    "export": "t3c.exporter",
    "Runtime": "t3c.runtime.runtime",
    "load": "t3c.runtime.runtime",
    "BlockConfig": "t3c.train",
    "Keep": "t3c.train",
    "Objective": "t3c.train",
    "TrainConfig": "t3c.train",
    "fit": "t3c.train",
    "reconstruct": "t3c.train",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 't3c' has no attribute {name!r}")
    try:
        module = importlib.import_module(_LAZY[name])
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "tensorly"):
            raise
        from t3c.errors import MissingExtraError

        raise MissingExtraError(missing.name, "train") from missing
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
