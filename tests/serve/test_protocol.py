from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.errors import DataError, T3CError
from t3c.serve.messages import DATATYPES, InferResponse, OutputTensor
from t3c.serve.protocol import parse_request
from t3c.serve.tensors import encode_response
from t3c.spec import Budget

MOST = 10_000_000


def request(data: Any = (1.0, 2.0), **changed: Any) -> dict[str, Any]:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": data}
    return {"inputs": [tensor | changed]}


def parse(payload: Any) -> Any:
    return parse_request(json.dumps(payload).encode(), None, MOST)


@pytest.mark.parametrize("datatype", list(DATATYPES))
@pytest.mark.parametrize("binary", [False, True])
def test_tensors_of_every_type_come_as_they_were(datatype: str, binary: bool) -> None:
    dtype = np.dtype(DATATYPES[datatype])
    array = np.array([[0, 1, 1], [1, 0, 1]], dtype)
    tensor: dict[str, Any] = {"name": "x", "shape": [2, 3], "datatype": datatype}
    if not binary:
        found = parse({"inputs": [tensor | {"data": array.tolist()}]}).inputs["x"]
    else:
        head = json.dumps(
            {"inputs": [tensor | {"parameters": {"binary_data_size": array.nbytes}}]}
        ).encode()
        found = parse_request(head + array.tobytes(), str(len(head)), MOST).inputs["x"]
    assert found.dtype == dtype
    assert np.array_equal(found, array)


def test_flat_and_nested_data_are_the_same() -> None:
    nested, flat = (parse(request(data)).inputs["x"] for data in ([[1, 2]], [1, 2]))
    assert np.array_equal(nested, flat)


@pytest.mark.parametrize(
    ("parameters", "budget", "profile", "deadline"),
    [
        ({}, None, None, None),
        ({"latency_ms": 5}, Budget(latency_ms=5), None, None),
        ({"latency_ms": "2.5", "quantile": "p90"}, Budget(2.5, quantile="p90"), None, None),
        ({"drift": 0.1, "size_mb": 3, "energy_mj": 2.0}, Budget(None, 3, 2.0, 0.1), None, None),
        ({"max_drop": "0.005"}, Budget(max_drop=0.005), None, None),
        ({"max_drop": 0, "drift": 0.1}, Budget(drift=0.1, max_drop=0), None, None),
        ({"profile": "tiny", "deadline_ms": 7}, None, "tiny", 7.0),
        ({"timeout": 1500}, None, None, 1.5),
    ],
)
def test_parameters_name_the_budget(
    parameters: Any, budget: Any, profile: Any, deadline: Any
) -> None:
    asked = parse(request() | {"parameters": parameters})
    assert (asked.budget, asked.profile, asked.deadline_ms) == (budget, profile, deadline)


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ({}, "inputs: Field required"),
        ({"inputs": []}, "inputs: List should have at least 1"),
        ([], "Input should be a valid dictionary"),
        (request(None), "'x': no data"),
        (request([1]), "1 numbers do not fill the shape"),
        (request([[1, 2], [3]]), "no array of numbers"),
        (request(["a", "b"]), "not of FP32"),
        (request([1.5, 2], datatype="INT8"), "not of INT8"),
        (request([300, 2], datatype="INT8"), "out of INT8"),
        (request([1, 2], datatype="BYTES"), "'BYTES' is not served"),
        (request(shape=[]), "shape"),
        (request(shape=[0, 2]), "shape"),
        (request(shape=[1] * 9), "shape"),
        (request(shape=[2**40, 2**40]), "shape"),
        (request(parameters={"binary_data_size": 8}), "has data and binary_data_size"),
        (request() | {"parameters": {"latency": 5}}, "unknown parameter 'latency'"),
        (request() | {"parameters": {"latency_ms": -1}}, "latency_ms must be positive"),
        (request() | {"parameters": {"max_drop": -0.1}}, "max_drop must be 0 or more"),
        (request() | {"parameters": {"profile": "a", "max_drop": 0}}, "a budget or a profile"),
        (request() | {"parameters": {"latency_ms": True}}, "latency_ms must be a number"),
        (request() | {"parameters": {"latency_ms": "fast"}}, "latency_ms must be a number"),
        (request() | {"parameters": {"quantile": "p42"}}, "quantile must be"),
        (request() | {"parameters": {"profile": 3}}, "profile must be a name"),
        (request() | {"parameters": {"profile": "a", "drift": 1}}, "a budget or a profile"),
        (request() | {"parameters": {"deadline_ms": 0}}, "deadline_ms must be positive"),
        (request() | {"parameters": {"deadline_ms": 1, "timeout": 1}}, "deadline_ms or timeout"),
        (request() | {"parameters": {"sequence_id": 4}}, "unknown parameter 'sequence_id'"),
        ({"inputs": request()["inputs"] * 2}, "there twice"),
        (request() | {"latency_ms": 5}, "latency_ms: Extra inputs"),
        (request() | {"parameters": {"latency_ms": None}}, "'latency_ms' must be a number, text"),
        (request() | {"parameters": {"latency_ms": [5]}}, "'latency_ms' must be a number, text"),
        (request(parameters={"latency_ms": 5}), "unknown parameter 'latency_ms'"),
        (
            request() | {"outputs": [{"name": "y", "parameters": {"classification": 2}}]},
            "unknown parameter 'classification'",
        ),
        (request() | {"parameters": {str(i): 1 for i in range(65)}}, "more than 64 keys"),
        ({"inputs": request()["inputs"] * 65}, "65 inputs, at most 64"),
    ],
)
def test_what_cannot_be_is_one_clear_error(payload: Any, told: str) -> None:
    with pytest.raises(T3CError) as refused:
        parse(payload)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("raw", "header", "told"),
    [
        (b"", None, "not JSON"),
        (b"{", None, "not JSON"),
        (b"[" * 100_000, None, "not JSON"),
        (b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [NaN]}]}', None,
         "NaN is not JSON"),
        (b"\xff\xfe", None, "not JSON"),
        (b"{}", "3", "the body 2 bytes"),
        (b"{}", "-1", "the body 2 bytes"),
        (b"{}", "two", "the body 2 bytes"),
        (b"{}", "9" * 5000, "the body 2 bytes"),
        (b" " * 200, None, "bytes of JSON"),
    ],
)  # fmt: skip
def test_broken_bodies_are_one_clear_error(raw: bytes, header: str | None, told: str) -> None:
    limit = 100 if told == "bytes of JSON" else MOST
    with pytest.raises(DataError, match=told):
        parse_request(raw, header, limit)


