"""Requests of the Open Inference Protocol, version 2: what is asked for, checked."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from pydantic import ValidationError

from t3c.artifact.manifest import LARGEST_SAMPLE
from t3c.engines.protocol import Array
from t3c.errors import DataError, SpecError
from t3c.runtime.remarks import Code, Remark
from t3c.serve.messages import MOST_TENSORS, InferRequest, Message, Parameters, Scalar
from t3c.serve.refusals import TooLargeError
from t3c.serve.tensors import check_known, read_tensors
from t3c.spec import Budget

MOST_KEYS = 64
LIMITS = ("latency_ms", "size_mb", "energy_mj", "drift", "max_drop")
BUDGET = (*LIMITS, "quantile")
OWN = (*BUDGET, "profile", "deadline_ms", "timeout", "binary_data_output")
PASSED_OVER = ("priority",)  # what Triton's clients may send, and nothing here depends on


class Asked(NamedTuple):
    """A request as the server sees it; `binary` are the outputs that are wanted as raw bytes."""

    id: str | None
    inputs: dict[str, Array]
    budget: Budget | None
    profile: str | None
    deadline_ms: float | None
    wanted: list[str] | None
    binary: frozenset[str]
    warnings: tuple[Remark, ...]


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
    inputs = read_tensors(request.inputs, raw)
    given = request.parameters
    budget, profile = parse_budget(given)
    all_binary = given.get("binary_data_output") is True
    outputs = request.outputs or []
    for output in outputs:
        check_known(f"output {output.name!r}", output.parameters, "binary_data")
    binary = {o.name for o in outputs if o.parameters.get("binary_data", all_binary) is True}
    ignored = [name for name in PASSED_OVER if name in given]
    return Asked(
        request.id, inputs, budget, profile, _deadline(given),
        [o.name for o in outputs] or None,
        frozenset(["*"] if all_binary and not outputs else binary),
        tuple(Remark(Code.PARAMETER_IGNORED, names=(name,)) for name in ignored),
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
