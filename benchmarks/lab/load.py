"""Open-loop load on a server: requests are sent when they are due, whatever became of others."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from t3c.engines.protocol import Array
from t3c.serve.tensors import HEADER_LENGTH, NAMES

CONNECTIONS = 256
GIVE_UP = 20.0  # seconds after which a request counts as lost


@dataclass(frozen=True)
class Phase:
    """So many seconds of random arrivals at a rate (requests a second)."""

    seconds: float
    rate: float


@dataclass(frozen=True)
class Body:
    """A request that is ready to be sent, and the classes that its samples are of."""

    raw: bytes
    head: int
    labels: Array


class Outcome(NamedTuple):
    """What became of a request: when it was due, from then to its answer, and the answer.

    `status` is 0 of one that got none; `right` counts samples of which the class is right.
    """

    due: float
    ms: float
    status: int
    profile: str | None
    right: int
    rows: int


def arrivals(phases: Sequence[Phase], seed: int) -> list[float]:
    """When requests are due, in seconds: a Poisson process whose rate changes by phases."""
    rng, start, due = np.random.default_rng(seed), 0.0, list[float]()
    for phase in phases:
        count = rng.poisson(phase.rate * phase.seconds)
        due += (start + np.sort(rng.uniform(0, phase.seconds, count))).tolist()
        start += phase.seconds
    return due


def bodies(name: str, output: str, samples: Array, labels: Array, rows: int) -> list[Body]:
    """Requests of so many samples each, as binary tensors; what is left over is left out."""
    made = []
    for start in range(0, len(samples) - rows + 1, rows):
        array = np.ascontiguousarray(samples[start : start + rows])
        tensor = {
            "name": name, "shape": list(array.shape), "datatype": NAMES[str(array.dtype)],
            "parameters": {"binary_data_size": array.nbytes},
        }  # fmt: skip
        wanted = {"name": output, "parameters": {"binary_data": True}}
        head = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
        made.append(Body(head + array.tobytes(), len(head), labels[start : start + rows]))
    return made


async def offer(
    url: str,
    requests: Sequence[Body],
    due: Sequence[float],
    watch: Callable[[int], object] = lambda done: None,
) -> list[Outcome]:
    """Send request i at due[i] seconds from now; latencies count from then, not from sending."""
    connector = aiohttp.TCPConnector(limit=CONNECTIONS, force_close=False)
    timeout = aiohttp.ClientTimeout(total=GIVE_UP)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = time.perf_counter() + 0.2
        sent: list[asyncio.Task[Outcome]] = []
        for index, at in enumerate(due):
            wait = start + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            body = requests[index % len(requests)]
            sent.append(asyncio.ensure_future(_one(session, url, body, start, at)))
            watch(index)
        return list(await asyncio.gather(*sent))


async def _one(
    session: aiohttp.ClientSession, url: str, body: Body, start: float, at: float
) -> Outcome:
    headers = {HEADER_LENGTH: str(body.head), "content-type": "application/octet-stream"}
    rows = len(body.labels)
    try:
        async with session.post(url, data=body.raw, headers=headers) as answer:
            raw = await answer.read()
            ms = (time.perf_counter() - start - at) * 1e3
            if answer.status != 200:
                return Outcome(at, ms, answer.status, None, 0, rows)
            right = _right(raw, int(answer.headers[HEADER_LENGTH]), body.labels)
            return Outcome(at, ms, 200, answer.headers["t3c-profile"], right, rows)
    except (aiohttp.ClientError, TimeoutError):
        return Outcome(at, (time.perf_counter() - start - at) * 1e3, 0, None, 0, rows)


def _right(raw: bytes, head: int, labels: Array) -> int:
    """How many classes of an answer with float32 logits (n, classes) are right."""
    logits = np.frombuffer(raw[head:], np.float32).reshape(len(labels), -1)
    return int((logits.argmax(axis=1) == labels).sum())


def share_within(outcomes: Sequence[Outcome], objective_ms: float) -> float:
    """The share of what was offered that was answered within the objective."""
    good = sum(o.status == 200 and o.ms <= objective_ms for o in outcomes)
    return good / len(outcomes) if outcomes else 1.0


def summary(outcomes: Sequence[Outcome], objective_ms: float) -> dict[str, Any]:
    """A run in figures: of what was offered, what was answered in time, late, refused, lost."""
    answered = [o for o in outcomes if o.status == 200]
    rows = sum(o.rows for o in answered)
    took = [o.ms for o in answered]
    p50, p90, p99 = np.percentile(took, [50, 90, 99]).tolist() if took else (None, None, None)
    return {
        "offered": len(outcomes),
        "within": share_within(outcomes, objective_ms),
        "late": sum(o.ms > objective_ms for o in answered),
        "refused": sum(o.status in (429, 503) for o in outcomes),
        "lost": sum(o.status not in (200, 429, 503) for o in outcomes),
        "accuracy": sum(o.right for o in answered) / rows if rows else None,
        "images": rows,
        "p50": p50, "p90": p90, "p99": p99,
    }  # fmt: skip


def hold(
    probe: Callable[[float], float], low: float, high: float, least: float = 0.99, steps: int = 6
) -> float:
    """The highest rate, between two, at which a probe's share is at least `least`, by halving."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if probe(middle) >= least else (low, middle)
    return low
