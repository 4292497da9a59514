"""The Open Inference Protocol, version 2: requests and answers as JSON and as raw tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from t3c.artifact.manifest import LARGEST_SAMPLE, TensorEntry
from t3c.engines.protocol import Array
from t3c.errors import DataError, SpecError
from t3c.serve.refusals import TooLargeError
from t3c.spec import Budget

HEADER_LENGTH = "inference-header-content-length"
DATATYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16",
    "FP32": "float32", "FP64": "float64",
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DATATYPES.items()}
MOST_AXES, MOST_TENSORS, MOST_KEYS = 8, 64, 64
LIMITS = ("latency_ms", "size_mb", "energy_mj", "drift")
BUDGET = (*LIMITS, "quantile")
OWN = (*BUDGET, "profile", "deadline_ms", "timeout", "binary_data_output")
PASSED_OVER = ("priority",)  # what Triton's clients may send, and nothing here depends on

Scalar = StrictBool | int | float | str
Parameters = dict[str, Scalar]
Size = Annotated[int, Field(ge=1, lt=2**31)]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Sent(Message):
    """What a client sends: nothing in it is passed over."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="forbid")


class InputTensor(Sent):
    """One input; its numbers are in `data`, nested or flat, or behind the JSON."""

    name: str = Field(max_length=256)
    shape: list[Size] = Field(min_length=1, max_length=MOST_AXES)
    datatype: str = Field(json_schema_extra={"enum": list(DATATYPES)})
    parameters: Parameters = Field(default_factory=dict)
    data: list[Any] | None = None


class WantedOutput(Sent):
    """An output that is asked for; with `binary_data` it comes behind the JSON."""

    name: str = Field(max_length=256)
    parameters: Parameters = Field(default_factory=dict)


class InferRequest(Sent):
    """What is sent to `infer`. The budget is in `parameters`: latency_ms, size_mb, energy_mj,
    drift, quantile; or a profile by name; and deadline_ms (or Triton's timeout, microseconds)."""

    id: str | None = Field(default=None, max_length=256)
    parameters: Parameters = Field(
        default_factory=dict,
        json_schema_extra={"examples": [{"latency_ms": 5.0}, {"drift": 0.05, "deadline_ms": 50}]},
    )
    inputs: list[InputTensor] = Field(min_length=1, max_length=MOST_TENSORS)
    outputs: list[WantedOutput] | None = Field(default=None, max_length=MOST_TENSORS)


class OutputTensor(Message):
    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters = Field(default_factory=dict)
    data: list[Any] | None = None


class InferResponse(Message):
    """An answer; `parameters` name the profile, its certificate and how long it took."""

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, Scalar | None]
    outputs: list[OutputTensor]


class TensorMetadata(Message):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Message):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(Message):
    name: str
    version: str
    extensions: list[str]


class Asked(NamedTuple):
    """A request as the server sees it; `binary` are the outputs that are wanted as raw bytes."""

    id: str | None
    inputs: dict[str, Array]
    budget: Budget | None
    profile: str | None
    deadline_ms: float | None
    wanted: list[str] | None
    binary: frozenset[str]
    warnings: tuple[str, ...]


def parse_request(
    body: bytes, header_length: str | None, json_bytes: int, numbers: int = LARGEST_SAMPLE
) -> Asked:
    """The request of a body, or DataError; `json_bytes` is how much of it may be JSON, `numbers`
    how many a tensor may have."""
    head, raw = _split(body, header_length)
    if len(head) > json_bytes:
        raise TooLargeError(
            f"{len(head)} bytes of JSON, at most {json_bytes}: send tensors as binary data"
        )
    request = parse_message(InferRequest, head)
    for tensor in request.inputs:
        if math.prod(tensor.shape) > numbers:
            raise DataError(
                f"input {tensor.name!r}: shape {tensor.shape} is over {numbers} numbers"
            )
    inputs = _tensors(request.inputs, raw)
    given = request.parameters
    budget, profile = parse_budget(given)
    all_binary = given.get("binary_data_output") is True
    outputs = request.outputs or []
    for output in outputs:
        _check_known(f"output {output.name!r}", output.parameters, "binary_data")
    binary = {o.name for o in outputs if o.parameters.get("binary_data", all_binary) is True}
    ignored = [name for name in PASSED_OVER if name in given]
    return Asked(
        request.id, inputs, budget, profile, _deadline(given),
        [o.name for o in outputs] or None,
        frozenset(["*"] if all_binary and not outputs else binary),
        tuple(f"the parameter {name} changes nothing here" for name in ignored),
    )  # fmt: skip


