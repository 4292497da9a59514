"""The values that travel between the folders: frozen, validated at construction, no torch."""

from t3c.spec.budget import Budget
from t3c.spec.figures import (
    QUANTILES,
    Bound,
    Certificate,
    Cost,
    ImageSpec,
    Latency,
    Metric,
    TextSpec,
)
from t3c.spec.goal import Goal
from t3c.spec.layer import CORRECTION_BITS, WIDTHS, Factorization, Form, Kind, LayerSpec
from t3c.spec.points import (
    MAX_BITS,
    MIN_BITS,
    LayerPoint,
    Level,
    Profile,
    ProfileChain,
    check_menu,
)  # fmt: skip

__all__ = [
    "CORRECTION_BITS",
    "MAX_BITS",
    "MIN_BITS",
    "QUANTILES",
    "WIDTHS",
    "Bound",
    "Budget",
    "Certificate",
    "Cost",
    "Factorization",
    "Form",
    "Goal",
    "ImageSpec",
    "Kind",
    "Latency",
    "LayerPoint",
    "LayerSpec",
    "Level",
    "Metric",
    "Profile",
    "ProfileChain",
    "TextSpec",
    "check_menu",
]
