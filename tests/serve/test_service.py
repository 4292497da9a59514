from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conftest import Made
from lab.servers import Server, server
from serving import SOON, Running, running
from t3c.artifact.reader import Artifact
from t3c.artifact.trim import trim
from t3c.errors import ArtifactError, CorruptError, DataError, SpecError
from t3c.runtime.monitor import MonitorConfig
from t3c.runtime.runtime import load
from t3c.serve.book import EVENTS, KEPT, SECONDS, Book
from t3c.serve.config import ServeConfig
from t3c.serve.pace import measure_pace
from t3c.serve.run import Address
from t3c.serve.versions import Origin, open_version

CONFIG = ServeConfig(objective_ms=10_000, batch=1)


@pytest.fixture
def own(copied: Path) -> Iterator[Running]:
    with running(copied, CONFIG) as found:
        yield found


def infer(one: Running, made: Made, **parameters: Any) -> tuple[int, Any]:
    x = made.digits.test[0][:1].numpy()
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.tolist()}
    name = one.service.version.model.name
    body = {"inputs": [tensor], "parameters": parameters}
    return one.call("POST", f"/v2/models/{name}/infer", body)[:2]


def replace(path: Path, made: Made) -> None:
    """Another version of the artifact in its place: the same without its largest profile."""
    names = [p.name for p in Artifact(made.artifact).manifest.chain][:-1]
    trim(Artifact(made.artifact), names, path)


def reload(one: Running) -> tuple[int, Any]:
    return one.call("POST", "/v1/reload", headers=one.headers)[:2]


def test_a_new_version_takes_over_without_a_lost_request(
    own: Running, made: Made, copied: Path
) -> None:
    before = own.service.version.name
    top = own.service.version.runtime.chain.top.name
    stop = threading.Event()
    found: list[tuple[int, Any]] = []

    def ask() -> None:
        while not stop.is_set():
            found.append(infer(own, made))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    replace(copied, made)
    status, told = reload(own)
    time.sleep(0.3)
    stop.set()
    for thread in threads:
        thread.join()
    assert status == 200
    assert told["version"] == Artifact(copied).content[:12] != before
    assert {status for status, _ in found} == {200}
    profiles = [answer["parameters"]["profile"] for _, answer in found]
    assert profiles[0] == top
    assert profiles[-1] != top  # which the new version has not
    versions = {answer["model_version"] for _, answer in found}
    assert told["version"] in versions
    assert own.service.loads == 2


def _tampered(path: Path, made: Made) -> None:
    file = path / "factors.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(bytes(raw))


def _truncated(path: Path, made: Made) -> None:
    file = path / "dense.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _gone(path: Path, made: Made) -> None:
    shutil.rmtree(path)


@pytest.mark.parametrize("spoil", [_tampered, _truncated, _gone])
def test_a_version_that_fails_is_rolled_back(
    own: Running, made: Made, copied: Path, spoil: Any
) -> None:
    before = own.service.version.name
    spoil(copied, made)
    status, told = reload(own)
    assert status == 409
    assert "\n" not in told["error"]
    assert own.service.version.name == before
    assert infer(own, made)[0] == 200
    assert f"rolled back to {before}" in own.get("/v1/live")["events"][0]["text"]


