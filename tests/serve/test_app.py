from __future__ import annotations

import http.client
import io
import json
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conftest import Made
from decoders import MadeDecoder
from serving import TOKEN, Running, running
from t3c.errors import MissingExtraError, RefusedError
from t3c.serve import gate
from t3c.serve.config import Limits, ServeConfig
from t3c.serve.gate import Rates
from t3c.serve.tracing import Tracing, configured_tracing


def request(made: Made, rows: int = 1, **parameters: Any) -> dict[str, Any]:
    x = made.digits.test[0][:rows].numpy()
    tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}
    return {"id": "mine", "inputs": [tensor], "parameters": parameters}


@pytest.fixture(scope="module")
def path(served: Running) -> str:
    return f"/v2/models/{served.service.version.model.name}"


@pytest.fixture(scope="module")
def body(served: Running, made: Made) -> dict[str, Any]:
    given = request(made)
    given["inputs"][0]["name"] = served.service.version.runtime.inputs[0].name
    return given


def test_an_answer_names_profile_certificate_and_time(
    served: Running, made: Made, path: str, body: dict[str, Any]
) -> None:
    status, answer, headers = served.call("POST", f"{path}/infer", body)
    assert status == 200
    runtime = served.service.version.runtime
    top = runtime.chain.top.name
    wanted = runtime(made.digits.test[0][:1].numpy(), profile=top)
    (output,) = answer["outputs"]
    assert (answer["id"], output["shape"], output["datatype"]) == ("mine", [1, 10], "FP32")
    assert np.allclose(output["data"], wanted.ravel(), atol=1e-5)
    told = answer["parameters"]
    certificate = runtime.certificates[top]
    assert (told["profile"], told["epsilon"], told["delta"]) == (
        top, certificate.epsilon, certificate.delta,
    )  # fmt: skip
    assert told["certified"] is True
    assert f"within {certificate.epsilon:.4f}" in told["guarantee"]
    assert told["late"] is False
    assert told["waited_ms"] >= 0
    assert told["ran_ms"] > 0
    assert headers["t3c-profile"] == top
    assert float(headers["t3c-epsilon"]) == pytest.approx(certificate.epsilon, rel=1e-5)
    assert answer["model_version"] == runtime.artifact.content[:12]


def test_each_profile_is_served_by_its_budget_and_by_its_name(
    served: Running, path: str, body: dict[str, Any]
) -> None:
    for candidate in served.service.version.runtime.candidates:
        for parameters in ({"size_mb": candidate.size_mb}, {"profile": candidate.profile}):
            _, answer, _ = served.call("POST", f"{path}/infer", body | {"parameters": parameters})
            assert answer["parameters"]["profile"] == candidate.profile


