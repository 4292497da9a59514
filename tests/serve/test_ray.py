"""Replicas of Ray Serve: one server to its clients, whichever of them answers or dies."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import t3c
from conftest import Made
from t3c.errors import ArtifactError, SpecError
from t3c.serve.config import Limits, ServeConfig
from t3c.serve.versions import Origin
from t3c.spec import Budget

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 't3c[ray]'")

TOKEN = "a token that is for tests alone"
SOON = 60.0  # seconds after which what is waited for has failed
TRIES, BACKOFF = 5, 0.1
INFER = "/v2/models/small/infer"
DEPLOY = """
import sys
from pathlib import Path
import ray
from t3c.serve.config import ServeConfig
from t3c.serve.ray import deploy
from t3c.serve.run import Address
from t3c.serve.versions import Origin

ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
deploy(
    Origin(Path(sys.argv[1]), threads=1), ServeConfig(), Address(port=0), token=sys.argv[2],
    replicas=(2, 2), say=lambda text: print(text, flush=True),
)
ray.shutdown()
"""


@dataclass(frozen=True)
class Running:
    """Two replicas behind one address."""

    url: str
    process: subprocess.Popen[str]

    def call(
        self, method: str, path: str, body: Any = None, token: str = ""
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, what the body says and headers."""
        raw = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
        request = urllib.request.Request(self.url + path, raw, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=SOON) as answer:
                return answer.status, _read(answer), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _read(error), dict(error.headers)

    def again(self, method: str, path: str, body: Any = None) -> Any:
        """What a client hears that tries again where a replica dies under it."""
        for wait in (BACKOFF * 2**k for k in range(TRIES)):
            with suppress(OSError, http.client.HTTPException):
                status, answer, _ = self.call(method, path, body)
                if status == 200:
                    return answer
                assert status in (429, 500, 502, 503), answer
            time.sleep(wait)
        raise AssertionError(f"no answer in {TRIES} tries")

    def rows(self) -> dict[str, dict[str, Any]]:
        """The replicas that are listed, by their names."""
        return {row["replica"]: row for row in self.again("GET", "/v1/replicas")["replicas"]}

    def pids(self) -> set[int]:
        return {row["pid"] for row in self.rows().values()}

    def put(self, budget: dict[str, Any], replica: str | None = None) -> None:
        query = f"?replica={replica}" if replica else ""
        status, answer, _ = self.call("PUT", f"/v1/budget{query}", budget, TOKEN)
        assert status == 200, answer
        assert answer["budget"]["size_mb"] == budget.get("size_mb")
        assert answer["warnings"] == []


def question(x: np.ndarray) -> dict[str, Any]:
    tensor = {"name": "input", "shape": x.shape, "datatype": "FP32", "data": x.ravel().tolist()}
    return {"inputs": [tensor], "parameters": {"deadline_ms": 5000}}


def _read(answer: Any) -> Any:
    raw = answer.read()
    return json.loads(raw) if "json" in answer.headers.get("content-type", "") else raw


def wait_until(true: Callable[[], bool], seconds: float = SOON) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.fixture(scope="module")
def running(made: Made) -> Iterator[Running]:
    """A deployment as `t3c serve --ray` makes it, in a process of its own, told to stop at last."""
    command = [sys.executable, "-c", DEPLOY, str(made.artifact), TOKEN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    stuck = threading.Timer(SOON, process.kill)
    stuck.start()
    try:
        told = [process.stdout.readline().split() for _ in range(4)]
        stuck.cancel()
        assert told[-1][:1] == ["replicas"], told
        running = Running(told[-1][1].removesuffix("/v1/replicas"), process)
        yield running
        pids = running.pids()
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON) == 0
        assert not any(map(alive, pids))
    finally:
        stuck.cancel()
        process.stdout.close()
        process.kill()  # what Ray started ends with it
        process.wait()


