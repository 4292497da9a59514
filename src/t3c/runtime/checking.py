"""Inputs as a model takes them, or one clear error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t3c.artifact.manifest import STATE, ModelEntry, TensorEntry
from t3c.errors import DataError
from t3c.runtime.engines.protocol import Array


class Checking:
    """The inputs and states of a model, and whether what is given fits them."""

    def __init__(self, model: ModelEntry) -> None:
        self.inputs = list(model.inputs)
        self.states = [
            TensorEntry(name=s.input, dtype=s.dtype, shape=s.shape) for s in model.states
        ]
        self._plain = _plain(self.inputs)

    def __call__(self, inputs: Any) -> list[Array]:
        """The inputs as arrays of the model's own shapes and types.

        States may be given behind them, all or none; a session takes none for empty ones.
        """
        if self._plain and type(inputs) is np.ndarray and _as_is(inputs, *self._plain):
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


def _plain(entries: Sequence[TensorEntry]) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """The type of the only input and its sizes behind the batch, where all of them are fixed."""
    if len(entries) != 1 or entries[0].shape[:1] != (None,):
        return None
    tail = tuple(size for size in entries[0].shape[1:] if isinstance(size, int))
    return (np.dtype(entries[0].dtype), tail) if len(tail) + 1 == len(entries[0].shape) else None


def _as_is(array: Array, dtype: np.dtype[Any], tail: tuple[int, ...]) -> bool:
    """Whether there is nothing to say of an array: most are such, and this is quickly seen."""
    fits = array.ndim > 0 and array.shape[1:] == tail and array.dtype == dtype and array.size > 0
    return fits and (dtype.kind != "f" or bool(np.isfinite(array).all()))


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
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(f"input {entry.name!r} holds NaN or infinite values")
    return array
