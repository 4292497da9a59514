"""`make bench-soak`: half an hour of requests, swaps, reloads and malformed requests.

Every request must come to an answer or a refusal that says why, none may be lost, and the server's
memory must be flat. The artifact is the demo's, `out/demo/digits.t3c`, copied.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from lab.figures import Figure, finish
from lab.load import Body, bodies
from lab.servers import Server, server
from t3c.artifact.reader import Artifact
from t3c.artifact.trim import trim
from t3c.errors import DataError, T3CError
from t3c.runtime.reading import read_arrays
from t3c.serve.tensors import HEADER_LENGTH

DEMO, WORK, OUT = Path("out/demo"), Path("out/bench-soak"), Path("out/bench-soak.json")
TOKEN = "a token for the soak alone"
CLIENTS, RELOAD_SECONDS, SAMPLE_SECONDS = 6, 20.0, 5.0
WARM_SHARE = 0.2  # of the time, after which memory is to stay as it is
GROWTH = 0.05  # of memory that it may move by over the rest
ANSWERS = {200, 429, 503}
TENSOR = b'{"inputs":[{"name":"input","shape":[1,2],"datatype":"%s","data":[1,2]}]%s}'
MALFORMED: dict[str, tuple[bytes, dict[str, str]]] = {
    "empty": (b"", {}),
    "not JSON": (b"{{{", {}),
    "no inputs": (b'{"inputs": []}', {}),
    "deep": (b"[" * 50_000, {}),
    "wrong shape": (TENSOR % (b"FP32", b""), {}),
    "wrong type": (TENSOR % (b"BYTES", b""), {}),
    "bad budget": (TENSOR % (b"FP32", b',"parameters":{"latency_ms":-1}'), {}),
    "long header": (b"{}", {HEADER_LENGTH: "99999999999999999999"}),
    "random": (random.Random(0).randbytes(5000), {}),
}


class Soak:
    """What was sent and what came back."""

    def __init__(self, one: Server, artifact: Path, requests: list[Body], seconds: float) -> None:
        self.one, self.artifact, self.requests = one, artifact, requests
        self.end = time.monotonic() + seconds
        self.statuses: Counter[int] = Counter()
        self.malformed: Counter[str] = Counter()  # by what should have been refused and was not
        self.profiles: Counter[str] = Counter()
        self.sent = self.wrong = self.bad = self.reloads = self.rolled_back = 0
        self.memory: list[dict[str, float]] = []
        self.started = time.monotonic()

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            clients = [self._client(session, seed) for seed in range(CLIENTS)]
            await asyncio.gather(
                *clients, self._spoiler(session), self._reloader(session), self._watcher(session)
            )

    @property
    def going(self) -> bool:
        return time.monotonic() < self.end

    async def _client(self, session: aiohttp.ClientSession, seed: int) -> None:
        """Requests with changing budgets, in bursts and pauses."""
        rng = random.Random(seed)
        while self.going:
            for _ in range(rng.randrange(1, 60)):
                body = rng.choice(self.requests)
                budget = rng.choice(
                    [{}, {"latency_ms": rng.uniform(0.05, 0.5)}, {"drift": rng.uniform(0.005, 0.3)},
                     {"size_mb": rng.uniform(0.1, 2)}, {"deadline_ms": rng.uniform(1, 100)}]
                )  # fmt: skip
                await self._one(session, body, budget)
            await asyncio.sleep(rng.uniform(0, 0.3))

    async def _one(
        self, session: aiohttp.ClientSession, body: Body, budget: dict[str, Any]
    ) -> None:
        head = json.loads(body.raw[: body.head]) | {"parameters": budget}
        raw = json.dumps(head).encode()
        self.sent += 1
        headers = {HEADER_LENGTH: str(len(raw))}
        try:
            async with session.post(
                self.one.infer, data=raw + body.raw[body.head :], headers=headers
            ) as answer:
                found = await answer.read()
                self.statuses[answer.status] += 1
                if answer.status == 200:
                    length = int(answer.headers[HEADER_LENGTH])
                    logits = np.frombuffer(found[length:], np.float32).reshape(len(body.labels), -1)
                    self.wrong += not np.isfinite(logits).all()
                    self.profiles[answer.headers["t3c-profile"]] += 1
        except (aiohttp.ClientError, TimeoutError):
            self.statuses[0] += 1

    async def _spoiler(self, session: aiohttp.ClientSession) -> None:
        """Requests that cannot be: each has to be refused as the client's fault."""
        rng = random.Random(99)
        while self.going:
            name = rng.choice(list(MALFORMED))
            raw, headers = MALFORMED[name]
            self.bad += 1
            try:
                async with session.post(self.one.infer, data=raw, headers=headers) as answer:
                    await answer.read()
                    if not 400 <= answer.status < 500:
                        self.malformed[f"{name}: {answer.status}"] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                self.malformed[f"{name}: {type(error).__name__}"] += 1
            await self._cut_off()
            await asyncio.sleep(0.2)

    async def _cut_off(self) -> None:
        """A client that goes away in the middle of a request."""
        host, port = self.one.url.removeprefix("http://").split(":")
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            path = self.one.infer.removeprefix(self.one.url)
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n{{".encode()
            )
            await writer.drain()
            writer.close()

    async def _reloader(self, session: aiohttp.ClientSession) -> None:
        """Another version, one that is broken, and the first again, by turns."""
        source = Artifact(DEMO / "digits.t3c")
        names = [profile.name for profile in source.manifest.chain]
        turn = 0
        while self.going:
            await asyncio.sleep(min(RELOAD_SECONDS, max(0.0, self.end - time.monotonic())))
            kept = names if turn % 2 else names[:-1]
            await asyncio.to_thread(trim, source, kept, self.artifact)
            broken = turn % 3 == 2
            if broken:
                file = self.artifact / "factors.safetensors"
                raw = bytearray(file.read_bytes())
                raw[-1] ^= 1
                file.write_bytes(bytes(raw))
            headers = {"authorization": f"Bearer {TOKEN}"}
            async with session.post(f"{self.one.url}/v1/reload", headers=headers) as answer:
                await answer.read()
                self.reloads += answer.status == 200
                self.rolled_back += answer.status == 409
                if answer.status != (409 if broken else 200):
                    self.malformed[f"reload: {answer.status}"] += 1
            turn += 1

    async def _watcher(self, session: aiohttp.ClientSession) -> None:
        while self.going:
            status = Path(f"/proc/{self.one.process.pid}/status").read_text()
            kilobytes = next(
                int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line
            )
            files = len(list(Path(f"/proc/{self.one.process.pid}/fd").iterdir()))
            seconds = time.monotonic() - self.started
            self.memory.append({"seconds": seconds, "rss_mb": kilobytes / 1e3, "files": files})
            await asyncio.sleep(SAMPLE_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    given = parser.parse_args()
    try:
        return finish(OUT, *_soaked(given.minutes))
    except T3CError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _soaked(minutes: float) -> tuple[list[Figure], dict[str, list[dict[str, Any]]]]:
    source = DEMO / "digits.t3c"
    if not source.is_dir():
        raise DataError(f"{source}: no such artifact: make demo makes it")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    artifact = Path(shutil.copytree(source, WORK / "digits.t3c"))
    test = read_arrays(DEMO / "digits.t3c.work" / "test.npz")
    manifest = Artifact(artifact).manifest.model
    requests = bodies(manifest.inputs[0].name, manifest.outputs[0].name, test["x"], test["y"], 2)
    with server(artifact, ["--threads", "1", "--objective-ms", "200"], token=TOKEN) as one:
        soak = Soak(one, artifact, requests, 60 * minutes)
        asyncio.run(soak.run())
        alive = one.process.poll() is None
    return _figures(soak, alive, minutes), _tables(soak)


def _figures(soak: Soak, alive: bool, minutes: float) -> list[Figure]:
    lost = sum(count for status, count in soak.statuses.items() if status not in ANSWERS)
    return [
        Figure("soak_minutes", minutes, 30, at_least=True),
        Figure("lost_requests", lost + soak.sent - sum(soak.statuses.values()), 0),
        Figure("wrong_answers", soak.wrong, 0),
        Figure("malformed_not_refused", sum(soak.malformed.values()), 0),
        Figure("reloads", soak.reloads, 10, at_least=True),
        Figure("rolled_back", soak.rolled_back, 5, at_least=True),
        Figure("memory_growth", _growth([m["rss_mb"] for m in soak.memory]), GROWTH),
        Figure("open_files_growth", _growth([m["files"] for m in soak.memory]), GROWTH + 0.05),
        Figure("alive", float(alive), 1, at_least=True),
    ]  # fmt: skip


def _growth(values: list[float]) -> float:
    """By how much the last third is above the third before it, at its median, after warming."""
    steady = values[int(WARM_SHARE * len(values)) :]
    third = max(1, len(steady) // 3)
    early, late = steady[:third], steady[-third:]
    return float(np.median(late) / np.median(early) - 1) if early else 0.0


def _tables(soak: Soak) -> dict[str, list[dict[str, Any]]]:
    every = max(1, len(soak.memory) // 30)
    return {
        "answers": [{"status": s, "requests": n} for s, n in sorted(soak.statuses.items())],
        "profiles": [{"profile": p, "requests": n} for p, n in soak.profiles.most_common()],
        "malformed": [
            {"sent": soak.bad, "not_refused": sum(soak.malformed.values()),
             "which": ", ".join(soak.malformed) or "none"}
        ],
        "memory": soak.memory[::every],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
