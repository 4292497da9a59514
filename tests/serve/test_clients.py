"""Clients that others wrote: Triton's, and one that tries what the OpenAPI document allows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from conftest import Made
from serving import Running

triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")


@pytest.fixture
def client(served: Running) -> Iterator[Any]:
    with triton.InferenceServerClient(served.url.removeprefix("http://")) as found:
        yield found


def given(served: Running, made: Made, rows: int = 2, binary: bool = True) -> Any:
    x = made.digits.test[0][:rows].numpy()
    tensor = triton.InferInput(served.service.version.runtime.inputs[0].name, x.shape, "FP32")
    tensor.set_data_from_numpy(x, binary_data=binary)
    return [tensor]


def test_triton_finds_the_model_and_what_it_takes(served: Running, client: Any) -> None:
    name = served.service.version.model.name
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(name)
    assert client.get_server_metadata()["name"] == "t3c"
    told = client.get_model_metadata(name)
    version = served.service.version.name
    assert (told["name"], told["versions"]) == (name, [version])
    assert told["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 1, 32, 32]}]
    assert told["outputs"][0]["shape"] == [-1, 10]
    assert client.is_model_ready(name, version)
    with pytest.raises(triton.InferenceServerException, match="no model"):
        client.get_model_metadata("other")


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("budget", [None, "tiny"])
def test_triton_infers_with_and_without_a_budget(
    served: Running, client: Any, made: Made, binary: bool, budget: str | None
) -> None:
    runtime = served.service.version.runtime
    output = served.service.version.model.outputs[0].name
    size = {c.profile: c.size_mb for c in runtime.candidates}
    parameters = {"size_mb": size[budget]} if budget else None
    answer = client.infer(
        served.service.version.model.name, given(served, made, binary=binary), request_id="7",
        outputs=[triton.InferRequestedOutput(output, binary_data=binary)], parameters=parameters,
    )  # fmt: skip
    profile = budget or runtime.chain.top.name
    wanted = runtime(made.digits.test[0][:2].numpy(), profile=profile)
    assert np.allclose(answer.as_numpy(output), wanted, atol=1e-4)
    told = answer.get_response()
    assert told["id"] == "7"
    assert told["parameters"]["profile"] == profile
    assert told["parameters"]["epsilon"] == runtime.certificates[profile].epsilon


def test_triton_needs_to_name_no_outputs(served: Running, client: Any, made: Made) -> None:
    name = served.service.version.model.name
    answer = client.infer(name, given(served, made))
    assert answer.as_numpy(served.service.version.model.outputs[0].name).shape == (2, 10)


def test_triton_hears_of_what_is_refused(served: Running, client: Any, made: Made) -> None:
    name = served.service.version.model.name
    with pytest.raises(triton.InferenceServerException, match="cannot be answered within"):
        client.infer(name, given(served, made), timeout=1)  # a microsecond
    with pytest.raises(triton.InferenceServerException, match="latency_ms must be positive"):
        client.infer(name, given(served, made), parameters={"latency_ms": -1})
    wrong = triton.InferInput("input", [1, 3], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 3), np.float32))
    with pytest.raises(triton.InferenceServerException, match="does not fit"):
        client.infer(name, [wrong])


def test_the_openapi_document_refers_to_nothing_that_it_has_not(served: Running) -> None:
    document = served.get("/openapi.json")
    referred = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)))
    assert {"InputTensor", "WantedOutput", "InferResponse"} <= referred
    assert referred <= set(document["components"]["schemas"])
    assert '"#/$defs' not in json.dumps(document)
    assert all("422" not in o["responses"] for p in document["paths"].values() for o in p.values())


@pytest.mark.filterwarnings("ignore")
def test_nothing_that_the_openapi_document_allows_breaks_the_server(served: Running) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    import hypothesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    checks = (
        not_a_server_error, status_code_conformance, content_type_conformance,
        response_schema_conformance,
    )  # fmt: skip
    tried: dict[str, int] = {}

    def attempt(operation: Any) -> None:
        @hypothesis.settings(
            max_examples=25, deadline=None, database=None, derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy())
        def run(case: Any) -> None:
            if "{model}" in operation.path:
                case.path_parameters = {**case.path_parameters, "model": name, "version": version}
            headers = served.headers if operation.path == "/v1/budget" else {}
            case.call_and_validate(checks=list(checks), headers=headers)
            tried[operation.label] = tried.get(operation.label, 0) + 1

        run()

    name, version = served.service.version.model.name, served.service.version.name
    for found in schema.get_all_operations():
        attempt(found.ok())
    served.call("PUT", "/v1/budget", {}, served.headers)
    assert len(tried) == len(schema.raw_schema["paths"]) + 1  # one path has two methods
    assert served.get("/v2/health/live") == {"live": True}
