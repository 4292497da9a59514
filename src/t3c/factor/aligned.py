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

    `condition` is that of the absorbed block, its rows at unit length.
    """

    expand: Floats
    rest: Floats
    kept: Indices
    others: Indices
    condition: float


def align(expand: Floats, reduce: Floats, *, worst_condition: float = 1e4) -> Aligned | None:
    """The aligned form of expand (m, k) @ reduce (k, n), k <= n; None if no block is fit for it.

    The k columns of `reduce` whose block is absorbed are chosen by column-pivoted QR. Pivoting
    bounds the entries of `rest` by 2^(k-1); those of weights stay within a few units. None means
    that the block is singular or worse conditioned than `worst_condition`.
    """
    # The rows' lengths cancel in `rest`, and a steep spectrum is no bad block.
    lengths = np.linalg.norm(reduce.astype(np.float64), axis=1)
    rows = reduce / np.where(lengths > 0, lengths, 1.0)[:, None]
    kept = np.sort(_pivots(rows))
    others = np.setdiff1d(np.arange(reduce.shape[1]), kept)
    block = rows[:, kept]
    condition = float(np.linalg.cond(block))
    if not condition <= worst_condition:
        return None
    absorbed = (expand * lengths) @ block
    rest = np.linalg.solve(block, rows[:, others])
    dtype = expand.dtype
    return Aligned(absorbed.astype(dtype), rest.astype(dtype), kept, others, condition)


def aligned_weight(aligned: Aligned) -> Floats:
    """The weight (m, n) that an aligned form stands for."""
    k, n = len(aligned.kept), len(aligned.kept) + len(aligned.others)
    gauge = np.zeros((k, n), aligned.rest.dtype)
    gauge[:, aligned.kept], gauge[:, aligned.others] = np.eye(k), aligned.rest
    weight: Floats = aligned.expand @ gauge
    return weight


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
