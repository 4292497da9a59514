"""The gauge-aligned form: W (m, n) of rank k as k of its own columns and how they make the others.

In numpy: the runtime aligns when it loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Aligned:
    """W[:, kept] = expand (m, k) and W[:, others] = expand @ rest (k, n - k): k(m + n - k) numbers.

    `condition` is that of the absorbed block, its rows at unit length; NaN where it was not asked
    for.
    """

    expand: Floats
    rest: Floats
    kept: Indices
    others: Indices
    condition: float


def align(
    expand: Floats,
    reduce: Floats,
    *,
    kept: Indices | None = None,
    worst_condition: float | None = 1e4,
) -> Aligned | None:
    """The aligned form of expand (m, k) @ reduce (k, n), k <= n; None if no block is fit for it.

    The k columns of `reduce` whose block is absorbed are `kept`, rising, or chosen by
    column-pivoted QR. Pivoting bounds the entries of `rest` by 2^(k-1); those of weights stay
    within a few units. None means that the block is singular or worse conditioned than
    `worst_condition`, which is not looked at if that is None.
    """
    # The rows' lengths cancel in `rest`, and a steep spectrum is no bad block.
    lengths = np.linalg.norm(reduce.astype(np.float64), axis=1)
    rows = reduce / np.where(lengths > 0, lengths, 1.0)[:, None]
    kept = np.sort(_pivots(rows)) if kept is None else kept
    others = np.setdiff1d(np.arange(reduce.shape[1]), kept)
    block = rows[:, kept]
    condition = np.nan if worst_condition is None else float(np.linalg.cond(block))
    if worst_condition is not None and not condition <= worst_condition:
        return None
    try:
        rest = np.linalg.solve(block, rows[:, others])
    except np.linalg.LinAlgError:
        return None
    absorbed = (expand * lengths) @ block
    dtype = expand.dtype
    return Aligned(absorbed.astype(dtype), rest.astype(dtype), kept, others, condition)


def gauge(rest: Floats, kept: Indices) -> Floats:
    """[I R] (k, n) with its columns in place: what h = kept + rest @ others multiplies by."""
    k = len(kept)
    whole = np.zeros((k, k + rest.shape[1]), rest.dtype)
    whole[:, np.setdiff1d(np.arange(whole.shape[1]), kept)] = rest
    whole[:, kept] = np.eye(k)
    return whole


def _pivots(rows: Floats) -> Indices:
    """The k columns that column-pivoted QR of `rows` (k, n) takes first."""
    k = len(rows)
    basis, kept = np.zeros((k, k)), np.zeros(k, np.int64)
    energy = np.square(rows).sum(axis=0)  # of what each column has outside the basis
    for j in range(k):
        kept[j] = energy.argmax()
        vector = rows[:, kept[j]]
        for _ in range(2):  # one pass of Gram-Schmidt leaves rounding errors in the basis
            vector = vector - basis[:j].T @ (basis[:j] @ vector)
        basis[j] = vector / max(float(np.linalg.norm(vector)), np.finfo(np.float64).tiny)
        energy -= np.square(basis[j] @ rows)
        energy[kept[: j + 1]] = -np.inf
    return kept
