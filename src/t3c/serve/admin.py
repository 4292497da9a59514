"""`/v1/budget` and `/v1/reload`: what changes the server, behind a token."""

from __future__ import annotations

import hmac
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from t3c.serve.gate import read_body
from t3c.serve.infer import BODY_ERRORS, ERRORS, Error, service_of
from t3c.serve.protocol import Message, parse_message
from t3c.spec import Budget

router = APIRouter(tags=["administration"])

SMALL_MB = 0.01  # of a body that is a few numbers
bearer = HTTPBearer(auto_error=False, description="the admin token")
DENIED: dict[int | str, dict[str, Any]] = {401: {"model": Error, "description": "no token"}}
REPLACED: dict[int | str, dict[str, Any]] = {
    409: {"model": Error, "description": "the new version failed; the old one serves on"}
}


Limit = Annotated[float | None, Field(gt=0, strict=True)]


class BudgetBody(Message):
    """Limits for requests that name none; null is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    latency_ms: Limit = None
    size_mb: Limit = None
    energy_mj: Limit = None
    drift: Limit = None
    quantile: str = Field(default="p50", pattern="^p(50|90|99)$")


class Standing(BaseModel):
    """The budget of requests that name none, and what serves them now."""

    budget: BudgetBody
    objective_ms: float
    profile: str
    reason: str
    warnings: list[str]


class Reloaded(BaseModel):
    version: str


PUT = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": BudgetBody.model_json_schema()}},
    }
}


async def authorized(
    request: Request,
    given: HTTPAuthorizationCredentials | None = Depends(bearer),  # noqa: B008
) -> None:
    """Refuse what does not carry the admin token."""
    right: bytes = request.app.state.token
    mine = b"" if given is None else given.credentials.encode()
    if not hmac.compare_digest(mine, right):
        raise HTTPException(401, "an admin token is needed", {"www-authenticate": "Bearer"})


@router.get("/v1/budget", response_model=Standing, responses={503: ERRORS[503]})
async def budget(request: Request) -> dict[str, Any]:
    """The budget of requests that name none."""
    service = service_of(request)
    told = service.standing(None)
    return {
        "budget": asdict(service.budget),
        "objective_ms": service.scheduler.policy.config.objective_ms,
        **{name: told[name] for name in ("profile", "reason", "warnings")},
    }


@router.put(
    "/v1/budget", response_model=Standing, responses={**BODY_ERRORS, **DENIED}, openapi_extra=PUT,
    dependencies=[Depends(authorized)],
)  # fmt: skip
async def set_budget(request: Request) -> dict[str, Any]:
    """Change it; requests that are sent from now on go by it."""
    service = service_of(request)
    asked = parse_message(BudgetBody, await read_body(request, service.config.limits, SMALL_MB))
    service.set_budget(Budget(**asked.model_dump()))
    return await budget(request)


@router.post(
    "/v1/reload", response_model=Reloaded, responses={**ERRORS, **DENIED, **REPLACED},
    dependencies=[Depends(authorized)],
)  # fmt: skip
async def reload(request: Request) -> Reloaded:
    """Read the artifact at the server's own path anew, and serve it once it is warm."""
    return Reloaded(version=await service_of(request).reload())