@pytest.fixture(scope="module")
def runtime(made: Made) -> t3c.Runtime:
    """What the replicas have each, to hold their answers against."""
    return t3c.load(made.artifact, "openvino", threads=1)


def test_a_replica_answers_with_profile_and_certificate(
    running: Running, runtime: t3c.Runtime, made: Made
) -> None:
    x = made.digits.test[0][:2].numpy()
    status, answer, headers = running.call("POST", INFER, question(x))
    assert status == 200, answer
    told = answer["parameters"]
    certificate = runtime.certificates[told["profile"]]
    assert headers["t3c-profile"] == told["profile"]
    assert told["certified"]
    assert told["epsilon"] == certificate.epsilon
    np.testing.assert_allclose(
        np.reshape(answer["outputs"][0]["data"], (2, -1)), runtime(x, profile=told["profile"]),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def test_a_budget_reaches_all_replicas_or_one(running: Running, runtime: t3c.Runtime) -> None:
    smallest, largest = runtime.candidates[0], runtime.candidates[-1]
    before = running.rows()
    assert len(running.pids()) == 2
    assert {row["profile"] for row in before.values()} == {largest.profile}
    little = {"size_mb": smallest.size_mb * 1.001}
    running.put(little)
    assert {row["profile"] for row in running.rows().values()} == {smallest.profile}
    assert all(row["budget"]["size_mb"] == little["size_mb"] for row in running.rows().values())
    one, other = sorted(before)
    running.put({}, one)
    found = running.rows()
    assert (found[one]["profile"], found[other]["profile"]) == (largest.profile, smallest.profile)
    running.put({})
    assert {row["profile"] for row in running.rows().values()} == {largest.profile}


def test_who_may_change_budgets_and_of_what(running: Running) -> None:
    assert running.call("PUT", "/v1/budget", {})[0] == 401
    assert running.call("PUT", "/v1/budget", {}, "another")[0] == 401
    status, answer, _ = running.call("PUT", "/v1/budget?replica=none", {}, TOKEN)
    assert (status, answer["error"][:17]) == (404, "no replica 'none'")
    assert running.call("PUT", "/v1/budget", {"size_mb": -1}, TOKEN)[0] == 400
    described = running.call("GET", "/openapi.json")[1]["paths"]["/v1/budget"]["put"]
    assert [one["name"] for one in described["parameters"]] == ["replica"]


def test_views_and_metrics_are_of_all_replicas(running: Running, made: Made) -> None:
    x = made.digits.test[0][:1].numpy()
    before = running.call("GET", "/v1/live")[1]["totals"]["answered"]
    for _ in range(10):
        running.again("POST", INFER, question(x))

    def counted() -> bool:
        view = running.call("GET", "/v1/live")[1]
        return view["replicas"] == 2 and view["totals"]["answered"] >= before + 10

    def labelled() -> bool:
        page = running.call("GET", "/metrics")[1].decode()
        return all(f't3c_waiting_requests{{replica="{name}"}}' in page for name in running.rows())

    wait_until(counted)
    wait_until(labelled)
    alone = running.call("GET", f"/v1/live?replica={min(running.rows())}")[1]
    assert alone["replicas"] == 1


def test_a_reload_reaches_all_replicas(running: Running) -> None:
    assert running.call("POST", "/v1/reload")[0] == 401
    status, answer, _ = running.call("POST", "/v1/reload", token=TOKEN)
    assert status == 200, answer

    def reloaded() -> bool:
        events = running.call("GET", "/v1/live")[1]["events"]
        return len({e["text"].split(":")[0] for e in events if e["event"] == "reload"}) == 2

    wait_until(reloaded)
    assert {row["version"] for row in running.rows().values()} == {answer["version"]}


def test_a_killed_replica_loses_no_request_that_is_sent_again(
    running: Running, runtime: t3c.Runtime, made: Made
) -> None:
    samples = made.digits.test[0][:20].numpy()
    right = {one.profile: runtime(samples, profile=one.profile) for one in runtime.candidates}
    stop, answered, wrong = threading.Event(), [0], list[str]()

    def ask_on() -> None:
        while not stop.is_set():
            at = answered[0] % len(samples)
            try:
                answer = running.again("POST", INFER, question(samples[at : at + 1]))
            except AssertionError as error:
                wrong.append(str(error))
                return
            wanted = right[answer["parameters"]["profile"]][at]
            if not np.allclose(answer["outputs"][0]["data"], wanted, rtol=1e-4, atol=1e-5):
                wrong.append(f"another answer for sample {at}")
            answered[0] += 1
            time.sleep(0.02)

    before = running.pids()
    client = threading.Thread(target=ask_on)
    client.start()
    try:
        wait_until(lambda: answered[0] >= 10)
        os.kill(min(before), signal.SIGKILL)
        killed = answered[0]
        wait_until(lambda: len(running.pids() - {min(before)}) == 2)
        wait_until(lambda: answered[0] >= killed + 10)
    finally:
        stop.set()
        client.join(SOON)
    assert not wrong
    wait_until(lambda: min(before) not in running.pids())
    assert max(before) in running.pids()


def test_what_cannot_be_served_is_one_clear_error(made: Made, tmp_path: Path) -> None:
    from t3c.serve.ray import deploy
    from t3c.serve.run import Address

    def refused(path: Path, port: int = 0, **options: Any) -> str:
        with pytest.raises((ArtifactError, SpecError)) as caught:
            deploy(Origin(path), ServeConfig(), Address(port=port), **options)
        return str(caught.value)

    assert refused(tmp_path / "none.t3c") == f"{tmp_path / 'none.t3c'}: no such artifact folder"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "cannot listen at" in refused(made.artifact, port)
    assert "no Ray answers at" in refused(made.artifact, ray_address=f"127.0.0.1:{port}")
    assert "replicas must be" in refused(made.artifact, replicas=(2, 1))


def test_a_board_keeps_later_orders_and_learns_what_it_forgot() -> None:
    from t3c.serve.board import GONE, Beat, Board, Order, Row
    from t3c.serve.schema import BudgetBody

    def beat(name: str, order: Order, loads: int = 0) -> Beat:
        row = Row(
            replica=name, node="n", pid=1, state="ready", version="v", profile="max",
            ceiling="max", budget=BudgetBody(), requests_per_s=0.0, waiting=0,
        )  # fmt: skip
        return Beat(row, order, loads)

    now = [0.0]
    board = Board(lambda: now[0])
    start = Order(-1, Budget())
    everywhere = board.order(Budget(size_mb=1))
    alone = board.order(Budget(size_mb=2), "a")
    assert board.beat(beat("a", start)).order == alone
    assert board.beat(beat("b", start)).order == everywhere
    anew = Board(lambda: now[0])
    anew.beat(beat("a", alone, loads=3))
    assert anew.beat(beat("b", everywhere)).order == everywhere
    assert anew.told("a").order == alone
    assert anew.told("c").loads == 3
    last = anew.order(Budget(size_mb=3))
    assert anew.told("a").order == anew.told("b").order == last
    now[0] = GONE / 2
    anew.beat(beat("b", last))
    now[0] = GONE * 1.2
    assert [one.row.replica for one in anew.beats()] == ["b"]


def test_replicas_are_fixed_or_follow_the_load() -> None:
    from t3c.serve.ray import replica_options

    config = ServeConfig(lanes=3, limits=Limits(waiting=40))
    fixed = replica_options(config, (2, 2), cpus=3)
    assert (fixed["num_replicas"], fixed["max_ongoing_requests"]) == (2, 40)
    assert "autoscaling_config" not in fixed
    scaled = replica_options(config, (1, 8), cpus=3)
    assert "num_replicas" not in scaled
    scale = scaled["autoscaling_config"]
    assert (scale.min_replicas, scale.max_replicas, scale.target_ongoing_requests) == (1, 8, 3)
