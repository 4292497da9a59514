"""What every HTTP request passes: limits, an access log, headers that keep browsers careful."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request

from t3c.errors import DataError, RefusedError
from t3c.serve.config import Limits
from t3c.serve.metrics import Metrics
from t3c.serve.protocol import whole_number

access = logging.getLogger("t3c.access")

ARRIVED, TOLD = "t3c.arrived", "t3c.told"  # keys of a request's scope
CLIENTS = 4096  # whose rates are kept
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

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class TooLargeError(DataError):
    """A body over the limit."""


class SlowError(DataError):
    """A body that does not come."""


class Rates:
    """A bucket of tokens for each client address; the clients seen longest ago are forgotten."""

    def __init__(
        self, rate: float | None, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> None:
        """Count a request, or refuse it."""
        if self._rate is None:
            return
        now = self._clock()
        left, at = self._buckets.pop(client, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) * self._rate)
        if left < 1:
            self._buckets[client] = left, now
            raise RefusedError(f"over {self._rate:g} requests a second", (1 - left) / self._rate)
        self._buckets[client] = left - 1, now
        while len(self._buckets) > CLIENTS:
            self._buckets.popitem(last=False)


class Gate:
    """ASGI around the application; what it refuses, the application never sees."""

    def __init__(
        self, app: Any, limits: Limits, metrics: Metrics, hosts: Sequence[str] = ("*",)
    ) -> None:
        self._app, self._metrics, self._hosts = app, metrics, frozenset(hosts)
        self._rates = Rates(limits.rate, limits.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = scope[ARRIVED] = time.monotonic()
        told = scope[TOLD] = dict[str, Any]()
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
            if not self._is_called_by_name(scope):
                await send_error(counted, 400, "the Host is not a name of this server")
                return
            if scope["path"] not in OPEN:
                self._rates.take(client)
            await self._app(scope, receive, counted)
        except RefusedError as error:
            await send_error(counted, 429, str(error), retry(error))
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.http.labels(route, str(status or 499)).inc()
            if access.isEnabledFor(logging.INFO):
                access.info(_line(scope, client, status, sent, time.monotonic() - start, told))

    def _is_called_by_name(self, scope: Scope) -> bool:
        host = next((v for k, v in scope["headers"] if k == b"host"), b"").decode("latin-1")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return "*" in self._hosts or name in self._hosts


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


async def send_error(
    send: Send, status: int, message: str, headers: dict[str, str] | None = None
) -> None:
    """Answer with an error without an application."""
    body = json.dumps({"error": message}).encode()
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


async def read_body(request: Request, limits: Limits) -> bytes:
    """A request's body, unless it is over the limit, packed, or takes too long to come."""
    most = int(limits.body_mb * 1e6)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise DataError("bodies are sent as they are: Content-Encoding is not served")
    length = whole_number(request.headers.get("content-length", "0"))
    if length is None or length > most:
        raise TooLargeError(f"a body of more than {most} bytes")
    pieces, got = [], 0
    try:
        async with asyncio.timeout(limits.read_seconds):
            async for piece in request.stream():
                got += len(piece)
                if got > most:
                    raise TooLargeError(f"a body of more than {most} bytes")
                pieces.append(piece)
    except TimeoutError:
        raise SlowError(f"the body did not come within {limits.read_seconds:g} s") from None
    except ClientDisconnect:
        raise DataError("the client went away") from None
    return b"".join(pieces)
