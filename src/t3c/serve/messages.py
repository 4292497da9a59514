"""The messages of the Open Inference Protocol, version 2."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool

DATATYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16",
    "FP32": "float32", "FP64": "float64",
}  # fmt: skip
MOST_AXES, MOST_TENSORS = 8, 64

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
    drift, max_drop, quantile; or a profile by name; and deadline_ms (or Triton's timeout,
    microseconds)."""

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
