"""A replica: the whole server, which follows the board, with routes over all replicas."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from ray import serve
from ray.exceptions import RayError

from t3c.errors import EngineError, T3CError, UnavailableError
from t3c.runtime.remarks import Code, Remark
from t3c.serve import admin, metrics
from t3c.serve.app import build_app
from t3c.serve.board import BEAT, GONE, NAMESPACE, Beat, Order, Row, Rows, Told, board_name
from t3c.serve.config import ServeConfig
from t3c.serve.gather import merge_pages, merge_views
from t3c.serve.infer import BODY_ERRORS, ERRORS, service_of
from t3c.serve.refusals import NotServedError
from t3c.serve.schema import BudgetBody, MergedView, StandingBudget
from t3c.serve.service import Service
from t3c.serve.status import live_view, metrics_page
from t3c.serve.tracing import configured_tracing
from t3c.serve.versions import Origin
from t3c.spec import Budget

log = logging.getLogger("t3c.serve")


class Replica:
    """One replica: a service with its application, that does what the board says."""

    def __init__(
        self, origin: Origin, config: ServeConfig, token: str, hosts: Sequence[str]
    ) -> None:
        context = serve.get_replica_context()
        self.name, self._node = context.replica_tag, ray.get_runtime_context().get_node_id()
        self._board: Any = ray.get_actor(board_name(context.app_name), NAMESPACE)
        self.service, self._tracing = Service(origin, config), configured_tracing()
        self._token, self._hosts = token, hosts
        self._order, self._loads, self._watched = Order(-1, config.budget), 0, False
        self._following: asyncio.Task[None] | None = None
        self._reloads: list[asyncio.Task[None]] = []

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Come up: the application, once the artifact is warm and the board's budget stands."""
        told: Told = await self.ask("told", self.name)
        self._loads = told.loads  # what is reloaded from here on may not be what is loaded now
        await self.service.start()
        await self._follow()
        self._following = asyncio.ensure_future(self._follow_on())
        app = build_app(self.service, token=self._token, hosts=self._hosts, tracing=self._tracing)
        app.state.replica = self
        routes = app.router.routes
        plain = len(routes)
        app.include_router(router)
        app.openapi()  # of two that are alike it describes the last, and the first one answers
        routes[:] = routes[plain:] + routes[:plain]
        return app

    def check_health(self) -> None:
        """Raise where the replica should be started anew."""
        if not self.service.live or self._following is None or self._following.done():
            raise EngineError("a lane has ended, or what follows the board")

    async def __del__(self) -> None:
        """Ray Serve calls it, and awaits it, when all that the replica was sent is answered."""
        for task in (self._following, *self._reloads):
            if task is not None:
                task.cancel()
        with suppress(UnavailableError):
            await self.ask("leave", self.name)
        await self.service.stop()
        self._tracing.close()

    async def ask(self, what: str, *arguments: Any) -> Any:
        """Call the board."""
        try:
            return await getattr(self._board, what).remote(*arguments)
        except RayError as error:
            kind = type(error).__name__
            raise UnavailableError(f"the replicas' board does not answer: {kind}") from error

    async def set_budget(self, budget: Budget, whose: str | None) -> list[str]:
        """Give an order, and wait until those it is for follow it; those that do not yet."""
        order: Order = await self.ask("order", budget, whose)
        await self._follow()
        until, waiting = time.monotonic() + GONE, [""]
        while waiting and time.monotonic() < until:
            beats: list[Beat] = await self.ask("beats")
            waiting = [
                beat.row.replica
                for beat in beats
                if whose in (None, beat.row.replica) and beat.order.number < order.number
            ]
            if waiting:
                await asyncio.sleep(BEAT / 5)
        return waiting

    async def reload(self) -> str:
        """Load the artifact anew; if that goes well, everywhere."""
        name = await self.service.reload()
        self._loads = await self.ask("reload")
        return name

    def beat(self, watched: bool) -> Beat:
        """What there is to tell; `watched` with views."""
        service, scheduler = self.service, self.service.scheduler
        profile = service.standing(None).profile
        row = Row(
            replica=self.name, node=self._node, pid=os.getpid(), state=service.state,
            version=service.version.name, profile=profile, ceiling=scheduler.ceiling,
            budget=BudgetBody(**asdict(service.budget)),
            requests_per_s=scheduler.policy.rate(time.monotonic()), waiting=scheduler.waiting,
        )  # fmt: skip
        if not watched:
            return Beat(row, self._order, self._loads)
        return Beat(row, self._order, self._loads, live_view(service), metrics_page(service))

    async def _follow(self) -> None:
        """Tell the board, and do what it says."""
        told: Told = await self.ask("beat", self.beat(self._watched))
        self._watched = told.watched
        if told.order.number > self._order.number:
            self._order = told.order
            self.service.set_budget(told.order.budget)
        if told.loads > self._loads:
            self._loads = told.loads
            self._reloads = [task for task in self._reloads if not task.done()]
            self._reloads.append(asyncio.ensure_future(self._reload()))

    async def _follow_on(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            try:
                await self._follow()
            except T3CError as error:
                log.warning("%s", error)

    async def _reload(self) -> None:
        try:
            await self.service.reload()
        except T3CError as error:  # the old version serves on
            log.error("not reloaded: %s", error)


router = APIRouter(tags=["replicas"])


def replica_of(request: Request) -> Replica:
    found: Replica = request.app.state.replica
    return found


@router.get("/v1/replicas", response_model=Rows, responses={503: ERRORS[503]})
async def replicas(request: Request) -> Rows:
    """Every replica with its budget, its profile and its load."""
    beats: list[Beat] = await replica_of(request).ask("beats")
    return Rows(replicas=[beat.row for beat in beats])


@router.put(
    "/v1/budget", response_model=StandingBudget, responses={**BODY_ERRORS, **admin.DENIED},
    openapi_extra=admin.PUT, dependencies=[Depends(admin.authorized)],
)  # fmt: skip
async def set_budget_of(request: Request, replica: str | None = None) -> StandingBudget:
    """Change the standing budget of all replicas, or of one alone."""
    mine, service = replica_of(request), service_of(request)
    budget = await admin.read_budget(request)
    choice = service.standing(budget)  # a budget that cannot be is refused here
    if replica is not None:
        await _check_replica(mine, replica)
    late = await mine.set_budget(budget, replica)
    behind = [Remark(Code.NOT_FOLLOWED, other=name) for name in late]
    return StandingBudget.of(
        choice.profile, choice.reason, [*choice.warnings, *behind],
        budget=BudgetBody(**asdict(budget)), objective_ms=service.scheduler.policy.objective_ms,
    )  # fmt: skip


@router.post(
    "/v1/reload", response_model=admin.Reloaded,
    responses={**ERRORS, **admin.DENIED, **admin.REPLACED},
    dependencies=[Depends(admin.authorized)],
)  # fmt: skip
async def reload_all(request: Request) -> admin.Reloaded:
    """Read the artifact anew on one replica and, if it is warm there, on all."""
    return admin.Reloaded(version=await replica_of(request).reload())


@router.get("/v1/live", response_model=MergedView, responses=ERRORS)
async def live_of(request: Request, replica: str | None = None) -> MergedView:
    """Load, latencies, profiles over time, drift and events of all replicas, or of one."""
    mine = replica_of(request)
    views = {beat.row.replica: beat.view for beat in await _looked(mine) if beat.view is not None}
    if replica is not None:
        await _check_replica(mine, replica)
        if replica not in views:
            raise UnavailableError(f"{replica} has not told of itself yet: ask again")
        views = {replica: views[replica]}
    return merge_views(views)


@router.get("/metrics", response_class=Response)
async def prometheus_of(request: Request) -> Response:
    """Counters, histograms and gauges of every replica as Prometheus reads them."""
    beats = await _looked(replica_of(request))
    page = merge_pages({beat.row.replica: beat.page for beat in beats if beat.page})
    return Response(page, media_type=metrics.CONTENT_TYPE)


async def _looked(mine: Replica) -> list[Beat]:
    """The beats of all replicas with views; at the first look others may not have sent one yet."""
    try:
        beats: list[Beat] = await mine.ask("beats", True)
    except UnavailableError:  # a replica alone still tells of itself
        beats = []
    others = [beat for beat in beats if beat.row.replica != mine.name]
    return sorted([mine.beat(True), *others], key=lambda beat: beat.row.replica)


async def _check_replica(mine: Replica, name: str) -> None:
    names = [beat.row.replica for beat in await mine.ask("beats")]
    if name not in names:
        raise NotServedError(f"no replica {name[:100]!r}: there are {', '.join(names)}")
