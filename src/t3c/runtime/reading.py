"""Files as inputs: arrays, and pictures where the artifact says how to read them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from t3c.artifact.manifest import ModelEntry
from t3c.engines.protocol import Array
from t3c.errors import DataError
from t3c.spec import ImageSpec

# What Pillow raises for files that are no pictures, or broken or hostile ones.
PICTURE_ERRORS = (
    UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError,
)  # fmt: skip
MOST_PIXELS = 100_000_000


def read_input(path: Path, model: ModelEntry) -> Any:
    """What a runtime takes, from an .npy, .npz or picture file; one sample gets a batch axis."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix == ".npz":
        given = read_arrays(path)
        if len(model.inputs) == 1 and len(given) == 1:
            given = {model.inputs[0].name: next(iter(given.values()))}
        missing = [e.name for e in model.inputs if e.name not in given]
        if missing:
            raise DataError(f"{path}: no array {', '.join(missing)}: it holds {', '.join(given)}")
        return {e.name: _batched(given[e.name], len(e.shape)) for e in model.inputs}
    if len(model.inputs) != 1:
        names = ", ".join(e.name for e in model.inputs)
        raise DataError(f"{path}: the model has several inputs: give an .npz with {names}")
    rank = len(model.inputs[0].shape)
    if path.suffix == ".npy":
        return _batched(_load(path), rank)
    if model.image is None:
        raise DataError(f"{path}: the artifact does not say how to read pictures: give an .npy")
    return _batched(read_picture(path, model.image), rank)


def read_samples(path: Path, model: ModelEntry) -> tuple[dict[str, Array], dict[str, Array]]:
    """The inputs of many samples from an .npz, and the arrays beside them.

    Arrays are named as the model's inputs; a single input may be called x.
    """
    arrays = read_arrays(path)
    names = [entry.name for entry in model.inputs]
    if len(names) == 1 and names[0] not in arrays and "x" in arrays:
        arrays[names[0]] = arrays.pop("x")
    missing = [name for name in names if name not in arrays]
    if missing:
        raise DataError(
            f"{path}: no array {', '.join(missing)}: it holds {', '.join(arrays) or 'none'}"
        )
    return {name: arrays.pop(name) for name in names}, arrays


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        with path.open("rb") as file:  # numpy leaves it open where the archive is cut off
            loaded = np.load(file, allow_pickle=False)
            if not hasattr(loaded, "files"):
                raise DataError(f"{path}: not an .npz file")
            return {name: loaded[name] for name in loaded.files}
    except DataError:
        raise
    except (ValueError, EOFError, MemoryError, zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{path}: not readable: {error}") from error


def read_picture(source: Path | IO[bytes], spec: ImageSpec) -> Array:
    """A picture as float32 (channels, height, width), from a file or from one that is open."""
    name = source if isinstance(source, Path) else "the picture"
    try:
        with Image.open(source) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                raise DataError(f"{name}: more than {MOST_PIXELS:,} pixels")
            mode = "L" if len(spec.mean) == 1 else "RGB"
            size = (spec.width, spec.height)
            resized = picture.convert(mode).resize(size, Image.Resampling.BILINEAR)
    except DataError:
        raise
    except PICTURE_ERRORS as error:
        raise DataError(f"{name}: neither an array nor a picture: {error}") from error
    values = np.asarray(resized, dtype=np.float32).reshape(spec.height, spec.width, -1) / 255
    mean, std = (np.asarray(v, dtype=np.float32) for v in (spec.mean, spec.std))
    values = (values - mean) / std
    return np.ascontiguousarray(values.transpose(2, 0, 1), dtype=np.float32)


def _load(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError, MemoryError, zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{path}: not readable: {error}") from error


def _batched(array: Array, rank: int) -> Array:
    return array[None] if array.ndim == rank - 1 else array