def test_a_version_whose_warm_up_fails_or_whose_face_is_another_is_rolled_back(
    own: Running, made: Made, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from t3c.serve import service, versions

    def broken(*given: Any, **options: Any) -> Any:
        pace = measure_pace(*given, **options)
        runtime = given[0]
        session = SimpleNamespace(run=lambda x: [np.array([np.nan])])
        monkeypatch.setattr(runtime, "session", lambda name: session)
        return pace

    with monkeypatch.context() as patch:
        patch.setattr(versions, "measure_pace", broken)
        status, told = reload(own)
    assert (status, "NaN or infinite" in told["error"]) == (409, True)

    def other(old: Any, new: Any) -> None:
        inputs = (new.inputs[0].model_copy(update={"name": "pixels"}),)
        versions.refuse_other_face(old, new.model_copy(update={"inputs": inputs}))

    monkeypatch.setattr(service, "refuse_other_face", other)
    status, told = reload(own)
    assert status == 409
    assert told["error"].startswith("the new version has other inputs: serve it beside this one")
    assert infer(own, made)[0] == 200
    assert own.service.loads == 1


def test_an_artifact_that_cannot_be_served_does_not_start(copied: Path, made: Made) -> None:
    with pytest.raises(SpecError, match="no profile 'huge'"):
        open_version(Origin(copied, threads=1), ServeConfig(fixed="huge"))
    with pytest.raises(SpecError, match="nothing to watch is called 'moon'"):
        open_version(Origin(copied, threads=1), ServeConfig(watch=("moon",)))
    _tampered(copied, made)
    with pytest.raises(CorruptError, match="hash"):
        open_version(Origin(copied, threads=1), CONFIG)
    with pytest.raises(ArtifactError, match="no such artifact"):
        open_version(Origin(copied / "none"), CONFIG)


def test_batches_are_as_large_as_helps(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    from t3c.serve import pace

    runtime = load(made.artifact, threads=1)
    for each, largest in ((lambda n: n, 1), (lambda n: max(4, n), 4), (lambda n: 1, 32)):
        monkeypatch.setattr(pace, "_time", lambda rt, name, x, size, each=each: each(size))
        found = measure_pace(runtime, [np.zeros((1, 1, 32, 32), np.float32)])
        assert found.largest == largest
        assert set(found.times) == {c.profile for c in runtime.candidates}


def test_a_head_that_does_not_come_is_not_waited_for(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--threads", "1", "--batch", "1"]
    code = "from t3c.serve import run; run.HEADER_SECONDS = 0.5; from t3c.cli import main; main()"
    with server(made.artifact, options, python=["-c", code]) as one:
        host, port = one.url.removeprefix("http://").split(":")
        for begun in (b"", b"POST /v2 HTTP/1.1\r\nHost: loc", b"GET /v2 HTTP/1.1\r\n\r\nGET /"):
            with socket.create_connection((host, int(port)), timeout=SOON) as slow:
                slow.sendall(begun)
                while slow.recv(4096):  # until the server closes
                    pass
        assert ready(one)


def test_what_is_watched_is_warm_before_the_first_request(made: Made) -> None:
    config = ServeConfig(objective_ms=10_000, batch=2)
    with running(made.artifact, config, monitor=MonitorConfig(every=1)) as watched:
        runtime = watched.service.version.runtime
        before = sum(runtime.counters.snapshot()["compiled"].values())
        for name in watched.service.version.pace.times:
            status, answer = infer(watched, made, profile=name)
            assert (status, answer["parameters"]["profile"]) == (200, name)
        assert sum(runtime.counters.snapshot()["compiled"].values()) == before
        seen = [watch.monitor.seen for watch in runtime.watches.values()]
        assert seen == [1] * len(seen)  # what was timed is no sample
        assert watched.get("/v1/live")["monitor"]["evidence"] < 1


def test_the_book_is_bounded_and_tells_of_the_last_seconds() -> None:
    now = [1000.0]
    book = Book(lambda: now[0])
    for second in range(300):
        now[0] = 1000.0 + second
        for _ in range(3):
            book.answered("tiny" if second % 2 else "max", 5.0 + second, late=False)
        book.ended("refused")
    now[0] += 10  # nobody asks for a while
    book.tick()
    series = book.series()
    assert len(series) == SECONDS - 1
    assert [row.t for row in series] == list(range(1190, 1309))
    asked = next(row for row in series if row.t == 1298)
    assert (asked.profile, asked.requests, asked.refused) == ("max", 4, 1)
    assert asked.p50 == 5.0 + 298
    assert series[-1].profile is None
    assert book.totals["answered"] == 900
    for _ in range(10_000):
        book.answered("tiny", 1.0, late=True)
        book.event("swap", "x")
        book.drifted("tiny", [0.1] * 10)
    assert len(book.events) == EVENTS
    assert book.latency().requests <= KEPT + 60 * 3
    seen = book.observed("tiny")
    assert seen is not None
    assert seen.rows <= 512
    assert book.observed("max") is None


def ready(one: Server) -> bool:
    import json
    import urllib.request

    with urllib.request.urlopen(f"{one.url}/v2/health/ready", timeout=SOON) as answer:
        return bool(json.load(answer)["ready"])


def test_the_command_serves_reloads_and_drains(made: Made, copied: Path) -> None:
    import json
    import urllib.error
    import urllib.request

    options = ["--threads", "1", "--batch", "1", "--drain-seconds", "1", "--access-log", "-"]
    with server(copied, options) as one:
        assert ready(one)
        version = json.load(urllib.request.urlopen(f"{one.url}/v1/profiles"))["version"]
        replace(copied, made)
        one.process.send_signal(signal.SIGHUP)
        end = time.monotonic() + SOON
        while json.load(urllib.request.urlopen(f"{one.url}/v1/profiles"))["version"] == version:
            assert time.monotonic() < end
            time.sleep(0.05)
        one.process.send_signal(signal.SIGTERM)
        seen = set()
        while one.process.poll() is None and time.monotonic() < end:
            try:
                seen.add(ready(one))
            except urllib.error.HTTPError as error:
                error.close()
                seen.add(error.code)
            except OSError:
                break
            time.sleep(0.05)
        assert 503 in seen  # no longer ready, but there
        assert one.process.wait(SOON) == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["none.t3c"], "no such artifact folder"),
        (["{artifact}", "--objective-ms", "-1"], "objective_ms must be positive"),
        (["{artifact}", "--batch", "3"], "power of two"),
        (["{artifact}", "--profile", "huge"], "no profile 'huge'"),
        (["{artifact}", "--watch", "moon"], "nothing to watch"),
        (["{artifact}", "--port", "70000"], "port must be"),
        (["{artifact}", "--host", "300.1.1.1"], "cannot listen at"),
        (["{artifact}", "--engine", "abacus"], "unknown engine"),
        (["{artifact}", "--token-file", "none"], "no such file"),
        (["{artifact}", "--latency-ms", "0"], "latency_ms must be positive"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(made: Made, options: list[str], told: str) -> None:
    arguments = [option.format(artifact=made.artifact) for option in options]
    done = subprocess.run(
        [sys.executable, "-m", "t3c.cli", "serve", *arguments], capture_output=True, text=True,
        timeout=120, cwd=made.folder,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_that_is_taken_and_a_short_token_are_refused(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    from t3c.cli.serve import _token

    with Address(port=0).open() as taken:
        taken.listen()
        with pytest.raises(SpecError, match="cannot listen at 127"):
            Address(port=taken.getsockname()[1]).open()
    monkeypatch.setenv("T3C_ADMIN_TOKEN", "short")
    with pytest.raises(SpecError, match="at least 16"):
        _token(None)
    (made.folder / "binary").write_bytes(b"\xff" * 20)
    with pytest.raises(DataError, match="not a token"):
        _token(made.folder / "binary")
    file = made.folder / "token"
    file.write_text("0123456789abcdef\n")
    assert _token(file) == "0123456789abcdef"
    file.unlink()


def test_loopback_is_called_by_its_own_names_alone() -> None:
    assert "*" not in Address().allowed
    assert "*" not in Address("::1").allowed
    assert "*" not in Address("localhost").allowed
    assert Address("0.0.0.0").allowed == ["*"]
    assert Address("0.0.0.0", hosts=("me",)).allowed == ["me"]
