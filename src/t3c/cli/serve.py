"""`t3c serve`: an artifact over HTTP."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from t3c.cli.console import ArtifactArg, EngineOpt, ThreadsOpt, err, need
from t3c.errors import DataError, SpecError
from t3c.progress import showing
from t3c.runtime.monitor import MonitorConfig
from t3c.spec import Budget

TOKEN = "T3C_ADMIN_TOKEN"

HostOpt = Annotated[str, typer.Option(help="Address to listen at")]
PortOpt = Annotated[int, typer.Option(help="Port; 0 for any that is free")]
AllowHostOpt = Annotated[
    list[str] | None, typer.Option(help="A name clients may call it by; may be repeated")
]
LanesOpt = Annotated[int, typer.Option(min=1, help="Requests that run side by side")]
BatchOpt = Annotated[
    int | None, typer.Option(min=1, help="Samples that run as one; default as helps")
]
ObjectiveOpt = Annotated[
    float | None,
    typer.Option(help="What a request may take; default 10 times the largest profile"),
]
LatencyOpt = Annotated[float | None, typer.Option(help="Standing budget of the model")]
SizeOpt = Annotated[float | None, typer.Option(help="Standing budget of the size")]
DriftOpt = Annotated[float | None, typer.Option(help="Standing cap on drift")]
MaxDropOpt = Annotated[float | None, typer.Option(help="Standing cap on measured loss")]
ProfileOpt = Annotated[
    str | None, typer.Option(help="Serve this one whatever the load, unless asked")
]
WatchOpt = Annotated[
    list[str] | None, typer.Option(help="thermal, cpu or battery; may be repeated")
]
MonitorOpt = Annotated[bool, typer.Option("--monitor", help="Watch for moved activations")]
MemoryOpt = Annotated[float | None, typer.Option(help="Cap on compiled profiles")]
RateOpt = Annotated[float | None, typer.Option(help="Requests a second of one client")]
WaitingOpt = Annotated[int, typer.Option(min=1, help="Requests that may wait")]
BodyMbOpt = Annotated[float, typer.Option(help="Largest body")]
JsonMbOpt = Annotated[float, typer.Option(help="Most of it that is JSON")]
RowsOpt = Annotated[int, typer.Option(min=1, help="Samples of one request at most")]
DwellOpt = Annotated[
    float, typer.Option(help="Least time before load lets a larger profile serve again")
]
ShadowOpt = Annotated[
    float, typer.Option(help="Share of answers that the largest profile gives as well")
]
DrainOpt = Annotated[float, typer.Option(help="Go on for so long, not ready, once told to stop")]
TokenFileOpt = Annotated[
    Path | None, typer.Option(help=f"Admin token; default {TOKEN}, else one is made")
]
FollowOpt = Annotated[
    bool, typer.Option("--follow", help="Reload when the artifact changes; also on SIGHUP")
]
AccessLogOpt = Annotated[
    Path | None, typer.Option(help="File for a line of JSON a request; - for stdout")
]
RayOpt = Annotated[bool, typer.Option("--ray", help="Serve by replicas on Ray")]
ReplicasOpt = Annotated[int, typer.Option(min=1, help="Replicas at least, with --ray")]
MaxReplicasOpt = Annotated[
    int | None, typer.Option(min=1, help="Replicas at most; default as many as at least")
]
RayAddressOpt = Annotated[
    str | None, typer.Option(help="A Ray that runs, HOST:PORT or auto; default starts one")
]


def serve(
    artifact: ArtifactArg,
    host: HostOpt = "127.0.0.1",
    port: PortOpt = 8000,
    allow_host: AllowHostOpt = None,
    engine: EngineOpt = "openvino",
    threads: ThreadsOpt = None,
    lanes: LanesOpt = 1,
    batch: BatchOpt = None,
    objective_ms: ObjectiveOpt = None,
    latency_ms: LatencyOpt = None,
    size_mb: SizeOpt = None,
    drift: DriftOpt = None,
    max_drop: MaxDropOpt = None,
    profile: ProfileOpt = None,
    watch: WatchOpt = None,
    monitor: MonitorOpt = False,
    memory_mb: MemoryOpt = None,
    rate: RateOpt = None,
    waiting: WaitingOpt = 256,
    body_mb: BodyMbOpt = 64.0,
    json_mb: JsonMbOpt = 4.0,
    rows: RowsOpt = 64,
    dwell_seconds: DwellOpt = 2.0,
    shadow: ShadowOpt = 0.01,
    drain_seconds: DrainOpt = 0.0,
    token_file: TokenFileOpt = None,
    follow: FollowOpt = False,
    access_log: AccessLogOpt = None,
    ray: RayOpt = False,
    replicas: ReplicasOpt = 1,
    max_replicas: MaxReplicasOpt = None,
    ray_address: RayAddressOpt = None,
) -> None:
    """Serve an artifact over HTTP: the Open Inference Protocol, budgets, a dashboard."""
    _check_extras(ray)
    if ray and (follow or access_log):
        raise SpecError("--follow and --access-log are not there with --ray")
    if not ray and (ray_address or replicas > 1 or max_replicas):
        raise SpecError("--replicas, --max-replicas and --ray-address are of --ray")
    from t3c.serve.config import Limits, ServeConfig
    from t3c.serve.run import Address
    from t3c.serve.run import serve as run
    from t3c.serve.versions import Origin

    limits = Limits(rate=rate, waiting=waiting, body_mb=body_mb, json_mb=json_mb, rows=rows)
    config = ServeConfig(
        objective_ms=objective_ms, budget=Budget(latency_ms, size_mb, None, drift, max_drop),
        lanes=lanes, batch=batch, fixed=profile, watch=tuple(watch or ()), limits=limits,
        drain_seconds=drain_seconds, dwell=dwell_seconds, shadow=shadow,
    )  # fmt: skip
    origin = Origin(artifact, engine, threads, memory_mb, MonitorConfig() if monitor else None)
    address, token = Address(host, port, tuple(allow_host or ())), _token(token_file)
    _log_to(access_log)
    with showing() as show:

        def say(text: str) -> None:
            show.stop()
            err.print(text, soft_wrap=True)

        if not ray:
            run(origin, config, address, token=token, follow=follow, say=say, watch=show.watch)
            return
        from t3c.serve.ray import deploy

        wanted = replicas, max_replicas or replicas
        deploy(
            origin, config, address, token=token, replicas=wanted, ray_address=ray_address, say=say
        )


def _check_extras(ray: bool) -> None:
    """Raise what to install where a module that serves is missing."""
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        need(module, "serve")
    if ray:
        need("ray", "ray")


def _token(file: Path | None) -> str | None:
    """Return the admin token of a file, or of the environment."""
    token = os.environ.get(TOKEN)
    if file is not None:
        if not file.is_file():
            raise DataError(f"{file}: no such file")
        try:
            token = file.read_text("ascii").strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not a token: {error}") from error
    if token is not None and not (len(token) >= 16 and token.isascii() and token.isprintable()):
        raise SpecError("the admin token must be at least 16 plain characters")
    return token


def _log_to(access: Path | None) -> None:
    """Write events to stderr, and each request as a line of JSON to where that is wanted."""
    events = logging.StreamHandler()
    events.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logging.getLogger("t3c.serve").addHandler(events)
    if access is None:
        return
    plain = str(access) == "-"
    handler = logging.StreamHandler(sys.stdout) if plain else logging.FileHandler(access)
    failed: list[str] = []

    def say_once(record: logging.LogRecord) -> None:
        if not failed:
            failed.append(record.name)
            sys.stderr.write(f"warning: {access}: requests cannot be logged: {sys.exc_info()[1]}\n")

    handler.handleError = say_once  # type: ignore[method-assign]
    handler.setFormatter(logging.Formatter("%(message)s"))
    requests = logging.getLogger("t3c.access")
    requests.addHandler(handler)
    requests.setLevel(logging.INFO)
    requests.propagate = False
