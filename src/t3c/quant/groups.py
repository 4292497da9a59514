"""Groups of columns, each with a finer grid than its row: where activations are float.

A group's grid is a whole number of 255ths of its row's, at least one. Codes are made on it, so the
prefixes of one file still are all views, and each view's scale of a row goes times those shares.
Weights that lie beside an outlier keep most of their bits: rounding stories15M to 4 bits costs half
of what rows alone cost, and a byte for each group.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from t3c.spec import Kind, LayerSpec

# Columns of a group, the first that divides a row. OpenVINO's kernels of 8 bits take 1.4 times as
# long at 32 and no longer at 48 and 64, those of 4 bits a fifth longer at 96 and 128.
SIZES = (64, 48)
STEPS = 255  # of a row's grid, that shares are counted in

Shares = npt.NDArray[np.uint8]


def group_of(spec: LayerSpec) -> int | None:
    """Return the columns that share a grid in a layer's weight; None where rows have one each."""
    return next((size for size in SIZES if divides(size, spec)), None)


def divides(size: int, spec: LayerSpec) -> bool:
    """Return whether groups of this size fill the rows of a matrix that is read in columns."""
    matrix = spec.kind in (Kind.LINEAR, Kind.EMBEDDING) and spec.groups == 1 and not spec.narrows
    return matrix and 1 <= size < spec.in_channels and spec.in_channels % size == 0


def group_scale(scale: npt.NDArray[np.float32], shares: Shares) -> npt.NDArray[np.float32]:
    """Return the scales (rows, groups) of a view that has the scales (rows,)."""
    return (scale[:, None] * (shares / np.float32(STEPS))).astype(np.float32)