def test_outputs_that_are_asked_for_come_as_they_are_asked_for(
    served: Running, path: str, body: dict[str, Any]
) -> None:
    (name,) = (output.name for output in served.service.version.model.outputs)
    wanted = [{"name": name, "parameters": {"binary_data": True}}]
    status, raw, headers = served.call("POST", f"{path}/infer", body | {"outputs": wanted})
    assert status == 200
    length = int(headers["inference-header-content-length"])
    head = json.loads(raw[:length])
    assert head["outputs"][0]["parameters"]["binary_data_size"] == 40 == len(raw) - length
    plain = served.call("POST", f"{path}/infer", body)[1]["outputs"][0]["data"]
    assert np.allclose(np.frombuffer(raw[length:], np.float32), plain, atol=1e-6)
    status, error, _ = served.call("POST", f"{path}/infer", body | {"outputs": [{"name": "z"}]})
    assert (status, error) == (400, {"error": f"no output 'z': there are {name}"})


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        ({"inputs": []}, 400, "at least 1"),
        ({"parameters": {"latency_ms": -3}}, 400, "latency_ms must be positive"),
        ({"parameters": {"budget": 3}}, 400, "unknown parameter 'budget'"),
        ({"parameters": {"profile": "huge"}}, 400, "huge"),
        ({"parameters": {"deadline_ms": 0.0001}}, 429, "cannot be answered within"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_its_status(
    served: Running, path: str, body: dict[str, Any], change: Any, status: int, told: str
) -> None:
    found, error, headers = served.call("POST", f"{path}/infer", body | change)
    assert found == status
    assert told in error["error"]
    assert "\n" not in error["error"]
    assert ("retry-after" in headers) == (status == 429)


def test_inputs_that_do_not_fit_are_refused(
    served: Running, path: str, body: dict[str, Any]
) -> None:
    tensor = body["inputs"][0]
    for change, told in (
        ({"name": "other"}, "inputs must be"),
        ({"shape": [1, 1024]}, "does not fit"),
        ({"data": [1e39] * len(tensor["data"])}, "NaN or infinite"),
        ({"shape": [65, *tensor["shape"][1:]], "data": tensor["data"] * 65}, "over 65536 numbers"),
        ({"shape": [2**30], "data": [[]] * 9}, "over 65536 numbers"),
        ({"latency_ms": 3}, "Extra inputs are not permitted"),
        ({"parameters": {"latency_ms": 3}}, "unknown parameter 'latency_ms'"),
    ):
        status, error, _ = served.call("POST", f"{path}/infer", {"inputs": [tensor | change]})
        assert (status, told in error["error"]) == (400, True), error


@pytest.mark.parametrize(
    ("method", "at", "status"),
    [
        ("GET", "/v2/models/none", 404),
        ("POST", "/v2/models/none/infer", 404),
        ("GET", "{path}/versions/0", 404),
        ("GET", "{path}/versions/{version}", 200),
        ("GET", "{path}/versions/{version}/ready", 200),
        ("GET", "{path}/ready", 200),
        ("GET", "/v2/health/live", 200),
        ("GET", "/v2/health/ready", 200),
        ("GET", "/v2", 200),
        ("GET", "/nothing", 404),
        ("GET", "/dashboard/../app.py", 404),
        ("GET", "/dashboard/%2e%2e%2fapp.py", 404),
        ("DELETE", "/v2", 405),
        ("GET", "/v1/certificate?latency_ms=nan", 400),
        ("GET", "/v1/certificate?latency_ms=1&profile=tiny", 400),
        ("GET", "/v1/certificate?quantile=p42", 400),
        ("PUT", "/v1/budget", 401),
        ("POST", "/v1/reload", 401),
    ],
)
def test_routes(served: Running, path: str, method: str, at: str, status: int) -> None:
    version = served.service.version.name
    found, said, headers = served.call(method, at.format(path=path, version=version))
    assert found == status, said
    assert headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in headers["content-security-policy"]
    if status >= 400:
        assert set(said) == {"error"}


def test_a_budget_is_changed_by_whoever_has_the_token(
    served: Running, path: str, body: dict[str, Any]
) -> None:
    small = served.service.version.runtime.candidates[0]
    wrong = {"authorization": "Bearer " + TOKEN[:-1] + "x"}
    for headers in ({}, wrong, {"authorization": f"Basic {TOKEN}"}, {"authorization": "Bearer"}):
        assert served.call("PUT", "/v1/budget", {"size_mb": small.size_mb}, headers)[0] == 401
    assert served.get("/v1/budget")["budget"]["size_mb"] is None
    try:
        status, told, _ = served.call(
            "PUT", "/v1/budget", {"size_mb": small.size_mb}, served.headers
        )
        assert (status, told["profile"], told["budget"]["size_mb"]) == (
            200, small.profile, small.size_mb,
        )  # fmt: skip
        answer = served.call("POST", f"{path}/infer", body)[1]
        assert answer["parameters"]["profile"] == small.profile
        own = served.call("POST", f"{path}/infer", body | {"parameters": {"size_mb": 1e6}})[1]
        top = served.service.version.runtime.chain.top.name
        assert own["parameters"]["profile"] == top  # a request's own budget goes before
        assert served.get("/v1/live")["events"][0]["event"] in ("budget", "swap")
        for bad in (
            {"size_mb": -1},
            {"size": 3},
            {"latency_ms": "fast"},
            [],
            {"drift": 0},
            {"max_drop": -1},
        ):
            assert served.call("PUT", "/v1/budget", bad, served.headers)[0] == 400
        assert served.get("/v1/budget")["profile"] == small.profile
    finally:
        served.call("PUT", "/v1/budget", {}, served.headers)
    assert served.get("/v1/budget")["budget"]["size_mb"] is None


def test_a_cap_on_loss_goes_where_budgets_go(
    served: Running, path: str, body: dict[str, Any]
) -> None:
    """The ledger of this artifact has no quality: the largest serves, and says so."""
    asked = served.call("POST", f"{path}/infer", body | {"parameters": {"max_drop": 0.01}})[1]
    assert asked["parameters"]["profile"] == "max"
    assert "drop_unconfirmed" in asked["parameters"]["warning_codes"]
    told = served.get("/v1/certificate?max_drop=0")
    assert (told["profile"], told["warning_codes"]) == ("max", ["drop_unconfirmed"])
    assert served.call("GET", "/v1/certificate?max_drop=-1")[0] == 400
    try:
        put = served.call("PUT", "/v1/budget", {"max_drop": 0}, served.headers)[1]
        assert put["budget"]["max_drop"] == 0
        assert served.get("/v1/live")["budget"]["max_drop"] == 0
    finally:
        served.call("PUT", "/v1/budget", {}, served.headers)
    row = served.get("/v1/profiles")["profiles"][0]
    assert (row["metric"], row["quality"], row["drop"]) == (None, None, None)


def test_profiles_certificates_and_what_is_going_on(served: Running) -> None:
    told = served.get("/v1/profiles")
    runtime = served.service.version.runtime
    assert [row["name"] for row in told["profiles"]] == [p.name for p in runtime.chain]
    assert [row["active"] for row in told["profiles"]].index(True) == len(runtime.candidates) - 1
    assert told["takes"] == "image"
    for row in told["profiles"]:
        certificate = runtime.certificates[row["name"]]
        assert (row["epsilon"], row["samples"]) == (certificate.epsilon, certificate.samples)
        found = served.get(f"/v1/certificate?profile={row['name']}")
        assert found["certificate"]["epsilon"] == certificate.epsilon
        assert served.get(f"/v1/certificate?size_mb={row['size_mb']}")["profile"] == row["name"]
    live = served.get("/v1/live")
    assert live["state"] == "ready"
    assert live["objective_ms"] == 10_000
    assert live["totals"]["errors"] == 0


def test_metrics_count_what_was_answered(served: Running, path: str, body: dict[str, Any]) -> None:
    from prometheus_client.parser import text_string_to_metric_families as read

    def value(name: str, **labels: str) -> float:
        page = served.call("GET", "/metrics")[1].decode()
        return sum(
            sample.value
            for family in read(page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    before = value("t3c_answers_total", profile="tiny")
    refused = value("t3c_refusals_total", status="429")
    for _ in range(3):
        served.call("POST", f"{path}/infer", body | {"parameters": {"profile": "tiny"}})
    served.call("POST", f"{path}/infer", body | {"parameters": {"deadline_ms": 1e-4}})
    assert value("t3c_answers_total", profile="tiny") == before + 3
    assert value("t3c_request_seconds_count", profile="tiny") == before + 3
    assert value("t3c_refusals_total", status="429") == refused + 1
    assert value("t3c_objective_seconds") == 10
    assert value("t3c_http_requests_total", status="429") >= 1
    assert value("t3c_certified_drift", profile="tiny") == pytest.approx(
        served.service.version.runtime.certificates["tiny"].epsilon
    )


def test_a_picture_is_answered_as_the_command_line_would(served: Running, made: Made) -> None:
    pixels = (made.digits.test[0][0, 0].numpy() * 0.5 + 0.5).clip(0, 1) * 255
    png = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(png, "PNG")
    status, answer, _ = served.call(
        "POST", "/v1/try?size_mb=1000", png.getvalue(), {"content-type": "image/png"}
    )
    assert status == 200
    assert answer["profile"] == served.service.version.runtime.chain.top.name
    shares = [one["probability"] for one in answer["answers"]]
    assert len(shares) == 3
    assert sorted(shares, reverse=True) == shares
    assert 0 < sum(shares) <= 1
    for raw, kind, told in (
        (b"", "image/png", "empty"),
        (b"GIF89a...", "image/gif", "neither an array nor a picture"),
        (png.getvalue()[:60], "image/png", "neither an array nor a picture"),
        (b'{"text": "hello"}', "application/json", "no tokenizer"),
        (b'{"text": ""}', "application/json", "at least 1"),
    ):
        status, error, _ = served.call("POST", "/v1/try", raw, {"content-type": kind})
        assert (status, told in error["error"]) == (400, True), error


def test_hostile_pictures_are_refused_before_they_are_unpacked(served: Running) -> None:
    wide = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(wide, "PNG")  # small on the wire, 900 MB in memory
    assert len(wide.getvalue()) < 200_000
    status, error, _ = served.call(
        "POST", "/v1/try", wide.getvalue(), {"content-type": "image/png"}
    )
    assert status == 400, error


def test_a_text_is_gone_on_with(decoder: MadeDecoder) -> None:
    with running(decoder.path, ServeConfig(objective_ms=10_000, batch=1)) as lm:
        assert lm.get("/v1/profiles")["writes"] is True
        status, answer, _ = lm.call("POST", "/v1/try", {"text": "w5 w6 w7", "tokens": 4})
        assert status == 200
        assert 1 <= len(answer["text"].split()) <= 4
        again = lm.call("POST", "/v1/try", {"text": "w5 w6 w7", "tokens": 4})[1]
        assert again["text"] == answer["text"]
        name = lm.service.version.model.name
        ids = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [5, 6, 7]}
        status, found, _ = lm.call("POST", f"/v2/models/{name}/infer", {"inputs": [ids]})
        assert (status, found["outputs"][0]["shape"]) == (200, [1, 3, 100])
        assert len(found["outputs"]) == len(lm.service.version.model.outputs)


def test_bodies_over_the_limit_and_bodies_that_do_not_come(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(body_mb=0.01, json_mb=0.005, rows=2)
    monkeypatch.setattr(gate, "READ_SECONDS", 0.5)
    with running(made.artifact, ServeConfig(objective_ms=10_000, batch=1, limits=limits)) as tight:
        at = f"/v2/models/{tight.service.version.model.name}/infer"
        status, error, _ = tight.call("POST", at, b" " * 20_000)
        assert (status, "more than 10000 bytes" in error["error"]) == (413, True)
        status, error, _ = tight.call("POST", at, b" " * 6_000)
        assert (status, "send tensors as binary" in error["error"]) == (413, True)
        host, port = tight.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:  # says 100 bytes, sends 1
            slow.sendall(
                f"POST {at} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode()
            )
            assert b"408" in slow.recv(4096).split(b"\r\n")[0]
        connection = http.client.HTTPConnection(host, int(port))
        connection.request(  # says nothing, sends too much
            "POST", at, (b" " * 1000 for _ in range(20)), {"transfer-encoding": "chunked"},
            encode_chunked=True,
        )  # fmt: skip
        assert connection.getresponse().status == 413
        connection.close()
        packed = {"content-encoding": "gzip"}
        assert tight.call("POST", at, b"{}", packed)[0] == 400
        assert tight.get("/v2/health/live") == {"live": True}


def test_names_that_are_not_the_servers_own_are_refused(served: Running) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil", ""):
        status, error, _ = served.call("GET", "/v2", headers={"host": host})
        assert (status, "Host" in error["error"]) == (400, True)
    assert served.call("GET", "/v2", headers={"host": "LOCALHOST"})[0] == 200
    own = served.url.removeprefix("http://")
    assert served.call("GET", "/v2", headers={"origin": "http://evil.example"})[0] == 403
    assert served.call("GET", "/v2", headers={"origin": "null"})[0] == 403
    assert served.call("GET", "/v2", headers={"origin": f"http://{own}", "host": own})[0] == 200
    assert served.call("GET", "/v2", headers={"host": "localhost:1"})[0] == 200


def test_bodies_of_many_clients_have_one_limit(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODIES_MB", 0.01)
    with running(made.artifact, ServeConfig(objective_ms=10_000, batch=1)) as tight:
        at = f"/v2/models/{tight.service.version.model.name}/infer"
        host, port = tight.url.removeprefix("http://").split(":")
        head = f"POST {at} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n"
        with socket.create_connection((host, int(port))) as first:
            first.sendall(head.encode() + b" " * 6000)
            time.sleep(0.3)
            status, error, _ = tight.call("POST", at, b" " * 6000)
            assert (status, error["code"]) == (429, "bodies")
            assert "bytes of bodies" in error["error"]
        end = time.monotonic() + 5  # the first one has gone, and what it took is free again
        while tight.call("POST", at, b" " * 6000)[0] != 400:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_crowds_are_refused_before_each_is_looked_at(served: Running, path: str) -> None:
    many = {str(index): [] for index in range(200_000)}
    for body in ({"inputs": [], "parameters": many}, many, {"inputs": [many]}):
        raw = json.dumps(body).encode()
        start = time.perf_counter()
        status, error, _ = served.call("POST", f"{path}/infer", raw)
        assert (status, "more than 64 keys" in error["error"]) == (400, True)
        assert time.perf_counter() - start < 3  # to tell what is wrong with each took 17


def test_a_client_that_goes_away_is_not_served(
    made: Made, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    with running(made.artifact, ServeConfig(objective_ms=30_000, batch=1)) as one:
        runtime, seen = one.service.version.runtime, list[str]()
        run = runtime.run

        def slower(profile: str, session: Any, arrays: Any) -> Any:
            time.sleep(0.2)
            seen.append(profile)
            return run(profile, session, arrays)

        monkeypatch.setattr(runtime, "run", slower)
        at = f"/v2/models/{one.service.version.model.name}/infer"
        host, port = one.url.removeprefix("http://").split(":")
        raw = json.dumps(body).encode()
        for _ in range(20):
            with socket.create_connection((host, int(port))) as client:
                head = (
                    f"POST {at} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
                )
                client.sendall(head.encode() + raw)
        assert one.call("POST", at, body)[0] == 200
        assert len(seen) < 10


def test_one_client_does_not_have_more_than_its_rate(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(gate, "BURST", 3)
    rates = Rates(2.0, lambda: now[0])
    for _ in range(3):
        rates.take("a")
    with pytest.raises(RefusedError, match="over 2 requests a second") as refused:
        rates.take("a")
    assert refused.value.retry_seconds == pytest.approx(0.5)
    rates.take("b")
    now[0] += 0.5
    rates.take("a")
    monkeypatch.setattr(gate, "BURST", 2)
    limits = Limits(rate=0.5)
    with running(made.artifact, ServeConfig(objective_ms=10_000, batch=1, limits=limits)) as rated:
        statuses = [rated.call("GET", "/v2")[0] for _ in range(4)]
        assert statuses == [200, 200, 429, 429]
        assert rated.call("GET", "/v2")[2]["retry-after"] == "2"
        assert rated.call("GET", "/v2/health/live")[0] == 200  # those who watch are let through


def test_every_request_is_a_line_of_the_access_log(
    served: Running, path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "t3c.access"):
        served.call("POST", f"{path}/infer", body | {"parameters": {"profile": "tiny"}})
        served.call("POST", f"{path}/infer", b"{")
        end = time.monotonic() + 5
        while len(caplog.records) < 2 and time.monotonic() < end:
            time.sleep(0.01)
    good, bad = (json.loads(record.message) for record in caplog.records)
    assert (good["status"], good["profile"], good["id"], good["rows"]) == (200, "tiny", "mine", 1)
    assert good["ms"] > 0
    assert good["bytes"] > 100
    assert (bad["status"], "not JSON" in bad["error"]) == (400, True)
    assert TOKEN not in caplog.text


def test_a_bug_is_a_500_that_tells_nothing_and_the_next_request_is_answered(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(made.artifact, ServeConfig(objective_ms=10_000, batch=1)) as one:
        monkeypatch.setattr("t3c.serve.status.profiles", lambda service: {}["secret"])
        status, error, _ = one.call("GET", "/v1/profiles")
        assert (status, error) == (500, {"error": "internal error: the server's log has it"})
        assert one.get("/v1/live")["totals"]["errors"] == 1
        assert "secret" in caplog.text


def test_spans_are_below_the_clients_own(made: Made, body: dict[str, Any]) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    kept = memory.InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    with running(made.artifact, ServeConfig(batch=1, objective_ms=10_000),
                 tracing=Tracing(provider)) as one:  # fmt: skip
        parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        at = f"/v2/models/{one.service.version.model.name}/infer"
        assert one.call("POST", at, body, parent)[0] == 200
        assert one.call("POST", at, body | {"parameters": {"deadline_ms": 1e-4}})[0] == 429
    span, refused = kept.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert span.attributes["t3c.profile"] == "max"
    assert not refused.status.is_ok


def test_tracing_is_on_where_the_environment_says_so() -> None:
    with configured_tracing({}).span("x", {}) as attributes:
        attributes["a"] = 1
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match=r"t3c\[otel\]"):
            configured_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})


def test_many_clients_at_once_get_their_own_answers(served: Running, made: Made, path: str) -> None:
    runtime = served.service.version.runtime
    name = runtime.inputs[0].name
    images = made.digits.test[0][:32].numpy()
    wanted = runtime(images, profile="tiny")
    wrong: list[int] = []

    def ask(index: int) -> None:
        x = images[index : index + 1]
        tensor = {"name": name, "shape": list(x.shape), "datatype": "FP32", "data": x.tolist()}
        given = {"inputs": [tensor], "parameters": {"profile": "tiny"}}
        status, answer, _ = served.call("POST", f"{path}/infer", given)
        right = status == 200 and np.allclose(
            answer["outputs"][0]["data"], wanted[index], atol=1e-3
        )
        wrong.extend([] if right else [index])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_page_needs_nothing_from_elsewhere(served: Running) -> None:
    folder = Path(__file__).parents[2] / "src" / "t3c" / "serve" / "dashboard"
    page = served.call("GET", "/")[1].decode()
    assert page == (folder / "index.html").read_text()
    for file in folder.iterdir():
        text = file.read_text()
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), file
        if file.suffix != ".html":
            assert served.call("GET", f"/dashboard/{file.name}")[1].decode() == text
