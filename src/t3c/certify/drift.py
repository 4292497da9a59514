"""Drift: the distance of a profile's outputs from the original's, sample by sample."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from t3c.errors import DataError

Array = npt.NDArray[np.float64]


def absolute_drift(outputs: npt.ArrayLike, original: npt.ArrayLike) -> Array:
    """||z' - z|| of each sample (n,), over all but the batch axis."""
    a, b = np.asarray(outputs, dtype=np.float64), np.asarray(original, dtype=np.float64)
    if a.shape != b.shape:
        raise DataError(f"outputs of shape {a.shape} cannot be compared to {b.shape}")
    return np.asarray(np.linalg.norm((a - b).reshape(len(a), -1), axis=1))


def relative_drift(outputs: npt.ArrayLike, original: npt.ArrayLike) -> Array:
    """||z' - z|| / ||z|| of each sample (n,)."""
    b = np.asarray(original, dtype=np.float64)
    size = np.linalg.norm(b.reshape(len(b), -1), axis=1)
    return np.asarray(absolute_drift(outputs, original) / np.maximum(size, 1e-12))
