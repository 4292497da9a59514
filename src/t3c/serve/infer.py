"""`/v2`: the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from t3c.engines.protocol import Array
from t3c.errors import DataError
from t3c.runtime.remarks import Remark
from t3c.runtime.standing import guarantee
from t3c.serve.gate import ARRIVED, TOLD, read_body, unless_gone
from t3c.serve.messages import (
    InferRequest,
    InferResponse,
    ModelMetadata,
    OutputTensor,
    Scalar,
    ServerMetadata,
)
from t3c.serve.protocol import Asked, parse_request
from t3c.serve.refusals import NotServedError
from t3c.serve.service import Service
from t3c.serve.tensors import HEADER_LENGTH, NAMES, encode_response, metadata
from t3c.serve.tickets import Served
from t3c.serve.versions import Version
from t3c.version import __version__

router = APIRouter(tags=["Open Inference Protocol"])

GONE = 499  # nobody reads it but the log


class Error(BaseModel):
    """What went wrong; a refusal has a code beside the sentence."""

    error: str
    code: str | None = None


class Ready(BaseModel):
    ready: bool


class Live(BaseModel):
    live: bool


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "what was sent cannot be"},
    404: {"model": Error, "description": "not served here"},
    429: {"model": Error, "description": "too much is asked now; see Retry-After"},
    503: {"model": Error, "description": "starting or stopping"},
}
BODY_ERRORS = {
    **ERRORS,
    408: {"model": Error, "description": "the body did not come in time"},
    413: {"model": Error, "description": "the body is too large"},
}
# What a body is: described by hand, as it is read by hand.
BODY = InferRequest.model_json_schema(ref_template="#/components/schemas/{model}")
BODY_PARTS = BODY.pop("$defs")
INFER = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": BODY},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.get("/v2", response_model=ServerMetadata)
async def server() -> ServerMetadata:
    """The server's name, version and extensions."""
    return ServerMetadata(name="t3c", version=__version__, extensions=["binary_tensor_data"])


@router.get("/v2/health/live", response_model=Live, responses={503: {"model": Live}})
async def live(request: Request) -> Response:
    """Whether the server works; if not, start it anew."""
    alive = service_of(request).live
    return JSONResponse({"live": alive}, 200 if alive else 503)


@router.get("/v2/health/ready", response_model=Ready, responses={503: {"model": Ready}})
async def ready(request: Request) -> Response:
    """Whether requests are answered now."""
    up = service_of(request).ready
    return JSONResponse({"ready": up}, 200 if up else 503)


@router.get("/v2/models/{model}/versions/{version}/ready", response_model=Ready, responses=ERRORS)
@router.get("/v2/models/{model}/ready", response_model=Ready, responses=ERRORS)
async def model_ready(request: Request, model: str, version: str | None = None) -> Response:
    """Whether the model is served now."""
    service = service_of(request)
    _check_name(service, model, version)
    return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)


@router.get("/v2/models/{model}/versions/{version}", response_model=ModelMetadata, responses=ERRORS)
@router.get("/v2/models/{model}", response_model=ModelMetadata, responses=ERRORS)
async def model_metadata(request: Request, model: str, version: str | None = None) -> ModelMetadata:
    """What the model takes and gives."""
    service = service_of(request)
    _check_name(service, model, version)
    entry = service.version.model
    return ModelMetadata(
        name=entry.name, versions=[service.version.name], platform="t3c",
        inputs=[metadata(one) for one in entry.inputs],
        outputs=[metadata(one) for one in entry.outputs],
    )  # fmt: skip


@router.post(
    "/v2/models/{model}/versions/{version}/infer", response_model=InferResponse,
    responses=BODY_ERRORS, openapi_extra=INFER,
)  # fmt: skip
@router.post(
    "/v2/models/{model}/infer", response_model=InferResponse, responses=BODY_ERRORS,
    openapi_extra=INFER,
)  # fmt: skip
async def infer(request: Request, model: str, version: str | None = None) -> Response:
    """Answer within a budget, which `parameters` name; the answer's name the profile."""
    service = service_of(request)
    _check_name(service, model, version)
    limits, headers = service.config.limits, request.headers
    body = await read_body(request, limits)
    asked = parse_request(
        body, headers.get(HEADER_LENGTH), int(limits.json_mb * 1e6), service.most_numbers
    )
    _wanted(service.version, asked)
    with request.app.state.tracing.span("infer", headers) as attributes:
        work = service.infer(
            asked.inputs, asked.budget, asked.profile,
            arrived=request.scope[ARRIVED], deadline_ms=asked.deadline_ms,
        )  # fmt: skip
        found = await unless_gone(request, work)
        if found is None:
            return Response(status_code=GONE)
        by, served = found
        attributes.update({f"t3c.{k}": v for k, v in _standing(served, ()).items()})
    request.scope[TOLD].update(
        profile=served.answer.profile, rows=len(served.answer.output),
        waited_ms=round(served.waited_ms, 3), late=served.late, id=asked.id,
    )  # fmt: skip
    return _response(by, asked, served)


def _response(version: Version, asked: Asked, served: Served) -> Response:
    arrays: dict[str, Array] = dict(
        zip([o.name for o in version.model.outputs], served.answer.outputs, strict=False)
    )
    names = asked.wanted or list(arrays)
    chosen = [arrays[name] for name in names]
    answer = InferResponse(
        model_name=version.model.name, model_version=version.name, id=asked.id,
        parameters=_standing(served, asked.warnings),
        outputs=[
            OutputTensor(name=n, shape=list(a.shape), datatype=NAMES[str(a.dtype)])
            for n, a in zip(names, chosen, strict=True)
        ],
    )  # fmt: skip
    body, headers = encode_response(answer, chosen, asked.binary)
    headers["t3c-profile"] = served.answer.profile
    certificate = served.answer.certificate
    headers["t3c-epsilon"] = "none" if certificate is None else f"{certificate.epsilon:.6g}"
    return Response(body, headers=headers)


def _standing(served: Served, warnings: Sequence[Remark]) -> dict[str, Scalar | None]:
    """Return what an answer stands for, as parameters, which are plain values."""
    answer, certificate = served.answer, served.answer.certificate
    every = (*warnings, *answer.warnings)
    return {
        "profile": answer.profile,
        "reason": str(answer.reason),
        "reason_code": str(answer.reason.code),
        "certified": certificate is not None,
        "epsilon": None if certificate is None else certificate.epsilon,
        "delta": None if certificate is None else certificate.delta,
        "guarantee": guarantee(certificate),
        "flagged": answer.flagged,
        "late": served.late,
        "waited_ms": round(served.waited_ms, 3),
        "ran_ms": round(served.ran_ms, 3),
        "warnings": "; ".join(map(str, every)) or None,
        "warning_codes": "; ".join(warning.code for warning in every) or None,
    }


def _wanted(version: Version, asked: Asked) -> None:
    """Refuse outputs that the model does not have, before it runs."""
    known = [output.name for output in version.model.outputs]
    unknown = [name for name in asked.wanted or () if name not in known]
    if unknown:
        raise DataError(f"no output {unknown[0]!r}: there are {', '.join(known)}")


def _check_name(service: Service, model: str, version: str | None) -> None:
    mine = service.version
    if model != mine.model.name:
        raise NotServedError(f"no model {model[:100]!r}: {mine.model.name} is served")
    if version not in (None, mine.name):
        raise NotServedError(f"no version {str(version)[:100]!r}: {mine.name} is served")
