"""Tensors of the Open Inference Protocol: arrays as JSON and as raw bytes behind it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from t3c.artifact.manifest import TensorEntry
from t3c.engines.protocol import Array
from t3c.errors import DataError, SpecError
from t3c.serve.messages import (
    DATATYPES,
    InferResponse,
    InputTensor,
    Parameters,
    Scalar,
    TensorMetadata,
)

HEADER_LENGTH = "inference-header-content-length"
NAMES = {dtype: name for name, dtype in DATATYPES.items()}


def check_known(what: str, given: Parameters, known: str) -> None:
    """Refuse parameters of a tensor that are not served: a budget is one of the request."""
    unknown = [name for name in given if name != known]
    if unknown:
        raise SpecError(f"{what}: unknown parameter {unknown[0]!r}: there is {known}")


def read_tensors(inputs: Sequence[InputTensor], raw: memoryview) -> dict[str, Array]:
    """Return the arrays of inputs; those that are not in the JSON are in `raw`, in order."""
    found: dict[str, Array] = {}
    for tensor in inputs:
        check_known(f"input {tensor.name!r}", tensor.parameters, "binary_data_size")
        if tensor.name in found:
            raise DataError(f"input {tensor.name!r} is there twice")
        dtype = DATATYPES.get(tensor.datatype)
        if dtype is None:
            raise DataError(
                f"input {tensor.name!r}: datatype {tensor.datatype[:20]!r} is not served: "
                f"there are {', '.join(DATATYPES)}"
            )
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            found[tensor.name] = _from_json(tensor, np.dtype(dtype))
        else:
            found[tensor.name] = _from_bytes(tensor, np.dtype(dtype), size, raw)
            raw = raw[found[tensor.name].nbytes :]
    if raw:
        raise DataError(f"{len(raw)} bytes behind the last tensor")
    return found


def _from_bytes(tensor: InputTensor, dtype: np.dtype[Any], size: Scalar, raw: memoryview) -> Array:
    wanted = math.prod(tensor.shape) * dtype.itemsize
    if tensor.data is not None:
        raise DataError(f"input {tensor.name!r}: has data and binary_data_size")
    if isinstance(size, bool) or size != wanted or len(raw) < wanted:
        raise DataError(
            f"input {tensor.name!r}: shape {tensor.shape} of {tensor.datatype} is {wanted} bytes, "
            f"binary_data_size says {size}, {len(raw)} are there"
        )
    return np.frombuffer(raw[:wanted], dtype.newbyteorder("<")).reshape(tensor.shape)


def _from_json(tensor: InputTensor, dtype: np.dtype[Any]) -> Array:
    if tensor.data is None:
        raise DataError(f"input {tensor.name!r}: no data")
    try:
        array = np.asarray(tensor.data)
        numbers = array.dtype.kind in ("biuf" if dtype.kind != "b" else "b")
        if not numbers or (dtype.kind in "iu" and array.dtype.kind == "f"):
            raise DataError(f"input {tensor.name!r}: data is not of {tensor.datatype}")
        if array.size != math.prod(tensor.shape):
            raise DataError(
                f"input {tensor.name!r}: {array.size} numbers do not fill the shape {tensor.shape}"
            )
        if dtype.kind in "iu" and array.size:
            bounds = np.iinfo(dtype)
            if array.min() < bounds.min or array.max() > bounds.max:
                raise DataError(f"input {tensor.name!r}: numbers are out of {tensor.datatype}")
        with np.errstate(over="ignore"):
            return array.astype(dtype).reshape(tensor.shape)
    except (ValueError, OverflowError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"input {tensor.name!r}: data is no array of numbers") from error


def metadata(entry: TensorEntry) -> TensorMetadata:
    """Return an input or output as clients are told of it; -1 is a size that may vary."""
    shape = [size if isinstance(size, int) else -1 for size in entry.shape]
    return TensorMetadata(name=entry.name, datatype=NAMES[entry.dtype], shape=shape)


def encode_response(
    answer: InferResponse, arrays: Sequence[Array], binary: frozenset[str]
) -> tuple[bytes, dict[str, str]]:
    """Return the body of an answer whose outputs are these arrays, and its headers."""
    outputs, tail = [], []
    for output, array in zip(answer.outputs, arrays, strict=True):
        if "*" in binary or output.name in binary:
            raw = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
            tail.append(raw)
            outputs.append(output.model_copy(update={"parameters": {"binary_data_size": len(raw)}}))
        else:
            outputs.append(output.model_copy(update={"data": _plain(array)}))
    whole = answer.model_copy(update={"outputs": outputs})
    head = json.dumps(whole.model_dump(exclude_none=True), allow_nan=False).encode()
    if not tail:
        return head, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
    return b"".join([head, *tail]), headers


def _plain(array: Array) -> list[Any]:
    """Return numbers, flat; JSON has no others than finite ones."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError("the answer holds NaN or infinite values: ask for it as binary data")
    found: list[Any] = array.ravel().tolist()
    return found
