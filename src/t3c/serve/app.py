"""The HTTP application: the Open Inference Protocol, budgets, a dashboard, metrics."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from t3c.errors import ArtifactError, EngineError, RefusedError, T3CError, UnavailableError
from t3c.serve import admin, infer, views
from t3c.serve.gate import Gate, error_body, retry
from t3c.serve.refusals import NotServedError, SlowError, TooLargeError
from t3c.serve.service import Service
from t3c.serve.tracing import Tracing
from t3c.version import __version__

log = logging.getLogger("t3c.serve")

FILES = {
    "dashboard.css": "text/css",
    **dict.fromkeys(("dashboard.js", "charts.js", "kit.js"), "text/javascript"),
}
ABOUT = (
    "One artifact at any budget. `/v2` is the Open Inference Protocol: name a budget in the "
    "parameters of a request and the answer names the profile and its certificate. `/v1` tells of "
    "profiles, certificates and load."
)
# What a T3CError is to a client, the first that fits.
STATUS: tuple[tuple[type[T3CError], int], ...] = (
    (UnavailableError, 503), (RefusedError, 429), (TooLargeError, 413), (SlowError, 408),
    (NotServedError, 404), (ArtifactError, 409), (EngineError, 500), (T3CError, 400),
)  # fmt: skip


def build_app(
    service: Service,
    *,
    token: str,
    hosts: Sequence[str] = ("*",),
    tracing: Tracing | None = None,
) -> FastAPI:
    """The application of a service. `token` opens what changes it; `hosts` are the names that
    clients may call it by."""
    app = FastAPI(
        title="T3C", version=__version__, description=ABOUT, docs_url=None, redoc_url=None
    )
    app.state.service, app.state.token = service, token.encode()
    app.state.tracing = tracing or Tracing()
    app.include_router(infer.router)
    app.include_router(views.router)
    app.include_router(admin.router)
    _add_errors(app)
    _add_dashboard(app)
    app.add_middleware(Gate, limits=service.config.limits, metrics=service.metrics, hosts=hosts)
    whole = app.openapi
    app.openapi = lambda: _as_served(whole())  # type: ignore[method-assign]
    return app


def status_of(error: T3CError) -> int:
    """The HTTP status that says what went wrong."""
    return next(status for kind, status in STATUS if isinstance(error, kind))


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(T3CError)
    async def refuse(request: Request, error: T3CError) -> Response:
        headers = retry(error) if isinstance(error, RefusedError) else None
        request.scope.get("t3c.told", {})["error"] = str(error)[:200]
        return JSONResponse(error_body(error), status_of(error), headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return JSONResponse({"error": f"{where}: {first['msg']}"}, 400)

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        app.state.service.book.ended("errors")
        log.error("%s %s", request.method, request.url.path, exc_info=error)
        return JSONResponse({"error": "internal error: the server's log has it"}, 500)


def _add_dashboard(app: FastAPI) -> None:
    folder = resources.files("t3c.serve") / "dashboard"
    page = (folder / "index.html").read_bytes()
    files = {name: (folder / name).read_bytes() for name in FILES}

    @app.get("/", include_in_schema=False)
    async def dashboard() -> Response:
        return Response(page, media_type="text/html; charset=utf-8")

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise NotServedError("no such file")
        return Response(files[name], media_type=f"{FILES[name]}; charset=utf-8")


def _as_served(schema: dict[str, Any]) -> dict[str, Any]:
    """FastAPI promises 422 for what is malformed, here it is 400, as everywhere else; and it does
    not know of what is read by hand."""
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    parts = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        parts.pop(name, None)
    parts.update(infer.BODY_PARTS)
    return schema
