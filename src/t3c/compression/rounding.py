"""Round weights to their nearest codes or with second-order compensation, whichever drifts less."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from torch import nn

from t3c.certify.drift import relative_drift
from t3c.compression.choice import Choice, best
from t3c.compression.data import Data
from t3c.compression.teach import GUARD, drift_of
from t3c.convert import settle_, state_of
from t3c.evidence.served import Run, chunks
from t3c.nn.inputs import Inputs
from t3c.spec import MAX_BITS, Kind, LayerPoint, Profile

VIEWS = (5, 6, MAX_BITS)  # bits that codes are chosen for, and compared at
NEAREST, SETTLED = "nearest", "second-order"
AT_ONCE = 16  # samples


def compare_roundings(
    model: nn.Module, batches: Sequence[Inputs], validation: Data, int8: float | None
) -> Choice | None:
    """Return the better rounding of an elastic model's linear layers; None if it has too few.

    Both are compared by the drift of all layers at full rank, in the mean over a few bits. In most
    bits none may drift more than the nearest codes do, or than plain `int8` does, which `max` is to
    be no worse than.
    """
    plans = state_of(model).plan.layers
    if sum(plan.spec.kind is Kind.LINEAR for plan in plans) < 2:
        return None
    views = [
        Profile(f"{bits} bits", {p.spec.name: LayerPoint(p.ranks[-1], bits) for p in plans})
        for bits in VIEWS
    ]
    settled = copy.deepcopy(model)
    settle_(settled, batches, VIEWS)
    drifts = {
        way: [drift_of(one, [view], validation) for view in views]
        for way, one in ((NEAREST, model), (SETTLED, settled))
    }
    tried = {way: sum(found) / len(found) for way, found in drifts.items()}
    most, limit = drifts[SETTLED][-1], GUARD * max(drifts[NEAREST][-1], int8 or 0.0)
    bits = ", ".join(map(str, VIEWS))
    choice = best("rounding of weights", tried, "drift", f"in the mean over {bits} bits")
    if choice.taken == SETTLED and most > limit:
        why = f"in {MAX_BITS} bits second-order drifts {most:.3g}, more than {limit:.3g}"
        return choice.model_copy(update={"taken": NEAREST, "why": why})
    return choice


def drift_on(run: Run, reference: Run, data: Data) -> float:
    """Return the mean relative drift of `run` from `reference` on samples."""
    parts = chunks(data.arrays(), AT_ONCE)
    return float(np.concatenate([relative_drift(run(p), reference(p)) for p in parts]).mean())
