"""Many budgets of one artifact: which profile serves each, and what one gets for it."""

from __future__ import annotations

import numpy as np

from lab.variants import MB, Comparison, Row
from t3c.runtime.runtime import Runtime
from t3c.spec import Budget

BUDGETS = 16  # of each kind


def sweep_rows(runtime: Runtime, compared: Comparison, count: int = BUDGETS) -> list[Row]:
    """One row for each budget: latencies first, then sizes, from tight to loose.

    Beside the profile that is served stands what was measured of it on the test part.
    """
    assert runtime.table is not None
    p50 = [latency.p50 for latency in runtime.table.profiles.values()]
    sizes = [runtime.artifact.manifest.size_bytes(p.name) / MB for p in runtime.chain]
    asked = [
        (f"{limit:.3g} ms", Budget(latency_ms=float(limit)))
        for limit in np.linspace(min(p50), 1.05 * max(p50), count)
    ]
    asked += [
        (f"{limit:.3g} MB", Budget(size_mb=float(limit)))
        for limit in np.linspace(min(sizes), max(sizes), count)
    ]
    measured = {row["name"]: row for row in compared.rows()}
    rows = []
    for text, budget in asked:
        profile = runtime.choose(budget).profile
        rows.append({**measured[f"t3c-{profile}"], "budget": text, "profile": profile})
    return rows
