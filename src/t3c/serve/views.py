"""`/v1`: profiles, certificates, what is going on, and a place to try inputs."""

from __future__ import annotations

import asyncio
import io
import time
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from t3c.engines.protocol import Array
from t3c.errors import DataError
from t3c.runtime.reading import read_picture
from t3c.runtime.standing import guarantee, top_classes
from t3c.runtime.tokens import prompt_ids, text_inputs
from t3c.serve import metrics
from t3c.serve.gate import ARRIVED, TOLD, read_body
from t3c.serve.infer import BODY_ERRORS, ERRORS, service_of
from t3c.serve.protocol import BUDGET, Message, parse_message
from t3c.serve.service import Service
from t3c.spec import Budget, Certificate

router = APIRouter(tags=["T3C"])

SHOWN = 16  # numbers of an output without classes
MOST_TOKENS, LONGEST_TEXT = 256, 20_000
PATIENCE_MS = 10_000.0  # people wait for longer than programs

Limit = Annotated[float | None, Query(gt=0, allow_inf_nan=False)]
Quantile = Annotated[str, Query(pattern="^p(50|90|99)$")]


def query_budget(
    request: Request,
    latency_ms: Limit = None,
    size_mb: Limit = None,
    energy_mj: Limit = None,
    drift: Limit = None,
    quantile: Quantile = "p50",
) -> Budget | None:
    """The budget of a query, None where nothing is limited: then the standing one counts."""
    unknown = set(request.query_params) - {*BUDGET, "profile"}
    if unknown:
        raise DataError(f"unknown parameter {min(unknown)[:50]!r}: there are {', '.join(BUDGET)}")
    if all(limit is None for limit in (latency_ms, size_mb, energy_mj, drift)):
        return None
    return Budget(latency_ms, size_mb, energy_mj, drift, quantile)


Asked = Annotated[Budget | None, Depends(query_budget)]


class Profiles(BaseModel):
    """Every profile, from the smallest to the largest."""

    model_config = ConfigDict(extra="allow")

    model: str
    version: str
    profiles: list[dict[str, Any]]


class Standing(BaseModel):
    """The profile that would serve a budget, and what is guaranteed of it."""

    profile: str
    reason: str
    warnings: list[str]
    certificate: dict[str, Any] | None
    guarantee: str


class TryText(Message):
    """A text to classify, or to go on with."""

    text: str = Field(min_length=1, max_length=LONGEST_TEXT)
    tokens: int = Field(default=32, ge=1, le=MOST_TOKENS)


TRY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": TryText.model_json_schema()},
            "image/png": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.get("/v1/profiles", response_model=Profiles, responses={503: ERRORS[503]})
async def profiles(request: Request) -> dict[str, Any]:
    """The profiles with their sizes, latencies here and certificates."""
    return service_of(request).profiles()


@router.get("/v1/certificate", response_model=Standing, responses=ERRORS)
async def certificate(
    request: Request, budget: Asked, profile: str | None = None
) -> dict[str, Any]:
    """Which profile would serve a budget now, or a named profile, and with what certificate."""
    if budget is not None and profile is not None:
        raise DataError("name a budget or a profile, not both")
    return service_of(request).standing(budget, profile)


@router.get("/v1/live", responses={503: ERRORS[503]})
async def live(request: Request) -> dict[str, Any]:
    """Load, latencies, profiles over time, drift and events of the last two minutes."""
    return service_of(request).live_view()


@router.get("/metrics", response_class=Response)
async def prometheus(request: Request) -> Response:
    """Counters, histograms and gauges as Prometheus reads them."""
    return Response(service_of(request).metrics_page(), media_type=metrics.CONTENT_TYPE)


@router.post("/v1/try", responses=BODY_ERRORS, openapi_extra=TRY)
async def try_it(request: Request, budget: Asked) -> Response:
    """Answer a picture, or a text, read as the artifact says: for people and their browsers."""
    service = service_of(request)
    limits = service.config.limits
    inputs: Any
    if request.headers.get("content-type", "").startswith("application/json"):
        asked = parse_message(TryText, await read_body(request, limits, limits.json_mb))
        if service.version.model.states:
            return JSONResponse(await _written(service, asked, budget))
        inputs, warnings = _text(service, asked.text)
    else:
        body = await read_body(request, limits)
        inputs, warnings = await asyncio.to_thread(_picture, service, body), []
    arrived = request.scope[ARRIVED]
    _, served = await service.infer(inputs, budget, arrived=arrived, deadline_ms=PATIENCE_MS)
    answer = served.answer
    request.scope[TOLD].update(profile=answer.profile, late=served.late)
    classes = top_classes(answer.output[0], service.version.model.classes)
    output = None if classes else np.ravel(answer.output)[:SHOWN].astype(float).tolist()
    told = _told(answer.profile, answer.reason, [*warnings, *answer.warnings], answer.certificate)
    answers = [{"class": name, "probability": share} for name, share in classes]
    took = (time.monotonic() - arrived) * 1e3
    return JSONResponse(
        {"answers": answers, "output": output, "text": None, "latency_ms": took, **told}
    )


async def _written(service: Service, asked: TryText, budget: Budget | None) -> dict[str, Any]:
    words, spec = service.version.tokenizer, service.version.model.text
    if words is None:
        raise DataError("the artifact has no tokenizer: texts cannot be read")
    start = time.monotonic()
    ids = prompt_ids(words, asked.text, spec)
    stop = spec.stop if spec else ()
    tokens, last = await service.write(ids, budget, asked.tokens, stop)
    told = _told(last.profile, last.reason, last.warnings, last.certificate)
    took = (time.monotonic() - start) * 1e3
    return {
        "answers": [], "output": None, "text": words.decode(tokens), "latency_ms": took, **told
    }  # fmt: skip


def _text(service: Service, text: str) -> tuple[dict[str, Array], list[str]]:
    if service.version.tokenizer is None:
        raise DataError("the artifact has no tokenizer: texts cannot be read")
    return text_inputs(service.version.tokenizer, text, service.version.model)


def _picture(service: Service, body: bytes) -> Array:
    spec = service.version.model.image
    if spec is None:
        raise DataError("the artifact does not say how to read pictures: use /v2 with tensors")
    if not body:
        raise DataError("the picture is empty")
    return read_picture(io.BytesIO(body), spec)[None]


def _told(
    profile: str, reason: str, warnings: Any, certificate: Certificate | None
) -> dict[str, Any]:
    return {
        "profile": profile, "reason": reason, "warnings": list(warnings),
        "guarantee": guarantee(certificate),
    }  # fmt: skip