def test_bytes_that_are_missing_or_left_over_are_refused() -> None:
    tensor = {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    head = json.dumps({"inputs": [tensor]}).encode()
    for tail, told in ((b"1234567", "7 are there"), (b"12345678x", "1 bytes behind")):
        with pytest.raises(DataError, match=told):
            parse_request(head + tail, str(len(head)), MOST)


@given(st.binary(max_size=300), st.one_of(st.none(), st.text(max_size=5)))
def test_no_body_does_more_than_be_refused(raw: bytes, header: str | None) -> None:
    with pytest.raises(T3CError):
        parse_request(raw, header, MOST)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=12,
    )
)
def test_no_data_does_more_than_be_refused(data: Any) -> None:
    try:
        found = parse(request(data)).inputs["x"]
    except T3CError:
        return
    assert found.shape == (1, 2)
    assert found.dtype == np.float32


def test_answers_are_written_as_asked() -> None:
    arrays = [np.arange(4, dtype=np.float32).reshape(2, 2), np.array([7], np.int64)]
    answer = InferResponse(
        model_name="m", model_version="1", parameters={"profile": "tiny", "epsilon": None},
        outputs=[
            OutputTensor(name="a", shape=[2, 2], datatype="FP32"),
            OutputTensor(name="b", shape=[1], datatype="INT64"),
        ],
    )  # fmt: skip
    body, headers = encode_response(answer, arrays, frozenset())
    assert headers == {"content-type": "application/json"}
    assert [o["data"] for o in json.loads(body)["outputs"]] == [[0, 1, 2, 3], [7]]
    body, headers = encode_response(answer, arrays, frozenset({"a"}))
    length = int(headers["inference-header-content-length"])
    first, second = json.loads(body[:length])["outputs"]
    assert first["parameters"] == {"binary_data_size": 16}
    assert "data" not in first
    assert second["data"] == [7]
    assert np.array_equal(np.frombuffer(body[length:], np.float32), arrays[0].ravel())
    with pytest.raises(DataError, match="NaN"):
        encode_response(answer, [arrays[0] * np.nan, arrays[1]], frozenset())
