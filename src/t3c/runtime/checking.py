"""Inputs as a model takes them, or one clear error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t3c.artifact.manifest import STATE, ModelEntry, TensorEntry
from t3c.engines.protocol import Array
from t3c.errors import DataError

ISFINITE = np.isfinite
Plain = tuple[np.dtype[Any], tuple[int, ...], bool]  # type, sizes behind the batch, if it is float


class Checking:
    """The inputs and states of a model, and whether what is given fits them."""

    def __init__(self, model: ModelEntry) -> None:
        self.inputs = list(model.inputs)
        self.states = [
            TensorEntry(name=s.input, dtype=s.dtype, shape=s.shape) for s in model.states
        ]
        self._plain = _plain(self.inputs)

    def arrays(self, inputs: Any) -> list[Array]:
        """The inputs as arrays of the model's own shapes and types.

        States may be given behind them, all or none; a session takes none for empty ones.
        """
        if type(inputs) is np.ndarray and self._plain is not None:
            dtype, tail, floats = self._plain
            fits = inputs.dtype is dtype and inputs.shape[1:] == tail and inputs.size
            # Most are such, and are found to be by little that is written in Python: after a
            # network has run, each function of it takes a microsecond or more, whatever it does.
            if fits and inputs.ndim and (not floats or b"\0" not in ISFINITE(inputs).tobytes()):
                return [inputs]
        entries = self.inputs
        several = isinstance(inputs, Mapping | tuple)
        if self.states and several and len(inputs) == len(entries) + len(self.states):
            entries = entries + self.states
        if isinstance(inputs, Mapping):
            if set(inputs) != {e.name for e in entries}:
                raise DataError(f"inputs must be {', '.join(e.name for e in entries)}")
            given = [inputs[e.name] for e in entries]
        else:
            given = list(inputs) if isinstance(inputs, tuple) else [inputs]
        if len(given) != len(entries):
            raise DataError(f"{len(entries)} inputs are needed, got {len(given)}")
        arrays = [_checked(entry, value) for entry, value in zip(entries, given, strict=True)]
        if len({len(array) for array in arrays}) > 1:
            raise DataError(f"inputs differ in batch size: {[len(array) for array in arrays]}")
        _check_axes(entries, arrays)
        return arrays


def _plain(entries: Sequence[TensorEntry]) -> Plain | None:
    """The only input, where all its sizes behind the batch are fixed."""
    if len(entries) != 1 or entries[0].shape[:1] != (None,):
        return None
    tail = tuple(size for size in entries[0].shape[1:] if isinstance(size, int))
    dtype = np.dtype(entries[0].dtype)
    return (dtype, tail, dtype.kind == "f") if len(tail) + 1 == len(entries[0].shape) else None


def _finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _check_axes(entries: Sequence[TensorEntry], arrays: Sequence[Array]) -> None:
    """Refuse a named axis that has one size here and another there."""
    sizes: dict[str, tuple[int, str]] = {}
    for entry, array in zip(entries, arrays, strict=True):
        for name, size in zip(entry.shape, array.shape, strict=True):
            if not isinstance(name, str):
                continue
            known, first = sizes.setdefault(name, (size, entry.name))
            if size != known:
                raise DataError(
                    f"the {name} is {known} in input {first!r} and {size} in {entry.name!r}"
                )


def _checked(entry: TensorEntry, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"input {entry.name!r}: not an array: {error}") from error
    wanted = np.dtype(entry.dtype)
    fits = array.ndim == len(entry.shape) and all(
        not isinstance(size, int) or size == got
        for size, got in zip(entry.shape, array.shape, strict=False)
    )
    if not fits:
        shape = tuple("batch" if size is None else size for size in entry.shape)
        raise DataError(
            f"input {entry.name!r}: shape {array.shape} does not fit ({', '.join(map(str, shape))})"
        )
    if len(array) == 0 or (array.size == 0 and not entry.name.startswith(STATE)):
        raise DataError(f"input {entry.name!r}: empty {'axis' if len(array) else 'batch'}")
    if array.dtype != wanted:
        if array.dtype.kind not in "fiub" or not np.can_cast(array.dtype, wanted, "same_kind"):
            raise DataError(f"input {entry.name!r}: dtype {array.dtype} does not fit {wanted}")
        with np.errstate(over="ignore"):
            array = array.astype(wanted)
    if not _finite(array):
        raise DataError(f"input {entry.name!r} holds NaN or infinite values")
    return array