def parse_message(kind: type[Message], raw: bytes) -> Any:
    """A message from JSON, or one clear error."""
    try:
        found = json.loads(raw, parse_constant=_refuse_constant)
        _refuse_crowds(found)
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{where}: {first['msg']}" if where else first["msg"]) from error
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is not JSON: {error}") from error


def _refuse_crowds(found: Any) -> None:
    """Refuse what has more parts than any request: to tell what is wrong with each takes long."""
    if not isinstance(found, dict):
        return
    parts = [found]
    for name in ("inputs", "outputs"):
        listed = found.get(name)
        if isinstance(listed, list):
            if len(listed) > MOST_TENSORS:
                raise DataError(f"{len(listed)} {name}, at most {MOST_TENSORS}")
            parts += [one for one in listed if isinstance(one, dict)]
    for part in parts:
        given = part.get("parameters")
        if len(part) > MOST_KEYS or (isinstance(given, dict) and len(given) > MOST_KEYS):
            raise DataError(f"an object with more than {MOST_KEYS} keys")
        for name, value in given.items() if isinstance(given, dict) else ():
            if not isinstance(value, bool | int | float | str):
                raise DataError(f"parameter {name[:50]!r} must be a number, text or a boolean")


def parse_budget(given: Parameters) -> tuple[Budget | None, str | None]:
    """The budget of parameters, None where they name none, or a profile by name."""
    unknown = [name for name in given if name not in (*OWN, *PASSED_OVER)]
    if unknown:
        raise SpecError(f"unknown parameter {unknown[0]!r}: there are {', '.join(OWN)}")
    named = {name: given[name] for name in BUDGET if name in given}
    for name in LIMITS:
        if isinstance(named.get(name), str):
            named[name] = _number(name, named[name])
    profile = given.get("profile")
    if profile is not None and not isinstance(profile, str):
        raise SpecError(f"profile must be a name, got {profile!r}")
    if profile is not None and named:
        raise SpecError("name a budget or a profile, not both")
    return Budget(**named) if named else None, profile  # type: ignore[arg-type]


def _deadline(given: Parameters) -> float | None:
    if "deadline_ms" in given and "timeout" in given:
        raise SpecError("name deadline_ms or timeout, not both")
    if "timeout" in given:
        return _positive("timeout", given["timeout"]) / 1e3
    return _positive("deadline_ms", given["deadline_ms"]) if "deadline_ms" in given else None


def _positive(name: str, value: Scalar) -> float:
    number = _number(name, value)
    if not 0 < number < math.inf:
        raise SpecError(f"{name} must be positive and finite, got {number:g}")
    return number


def _number(name: str, value: Scalar) -> float:
    """A number, also one written as text: not every client can send others than whole ones."""
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (ValueError, OverflowError):
        raise SpecError(f"{name} must be a number, got {value!r}") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _check_known(what: str, given: Parameters, known: str) -> None:
    """Refuse parameters of a tensor that are not served: a budget is one of the request."""
    unknown = [name for name in given if name != known]
    if unknown:
        raise SpecError(f"{what}: unknown parameter {unknown[0]!r}: there is {known}")


def whole_number(text: str) -> int | None:
    """The number that a header says; None of what is none, or too long to be one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def _split(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    """The JSON of a body, and the bytes of tensors behind it."""
    if header_length is None:
        return body, memoryview(b"")
    length = whole_number(header_length)
    if length is None or length > len(body):
        raise DataError(
            f"Inference-Header-Content-Length is {header_length[:20]!r}, the body {len(body)} bytes"
        )
    return body[:length], memoryview(body)[length:]


def _tensors(inputs: Sequence[InputTensor], raw: memoryview) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for tensor in inputs:
        _check_known(f"input {tensor.name!r}", tensor.parameters, "binary_data_size")
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
    """An input or output as clients are told of it; -1 is a size that may vary."""
    shape = [size if isinstance(size, int) else -1 for size in entry.shape]
    return TensorMetadata(name=entry.name, datatype=NAMES[entry.dtype], shape=shape)


def encode_response(
    answer: InferResponse, arrays: Sequence[Array], binary: frozenset[str]
) -> tuple[bytes, dict[str, str]]:
    """The body of an answer whose outputs are these arrays, and its headers."""
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
    """Numbers, flat; JSON has no others than finite ones."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError("the answer holds NaN or infinite values: ask for it as binary data")
    found: list[Any] = array.ravel().tolist()
    return found
