"""What every HTTP request passes: limits, an access log, headers that keep browsers careful."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from t3c.errors import DataError, RefusedError
from t3c.serve.config import Limits
from t3c.serve.metrics import Metrics
from t3c.serve.protocol import whole_number
from t3c.serve.refusals import Refusal, Refused, SlowError, TooLargeError

access = logging.getLogger("t3c.access")

# Keys of a request's scope.
ARRIVED, TOLD, ROOM, HELD = "t3c.arrived", "t3c.told", "t3c.room", "t3c.held"
CLIENTS = 4096  # whose rates are kept
# Limits that no deployment of ours needed to set.
BURST = 20  # requests of a client on top of its rate: a page of a browser loads fewer
BODIES_MB = 512.0  # of all bodies that are there at once: eight of the largest
READ_SECONDS = 10.0  # that a body may take to come: 64 MB at 50 Mbit/s
LONGEST = 200  # characters of a path or an agent that are logged
OPEN = ("/v2/health/live", "/v2/health/ready", "/metrics")  # not rated: others watch by them
POLICY = (
    b"default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", POLICY),
)

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Rates:
    """A bucket of tokens for each client address; the clients seen longest ago are forgotten."""

    def __init__(self, rate: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> None:
        """Count a request, or refuse it."""
        if self._rate is None:
            return
        now = self._clock()
        left, at = self._buckets.pop(client, (float(BURST), now))
        left = min(float(BURST), left + (now - at) * self._rate)
        if left < 1:
            self._buckets[client] = left, now
            raise RefusedError(Refusal(Refused.RATE, self._rate), (1 - left) / self._rate)
        self._buckets[client] = left - 1, now
        while len(self._buckets) > CLIENTS:
            self._buckets.popitem(last=False)


class Room:
    """Bytes of bodies that are there at once, from their first byte to their answer."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0

    def take(self, count: int) -> None:
        """Make room, or refuse."""
        if self.used + count > self.most:
            raise RefusedError(Refusal(Refused.BODIES, self.most))
        self.used += count

    def free(self, count: int) -> None:
        self.used -= count


class Gate:
    """ASGI around the application; what it refuses, the application never sees."""

    def __init__(
        self, app: Any, limits: Limits, metrics: Metrics, hosts: Sequence[str] = ("*",)
    ) -> None:
        self._app, self._metrics, self._hosts = app, metrics, frozenset(hosts)
        self._room = Room(int(BODIES_MB * 1e6))
        self._rates = Rates(limits.rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = scope[ARRIVED] = time.monotonic()
        told = scope[TOLD] = dict[str, Any]()
        scope[ROOM] = self._room
        status, sent = 0, 0

        async def counted(message: MutableMapping[str, Any]) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            sent += len(message.get("body", b""))
            await send(message)

        client = (scope.get("client") or ("unknown", 0))[0]
        try:
            if stranger := self._stranger(scope):
                await send_error(counted, stranger[0], {"error": stranger[1]})
                return
            if scope["path"] not in OPEN:
                self._rates.take(client)
            await self._app(scope, receive, counted)
        except RefusedError as error:
            await send_error(counted, 429, error_body(error), retry(error))
        finally:
            self._room.free(scope.get(HELD, 0))
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.http.labels(route, str(status or 499)).inc()
            if access.isEnabledFor(logging.INFO):
                access.info(_line(scope, client, status, sent, time.monotonic() - start, told))

    def _stranger(self, scope: Scope) -> tuple[int, str] | None:
        """What to tell a browser that was led here by a page of someone else's."""
        if "*" in self._hosts:
            return None
        found = {name: value.decode("latin-1").lower() for name, value in scope["headers"]}
        host = found.get(b"host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in self._hosts:
            return 400, "the Host is not a name of this server"
        origin = found.get(b"origin")
        if origin is not None and origin.rpartition("://")[2] != host:
            return 403, "pages of others may not call this server"
        return None


def _line(
    scope: Scope, client: str, status: int, sent: int, seconds: float, told: dict[str, Any]
) -> str:
    agent = next((v for k, v in scope["headers"] if k == b"user-agent"), b"")
    return json.dumps(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "client": client,
            "method": scope["method"],
            "path": scope["path"][:LONGEST],
            "status": status or 499,
            "ms": round(seconds * 1e3, 3),
            "bytes": sent,
            "agent": agent.decode("latin-1")[:LONGEST],
            **told,
        }
    )


def error_body(error: Exception) -> dict[str, str]:
    """Return what a client is told of an error: its sentence, and the code of a refusal."""
    reason = error.reason if isinstance(error, RefusedError) else None
    code = {"code": str(reason.code)} if isinstance(reason, Refusal) else {}
    return {"error": str(error), **code}


async def send_error(
    send: Send, status: int, told: dict[str, str], headers: dict[str, str] | None = None
) -> None:
    """Answer with an error without an application."""
    body = json.dumps(told).encode()
    named = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **(headers or {}),
    }
    raw = [(name.encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def retry(error: RefusedError) -> dict[str, str]:
    """When a client may come again, in whole seconds."""
    return {"retry-after": str(max(1, min(60, math.ceil(error.retry_seconds))))}


async def read_body(request: Request, limits: Limits, most_mb: float | None = None) -> bytes:
    """A request's body, unless it is over the limit, packed, or takes too long to come."""
    most = int((limits.body_mb if most_mb is None else most_mb) * 1e6)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise DataError("bodies are sent as they are: Content-Encoding is not served")
    length = whole_number(request.headers.get("content-length", "0"))
    if length is None or length > most:
        raise TooLargeError(f"a body of more than {most} bytes")
    pieces, got = [], 0
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for piece in request.stream():
                got += len(piece)
                if got > most:
                    raise TooLargeError(f"a body of more than {most} bytes")
                request.scope[ROOM].take(len(piece))
                request.scope[HELD] = got
                pieces.append(piece)
    except TimeoutError:
        raise SlowError(f"the body did not come within {READ_SECONDS:g} s") from None
    except ClientDisconnect:
        raise DataError("the client went away") from None
    return b"".join(pieces)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work comes to, or None as soon as the client has gone; then it is given up."""
    answer, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await answer if answer.done() else None
    finally:
        gone.cancel()
        answer.cancel()


async def _gone(request: Request) -> None:
    """Wait until the client closes its connection; its body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
