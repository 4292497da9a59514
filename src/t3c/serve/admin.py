"""`/v1/budget` and `/v1/reload`: what changes the server, behind a token."""

from __future__ import annotations

import hmac
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from t3c.serve.gate import read_body
from t3c.serve.infer import BODY_ERRORS, ERRORS, Error, service_of
from t3c.serve.protocol import parse_message
from t3c.serve.schema import BudgetBody, StandingBudget
from t3c.serve.status import standing_budget
from t3c.spec import Budget

router = APIRouter(tags=["administration"])

SMALL_MB = 0.01  # of a body that is a few numbers
bearer = HTTPBearer(auto_error=False, description="the admin token")
DENIED: dict[int | str, dict[str, Any]] = {401: {"model": Error, "description": "no token"}}
REPLACED: dict[int | str, dict[str, Any]] = {
    409: {"model": Error, "description": "the new version failed; the old one serves on"}
}


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


@router.get("/v1/budget", response_model=StandingBudget, responses={503: ERRORS[503]})
async def budget(request: Request) -> StandingBudget:
    """The budget of requests that name none."""
    return standing_budget(service_of(request))


@router.put(
    "/v1/budget", response_model=StandingBudget, responses={**BODY_ERRORS, **DENIED},
    openapi_extra=PUT, dependencies=[Depends(authorized)],
)  # fmt: skip
async def set_budget(request: Request) -> StandingBudget:
    """Change it; requests that are sent from now on go by it."""
    service_of(request).set_budget(await read_budget(request))
    return await budget(request)


async def read_budget(request: Request) -> Budget:
    """Return the budget of a request's body."""
    limits = service_of(request).config.limits
    sent: BudgetBody = parse_message(BudgetBody, await read_body(request, limits, SMALL_MB))
    return Budget(**sent.model_dump())


@router.post(
    "/v1/reload", response_model=Reloaded, responses={**ERRORS, **DENIED, **REPLACED},
    dependencies=[Depends(authorized)],
)  # fmt: skip
async def reload(request: Request) -> Reloaded:
    """Read the artifact at the server's own path anew, and serve it once it is warm."""
    return Reloaded(version=await service_of(request).reload())
