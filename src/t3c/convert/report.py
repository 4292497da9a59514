"""What `elasticize_` did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from t3c.convert.layer import LayerPlan
from t3c.convert.plan import ConversionPlan, Params


@dataclass(frozen=True)
class Report:
    """Tell what was converted and what not; `error` is the relative difference of the output.

    `balance` are the layers whose factors were balanced, with the rounding error that is left,
    relative to that before.
    """

    plan: ConversionPlan
    error: float
    balance: Mapping[str, float] = field(default_factory=dict)

    @property
    def converted(self) -> tuple[LayerPlan, ...]:
        return self.plan.layers

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        return self.plan.skipped

    @property
    def params(self) -> Params:
        return self.plan.params

    def __str__(self) -> str:
        return f"{self.plan}\nlargest change of the example's output: {self.error:.1e}"
