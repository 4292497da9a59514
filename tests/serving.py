"""A server in a thread of its own, and fakes for what it is made of."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from t3c.serve.app import build_app
from t3c.serve.config import ServeConfig
from t3c.serve.run import Address
from t3c.serve.service import Service
from t3c.serve.tracing import Tracing
from t3c.serve.versions import Origin

TOKEN = "a token that is for tests alone"
SOON = 30.0  # seconds after which a test that waits has failed


@dataclass
class Running:
    """A server that listens on loopback."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop
    headers: dict[str, str] = field(default_factory=lambda: {"authorization": f"Bearer {TOKEN}"})

    def get(self, path: str) -> Any:
        return self.call("GET", path)[1]

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, what the body says as JSON if it is, and headers."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, raw, {"content-type": "application/json", **(headers or {})},
            method=method,
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=SOON) as answer:
                return answer.status, _read(answer), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _read(error), dict(error.headers)

    def run(self, work: Any) -> Any:
        """The result of a coroutine of the server's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SOON)


def _read(answer: Any) -> Any:
    raw = answer.read()
    return json.loads(raw) if "json" in answer.headers.get("content-type", "") else raw


@contextlib.contextmanager
def running(
    artifact: Path,
    config: ServeConfig | None = None,
    *,
    threads: int = 1,
    tracing: Tracing | None = None,
    **origin: Any,
) -> Iterator[Running]:
    """An artifact served as `t3c serve` does, until the block ends."""
    started: list[Running] = []
    failed: list[BaseException] = []
    up, stop = threading.Event(), threading.Event()

    async def main() -> None:
        service = Service(Origin(artifact, threads=threads, **origin), config or ServeConfig())
        await service.start()
        app = build_app(service, token=TOKEN, hosts=Address().allowed, tracing=tracing)
        bound = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        serving = asyncio.ensure_future(server.serve(sockets=[bound]))
        while not server.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        started.append(Running(url, service, asyncio.get_running_loop()))
        up.set()
        while not stop.is_set():
            await asyncio.sleep(0.02)
        server.should_exit = True
        await serving
        await service.stop()

    def work() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
            up.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert up.wait(SOON * 4)
    if failed:
        raise failed[0]
    try:
        yield started[0]
    finally:
        stop.set()
        thread.join(SOON)
    if failed:
        raise failed[0]
