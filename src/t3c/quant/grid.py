"""The grid of 8 bits that an activation's range stands for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LEAST = 1e-6  # of a range; what is nearer to zero is exact on any grid


def activation_grid(
    low: float, high: float
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.integer]]:
    """Return scale and zero point of a range: one that begins at 0 is unsigned, one that reaches as
    far to both sides of it is signed and symmetric, any other has a zero point."""
    most = max(-low, high)
    if most <= LEAST:  # a tensor of zeros is exact on any grid
        low, high, most = (low if low >= 0 else -1.0), 1.0, 1.0
    if low >= 0:
        return np.array(most / 255, np.float32), np.zeros((), dtype=np.uint8)
    if low == -high:
        return np.array(most / 127, np.float32), np.zeros((), dtype=np.int8)
    high = max(high, 0.0)
    scale = (high - low) / 255
    return np.array(scale, np.float32), np.array(round(-low / scale), dtype=np.uint8)
