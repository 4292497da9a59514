"""Many machines: an artifact on Ray Serve, by as many replicas as load asks for."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, HTTPOptions
from ray.serve.deployment import Application
from ray.serve.exceptions import RayServeException

from t3c.artifact.reader import Artifact
from t3c.errors import EngineError, SpecError
from t3c.serve.board import NAMESPACE, Board, board_name
from t3c.serve.config import ServeConfig
from t3c.serve.replica import Replica
from t3c.serve.run import KEEP_ALIVE, Address
from t3c.serve.versions import Origin
from t3c.spec import Budget

HEALTH, PATIENCE = 2.0, 10.0  # seconds between checks, and that an answer may take
LOOK_BACK, UP_AFTER, DOWN_AFTER = 15.0, 5.0, 120.0  # seconds, of autoscaling
STOPPING = 20.0  # seconds to answer what waits, beyond drain_seconds
TRIES = 3  # of a replica's start, before the first has come up
PASSED = ("T3C_CACHE", "OTEL_")  # what replicas have of this process's environment


def deploy(
    origin: Origin,
    config: ServeConfig,
    address: Address,
    *,
    token: str | None = None,
    replicas: tuple[int, int] = (1, 1),
    ray_address: str | None = None,
    say: Callable[[str], object] = lambda text: None,
    name: str = "t3c",
) -> None:
    """Serve an artifact by as many replicas as load asks for, from the least to the most, until
    told to stop. `ray_address` is of a Ray that runs, "auto" of this machine's; None starts one.

    Every node has the artifact at the same path. A replica takes `lanes` times `threads` CPUs, one
    thread where that is not said: more replicas, not more threads, fill a machine.
    """
    least, most = replicas
    if not 1 <= least <= most:
        raise SpecError(
            f"replicas must be from 1 up to the most there may be, got {least} and {most}"
        )
    threads = origin.threads or 1
    origin = replace(origin, path=origin.path.resolve(), threads=threads)
    artifact, cpus = Artifact(origin.path), threads * config.lanes
    made = token or secrets.token_urlsafe(24)
    where = _free(address) if ray_address is None else address
    replica = serve.deployment(**replica_options(config, replicas, cpus))(serve.ingress()(Replica))
    target = replica.bind(origin, config, made, where.allowed)
    with (
        suppress(KeyboardInterrupt),
        _connected(ray_address, least * cpus),
        _served(target, where, config.budget, name) as board,
    ):
        say(_told(artifact, where, replicas, cpus, None if token else made))
        signal.signal(signal.SIGHUP, lambda *_: board.reload.remote())
        while True:
            time.sleep(1.0)


@contextmanager
def _connected(address: str | None, cpus: int) -> Iterator[None]:
    """Ray, started here or elsewhere; told to stop, what is within is interrupted."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent home
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    untyped: Any = ray  # a part of it is, and which one mypy does not always agree on
    mine = not ray.is_initialized()
    if address is not None:
        _check_answers(address)
    try:
        ray.init(
            address or "local", ignore_reinit_error=True, include_dashboard=False,
            log_to_driver=False, logging_level=logging.ERROR,
        )  # fmt: skip
    except ConnectionError as error:
        raise SpecError(f"no Ray answers at {address}") from error
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        there = int(untyped.cluster_resources().get("CPU", 0))
        if address is None and there < cpus:
            raise SpecError(f"the replicas take {cpus} CPUs and there are {there}")
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if mine:
            untyped.shutdown()


@contextmanager
def _served(target: Application, where: Address, budget: Budget, name: str) -> Iterator[Any]:
    """The application with its board, which is yielded; what waits in the end is answered."""
    board: Any = ray.remote(Board).options(
        name=board_name(name), namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
        num_cpus=0, max_restarts=-1,
    ).remote()  # fmt: skip
    http = HTTPOptions(host=where.host, port=where.port, keep_alive_timeout_s=KEEP_ALIVE)
    try:
        try:
            ray.get(board.order.remote(budget))
            serve.start(http_options=http)
            serve.run(target, name=name)
        except (RayError, RayServeException, RuntimeError, TimeoutError) as error:
            raise EngineError(f"Ray does not serve it: {_cause(error, name)}") from error
        yield board
    finally:
        with suppress(RayServeException):  # it has not come as far as that
            serve.delete(name)
        ray.kill(board)


def replica_options(config: ServeConfig, replicas: tuple[int, int], cpus: int) -> dict[str, Any]:
    """How Ray Serve runs replicas; it hands on as much as a server lets wait, where deadlines
    count."""
    least, most = replicas
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
    scale: dict[str, Any] = {"num_replicas": least}
    if least < most:
        # One request a lane on average is a lane that random arrivals keep busy for 0.59 of the
        # time; with an objective of ten times the largest profile, that one serves up to 0.7.
        scale = {"autoscaling_config": AutoscalingConfig(
            min_replicas=least, max_replicas=most, target_ongoing_requests=float(config.lanes),
            look_back_period_s=LOOK_BACK, upscale_delay_s=UP_AFTER, downscale_delay_s=DOWN_AFTER,
        )}  # fmt: skip
    return {
        "name": "replica",
        "max_ongoing_requests": config.limits.waiting,
        "max_queued_requests": config.limits.waiting,
        "health_check_period_s": HEALTH,
        "health_check_timeout_s": PATIENCE,
        "graceful_shutdown_timeout_s": config.drain_seconds + STOPPING,
        "max_constructor_retry_count": TRIES,
        "ray_actor_options": {"num_cpus": cpus, "runtime_env": {"env_vars": passed}},
        **scale,
    }


def _free(address: Address) -> Address:
    """The address with its port, if that is free here."""
    with closing(address.open()) as bound:
        return replace(address, port=bound.getsockname()[1])


def _check_answers(address: str) -> None:
    """Refuse a HOST:PORT where nothing listens; Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except OSError as error:
        raise SpecError(f"no Ray answers at {address}: {error.strerror or error}") from error


def _cause(error: Exception, name: str) -> str:
    """What a replica said last, or the error itself: Ray's texts are tracebacks in tracebacks."""
    found = serve.status().applications.get(name)
    texts = [one.message for one in found.deployments.values()] if found else []
    lines = [line.strip() for text in (str(error), *texts) for line in text.splitlines()]
    ours = [line for line in lines if line.startswith("t3c.errors.")]
    return ours[-1].partition(": ")[2] if ours else next(filter(None, lines), type(error).__name__)


def _told(
    artifact: Artifact, where: Address, replicas: tuple[int, int], cpus: int, made: str | None
) -> str:
    model, (least, most) = artifact.manifest.model.name, replicas
    host = f"[{where.host}]" if ":" in where.host else where.host
    url = f"http://{host}:{where.port}"
    count = str(least) if least == most else f"{least} to {most}"
    size = f"replicas: {count}, CPUs of each: {cpus}"
    return "\n".join([
        f"{model} {artifact.content[:12]}: {len(artifact.manifest.profiles)} profiles, {size}",
        f"protocol  {url}/v2/models/{model}/infer",
        f"dashboard {url}/#token={made}" if made else f"dashboard {url}/",
        f"replicas  {url}/v1/replicas",
    ])  # fmt: skip
