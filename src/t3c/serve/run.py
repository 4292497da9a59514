"""A server process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from t3c.artifact.folder import MANIFEST
from t3c.artifact.reader import LEDGER
from t3c.errors import SpecError, T3CError
from t3c.serve.app import build_app
from t3c.serve.config import ServeConfig
from t3c.serve.service import Service
from t3c.serve.tracing import configured_tracing
from t3c.serve.versions import Origin, Watch

log = logging.getLogger("t3c.serve")

KEEP_ALIVE = 30  # seconds
BACKLOG = 2048
BEYOND = 1024  # connections beyond the requests that may wait, for health and the like
HEADER_SECONDS = 10.0  # that the head of a request may take to come
POLL_SECONDS = 2.0  # between looks at the artifact's manifest
NAMES = ["localhost", "127.0.0.1", "[::1]", "::1"]


@dataclass(frozen=True)
class Address:
    """Where a server listens. Names that clients may call a loopback server by are its own: a page
    elsewhere cannot have a browser call it by another."""

    host: str = "127.0.0.1"
    port: int = 8000
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise SpecError(f"port must be from 0 to 65535, got {self.port}")

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def allowed(self) -> list[str]:
        return list(self.hosts) or ([*NAMES, self.host] if self.loopback else ["*"])

    def open(self) -> socket.socket:
        """A socket that is bound, or one clear error."""
        bound = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((self.host, self.port))
        except OSError as error:
            bound.close()
            reason = error.strerror or error
            raise SpecError(f"cannot listen at {self.host}:{self.port}: {reason}") from error
        return bound


class _Protocol(HttpToolsProtocol):
    """Lets a connection go whose request does not begin, or whose head does not come to its end."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        self._rest()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._rest()
        self._patience = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _rest(self) -> None:
        if self._patience is not None:
            self._patience.cancel()


class _Server(uvicorn.Server):
    """Told to stop, it is no longer ready, goes on for a while, and then stops."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        service, seconds = self._service, self._service.config.drain_seconds
        if service.state == "draining" or not seconds:
            super().handle_exit(sig, frame)
            return
        service.state = "draining"
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(loop.call_later, seconds, super().handle_exit, sig, frame)


def serve(
    origin: Origin,
    config: ServeConfig,
    address: Address,
    *,
    token: str | None = None,
    follow: bool = False,
    say: Callable[[str], object] = lambda text: None,
    watch: Watch = lambda what, done, total: None,
) -> None:
    """Serve an artifact until told to stop. Without a token one is made, and said."""
    work = _serve(origin, config, address, token, follow, say, watch)
    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(work)


async def _serve(
    origin: Origin,
    config: ServeConfig,
    address: Address,
    token: str | None,
    follow: bool,
    say: Callable[[str], object],
    watch: Watch,
) -> None:
    service, tracing = Service(origin, config), configured_tracing()
    with contextlib.closing(address.open()) as bound:
        await service.start(watch)
        made = token or secrets.token_urlsafe(24)
        app = build_app(service, token=made, hosts=address.allowed, tracing=tracing)
        server = _Server(
            uvicorn.Config(
                app, http=_Protocol, log_config=None, access_log=False, lifespan="off",
                server_header=False, proxy_headers=False,
                limit_concurrency=config.limits.waiting + BEYOND, timeout_keep_alive=KEEP_ALIVE,
            ),
            service,
        )  # fmt: skip
        bound.listen(BACKLOG)  # who connects from now on is answered
        host = f"[{address.host}]" if ":" in address.host else address.host
        url = f"http://{host}:{bound.getsockname()[1]}"
        say(_told(service, url, None if token else made))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(_reload(service)))
        following = loop.create_task(_follow(service, origin.path)) if follow else None
        # uvicorn sends the signal that stopped it to itself again, when this is not over yet.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        try:
            await server.serve(sockets=[bound])
        finally:
            if following is not None:
                following.cancel()
            await service.stop()
            tracing.close()


def _told(service: Service, url: str, made: str | None) -> str:
    version, policy = service.version, service.scheduler.policy
    model, note = version.model.name, version.runtime.note
    dashboard = f"{url}/#token={made}" if made else f"{url}/"
    objective, largest = policy.objective_ms, version.pace.largest
    what = f"{len(policy.chain)} profiles, batches of up to {largest}"
    lines = [
        f"{model} {version.name}: {what}, objective {objective:.3g} ms",
        f"protocol  {url}/v2/models/{model}/infer",
        f"dashboard {dashboard}",
    ]
    return "\n".join([*lines, *([f"warning: {note}"] if note else [])])


async def _reload(service: Service) -> None:
    """Load what is at the path now; where that fails, the old one serves on, and it is said."""
    try:
        log.warning("reloaded: %s", await service.reload())
    except T3CError as error:
        log.error("not reloaded: %s", error)


async def _follow(service: Service, path: Path) -> None:
    """Reload whenever the manifest or the ledger is another, once for each."""
    seen = _stamps(path)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        now = _stamps(path)
        if now != seen and now[0] is not None:
            seen = now
            await _reload(service)


def _stamps(path: Path) -> list[tuple[int, int] | None]:
    return [_stamp(path / name) for name in (MANIFEST, LEDGER)]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino
