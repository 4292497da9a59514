"""Drift: how far a profile's outputs are from the original's, sample by sample."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from t3c.errors import DataError

Array = npt.NDArray[np.float64]
Measure = Callable[[npt.ArrayLike, npt.ArrayLike], npt.ArrayLike]


def absolute_drift(outputs: npt.ArrayLike, original: npt.ArrayLike) -> Array:
    """||z' - z|| of each sample (n,), over all but the batch axis."""
    a, b = _pair(outputs, original)
    return np.asarray(np.linalg.norm((a - b).reshape(len(a), -1), axis=1))


def relative_drift(outputs: npt.ArrayLike, original: npt.ArrayLike) -> Array:
    """||z' - z|| / ||z|| of each sample (n,)."""
    a, b = _pair(outputs, original)
    size = np.linalg.norm(b.reshape(len(b), -1), axis=1)
    return np.asarray(absolute_drift(a, b) / np.maximum(size, 1e-12))


def kl_drift(outputs: npt.ArrayLike, original: npt.ArrayLike) -> Array:
    """KL(softmax(z) || softmax(z')) of each sample (n,), in nats, from logits (n, ..., classes).

    A sample with more than one vector of logits has the mean of theirs.
    """
    a, b = (_log_softmax(logits) for logits in _logits(outputs, original))
    divergence = np.sum(np.exp(b) * (b - a), axis=-1).reshape(len(a), -1)
    # Rounding may take the divergence of equal distributions a little below 0.
    return np.asarray(np.maximum(divergence, 0.0).mean(axis=1))


def flips(outputs: npt.ArrayLike, original: npt.ArrayLike) -> Array:
    """The share of each sample's answers (n,) that differ, from logits (n, ..., classes)."""
    a, b = _logits(outputs, original)
    changed = a.argmax(axis=-1) != b.argmax(axis=-1)
    return np.asarray(changed.reshape(len(a), -1).mean(axis=1))


MEASURES: dict[str, Callable[[npt.ArrayLike, npt.ArrayLike], Array]] = {
    "relative": relative_drift,
    "absolute": absolute_drift,
    "kl": kl_drift,
    "flip": flips,
}


def measured(measure: str | Measure, outputs: npt.ArrayLike, original: npt.ArrayLike) -> Array:
    """Drift (n,) by the name of a measure or by one's own, finite and at least 0.

    One's own takes outputs and the original's, (n, ...) each, and gives a number a sample.
    """
    if isinstance(measure, str):
        if measure not in MEASURES:
            raise DataError(f"unknown measure {measure!r}: it is one of {', '.join(MEASURES)}")
        return MEASURES[measure](outputs, original)
    a, b = _pair(outputs, original)
    name = getattr(measure, "__name__", type(measure).__name__)
    drifts = np.asarray(measure(a, b), dtype=np.float64)
    if drifts.shape != (len(a),):
        raise DataError(f"measure {name} gave shape {drifts.shape} for {len(a)} samples")
    if not (np.isfinite(drifts).all() and (drifts >= 0).all()):
        raise DataError(f"measure {name} gave a drift that is not finite or under 0")
    return drifts


def _pair(outputs: npt.ArrayLike, original: npt.ArrayLike) -> tuple[Array, Array]:
    """Both as float64, of one shape, with samples, finite."""
    a, b = np.asarray(outputs, dtype=np.float64), np.asarray(original, dtype=np.float64)
    if a.shape != b.shape:
        raise DataError(f"outputs of shape {a.shape} cannot be compared to {b.shape}")
    if not a.ndim or not a.size:
        raise DataError(f"outputs of shape {a.shape} have no samples to compare")
    for name, values in (("outputs", a), ("the original's outputs", b)):
        if not np.isfinite(values).all():
            bad = int(np.count_nonzero(~np.isfinite(values).reshape(len(a), -1).all(axis=1)))
            raise DataError(f"{name} are not finite in {bad} of {len(a)} samples")
    return a, b


def _logits(outputs: npt.ArrayLike, original: npt.ArrayLike) -> tuple[Array, Array]:
    a, b = _pair(outputs, original)
    if a.ndim < 2 or a.shape[-1] < 2:
        raise DataError(f"outputs of shape {a.shape} are no logits: (samples, ..., classes)")
    return a, b


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
