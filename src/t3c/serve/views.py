"""`/v1`: profiles, certificates, what is going on, and a place to try inputs."""

from __future__ import annotations

import asyncio
import io
import time
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import Field

from t3c.engines.protocol import Array
from t3c.errors import DataError
from t3c.runtime.reading import read_picture
from t3c.runtime.remarks import Remark
from t3c.runtime.standing import guarantee, top_classes
from t3c.runtime.tokens import Tokenizer, prompt_ids, text_inputs
from t3c.serve import metrics, status
from t3c.serve.gate import ARRIVED, TOLD, read_body
from t3c.serve.infer import BODY_ERRORS, ERRORS, service_of
from t3c.serve.messages import Message
from t3c.serve.protocol import BUDGET, parse_message
from t3c.serve.schema import LiveView, Profiles, Standing, Tried
from t3c.serve.service import Service
from t3c.spec import Budget

router = APIRouter(tags=["T3C"])

SHOWN = 16  # numbers of an output without classes
MOST_TOKENS, LONGEST_TEXT = 256, 20_000
PATIENCE_MS = 10_000.0  # people wait for longer than programs

Limit = Annotated[float | None, Query(gt=0, allow_inf_nan=False)]
MaxDrop = Annotated[float | None, Query(ge=0, allow_inf_nan=False)]
Quantile = Annotated[str, Query(pattern="^p(50|90|99)$")]


def query_budget(
    request: Request,
    latency_ms: Limit = None,
    size_mb: Limit = None,
    energy_mj: Limit = None,
    drift: Limit = None,
    max_drop: MaxDrop = None,
    quantile: Quantile = "p50",
) -> Budget | None:
    """The budget of a query, None where nothing is limited: then the standing one counts."""
    unknown = set(request.query_params) - {*BUDGET, "profile"}
    if unknown:
        raise DataError(f"unknown parameter {min(unknown)[:50]!r}: there are {', '.join(BUDGET)}")
    if all(limit is None for limit in (latency_ms, size_mb, energy_mj, drift, max_drop)):
        return None
    return Budget(latency_ms, size_mb, energy_mj, drift, max_drop, quantile)


Asked = Annotated[Budget | None, Depends(query_budget)]


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
async def profiles(request: Request) -> Profiles:
    """The profiles with their sizes, latencies here and certificates."""
    return status.profiles(service_of(request))


@router.get("/v1/certificate", response_model=Standing, responses=ERRORS)
async def certificate(request: Request, budget: Asked, profile: str | None = None) -> Standing:
    """Which profile would serve a budget now, or a named profile, and with what certificate."""
    if budget is not None and profile is not None:
        raise DataError("name a budget or a profile, not both")
    return status.standing(service_of(request), budget, profile)


@router.get("/v1/live", response_model=LiveView, responses={503: ERRORS[503]})
async def live(request: Request) -> LiveView:
    """Load, latencies, profiles over time, drift and events of the last two minutes."""
    return status.live_view(service_of(request))


@router.get("/metrics", response_class=Response)
async def prometheus(request: Request) -> Response:
    """Counters, histograms and gauges as Prometheus reads them."""
    page = status.metrics_page(service_of(request))
    return Response(page, media_type=metrics.CONTENT_TYPE)


@router.post("/v1/try", response_model=Tried, responses=BODY_ERRORS, openapi_extra=TRY)
async def try_it(request: Request, budget: Asked) -> Tried:
    """Answer a picture, or a text, read as the artifact says: for people and their browsers."""
    service = service_of(request)
    limits = service.config.limits
    inputs: Any
    warnings: list[Remark] = []
    if request.headers.get("content-type", "").startswith("application/json"):
        asked = parse_message(TryText, await read_body(request, limits, limits.json_mb))
        if service.version.model.states:
            return await _written(service, asked, budget)
        inputs, warnings = text_inputs(_tokenizer(service), asked.text, service.version.model)
    else:
        body = await read_body(request, limits)
        inputs = await asyncio.to_thread(_picture, service, body)
    arrived = request.scope[ARRIVED]
    _, served = await service.infer(inputs, budget, arrived=arrived, deadline_ms=PATIENCE_MS)
    answer = served.answer
    request.scope[TOLD].update(profile=answer.profile, late=served.late)
    classes = top_classes(answer.output[0], service.version.model.classes)
    return Tried.of(
        answer.profile, answer.reason, [*warnings, *answer.warnings],
        answers=classes,
        output=None if classes else np.ravel(answer.output)[:SHOWN].astype(float).tolist(),
        text=None, latency_ms=(time.monotonic() - arrived) * 1e3,
        guarantee=guarantee(answer.certificate),
    )  # fmt: skip


async def _written(service: Service, asked: TryText, budget: Budget | None) -> Tried:
    words, spec = _tokenizer(service), service.version.model.text
    start = time.monotonic()
    ids = prompt_ids(words, asked.text, spec)
    stop = spec.stop if spec else ()
    tokens, last = await service.write(ids, budget, asked.tokens, stop)
    return Tried.of(
        last.profile, last.reason, last.warnings, answers=[], output=None,
        text=words.decode(tokens), latency_ms=(time.monotonic() - start) * 1e3,
        guarantee=guarantee(last.certificate),
    )  # fmt: skip


def _tokenizer(service: Service) -> Tokenizer:
    if service.version.tokenizer is None:
        raise DataError("the artifact has no tokenizer: texts cannot be read")
    return service.version.tokenizer


def _picture(service: Service, body: bytes) -> Array:
    spec = service.version.model.image
    if spec is None:
        raise DataError("the artifact does not say how to read pictures: use /v2 with tensors")
    if not body:
        raise DataError("the picture is empty")
    return read_picture(io.BytesIO(body), spec)[None]
