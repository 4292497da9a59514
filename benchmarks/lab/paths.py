"""Choose from a nested path of allocations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from t3c.control.knapsack import Allocation
from t3c.errors import BudgetError


def within(path: Sequence[Allocation], budget: float) -> Allocation:
    """Return the last allocation of a nested path that costs at most `budget`, else the first."""
    if not path or math.isnan(budget):
        raise BudgetError(f"no allocation of {len(path)} for a budget of {budget}")
    return next((a for a in reversed(path) if a.cost <= budget), path[0])
