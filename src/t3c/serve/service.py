"""What is served now: one version of an artifact, its queue, and how another takes its place."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import asdict
from functools import partial
from typing import Any

from t3c.engines.protocol import Array
from t3c.errors import (
    ArtifactError,
    DataError,
    EngineError,
    RefusedError,
    SpecError,
    T3CError,
    UnavailableError,
)
from t3c.runtime.generating import Token
from t3c.runtime.monitor import Shift
from t3c.runtime.remarks import Code, Remark
from t3c.runtime.select import Choice
from t3c.serve.book import Book
from t3c.serve.config import ServeConfig
from t3c.serve.metrics import Metrics
from t3c.serve.policy import LoadPolicy
from t3c.serve.refusals import Refusal, Refused
from t3c.serve.scheduler import Scheduler
from t3c.serve.tickets import Served
from t3c.serve.versions import Origin, Version, Watch, open_version, refuse_other_face
from t3c.spec import Budget

MOST_NUMBERS = 2**22  # of an input whose sizes are free
REFUSALS_SECONDS = 5.0  # in which refusals are one event


class Service:
    """Opened once, then used by one event loop. `budget` is that of requests which name none."""

    def __init__(self, origin: Origin, config: ServeConfig | None = None) -> None:
        self.origin, self.config = origin, config or ServeConfig()
        self.book, self.metrics = Book(), Metrics()
        self.budget = self.config.budget
        self.state = "starting"
        self.loads = 0  # versions that were served
        self._version: Version | None = None
        self._scheduler: Scheduler | None = None
        self._loading, self._writing = asyncio.Lock(), asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._refused = (0.0, 0)  # since when, how many: told as one event

    @property
    def version(self) -> Version:
        if self._version is None:
            raise UnavailableError(Refusal(Refused.NOT_LOADED))
        return self._version

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise UnavailableError(Refusal(Refused.NOT_LOADED))
        return self._scheduler

    @property
    def most_numbers(self) -> int:
        """How many numbers an input of a request may have; where sizes are free, of any model."""
        samples = [entry.shape[1:] for entry in self.version.model.inputs]
        fixed = [[size for size in shape if isinstance(size, int)] for shape in samples]
        if any(len(sizes) < len(shape) for sizes, shape in zip(fixed, samples, strict=True)):
            return MOST_NUMBERS
        return self.config.limits.rows * max(map(math.prod, fixed))

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def live(self) -> bool:
        """Whether it is worth waiting for: no lane has broken."""
        return self._scheduler is None or not self._scheduler.broken

    async def start(self, watch: Watch = lambda what, done, total: None) -> None:
        """Load and warm the artifact; then requests are answered."""
        version = await asyncio.to_thread(open_version, self.origin, self.config, watch)
        self._take(version)
        self._ticking = asyncio.ensure_future(self._tick())
        self.state = "ready"
        self.book.event("started", f"{version.model.name} {version.name} is served")

    async def reload(self) -> str:
        """Put the artifact that is at the path now in the place of the old one; its name.

        The old one serves until the new one is warm and has answered, and where that fails.
        """
        async with self._loading:
            old = self.version
            try:
                new = await asyncio.to_thread(open_version, self.origin, self.config)
                try:
                    refuse_other_face(old.model, new.model)
                    if self.state == "draining":
                        raise UnavailableError(Refusal(Refused.STOPPING))
                except T3CError:
                    new.watching.close()
                    new.runtime.close()
                    raise
            except (T3CError, OSError, MemoryError, RuntimeError) as error:
                self.metrics.reloads.labels("rolled back").inc()
                self.book.event("reload", f"rolled back to {old.name}: {error}")
                raise ArtifactError(f"{error}: {old.name} serves on") from error
            scheduler = self.scheduler
            self._take(new)
            self._let_go(old, scheduler)
            self.metrics.reloads.labels("loaded").inc()
            self.book.event("reload", f"{new.name} in place of {old.name}")
            return new.name

    async def stop(self) -> None:
        """Answer what waits, and let everything go."""
        self.state = "draining"
        self.book.event("draining", "no new requests")
        if self._ticking is not None:
            self._ticking.cancel()
        if self._version is not None:
            self._let_go(self.version, self.scheduler)
        await asyncio.gather(*self._closing)

    def set_budget(self, budget: Budget) -> None:
        """Set what requests without a budget may cost from now on."""
        choice = self.version.runtime.choose(budget)
        self.budget = budget
        limits = {k: v for k, v in asdict(budget).items() if v is not None and k != "quantile"}
        told = ", ".join(f"{name} {value:g}" for name, value in limits.items()) or "no limit"
        self.book.event("budget", f"{told}: {choice.profile}")

    def standing(self, budget: Budget | None, profile: str | None = None) -> Choice:
        """Return which profile would serve a budget now; without one, what serves requests that
        name none."""
        if profile is None and budget is None:
            profile = self.config.fixed
        if profile is not None:
            return self.named(profile)
        return self.version.runtime.choose(self.budget if budget is None else budget)

    async def infer(
        self,
        inputs: Any,
        budget: Budget | None,
        profile: str | None = None,
        *,
        arrived: float,
        deadline_ms: float | None = None,
    ) -> tuple[Version, Served]:
        """Check inputs, wait for a lane, answer, by the version that serves now; every outcome is
        counted."""
        version = self.version
        try:
            arrays = self._checked(inputs, profile)
            served = await self.scheduler.answer(
                arrays, self.budget if budget is None and profile is None else budget or Budget(),
                profile, arrived=arrived, deadline_ms=deadline_ms,
            )  # fmt: skip
        except RefusedError as error:
            self.note_refusal(error)
            raise
        except EngineError:
            self.book.ended("errors")
            raise
        now = time.monotonic()
        served = served.told(now)
        self._count(served, (now - arrived) * 1e3, len(arrays[0]))
        return version, served

    async def write(
        self, ids: Array, budget: Budget | None, tokens: int, stop: tuple[int, ...]
    ) -> tuple[list[int], Token]:
        """Go on with a text: the ids of its tokens, and the last of them. One text at a time: it
        runs beside the lanes, for people who try the model."""
        if self.state == "draining":
            raise UnavailableError(Refusal(Refused.STOPPING))
        runtime = self.version.runtime

        def run() -> list[Token]:
            given = self.budget if budget is None else budget
            return list(runtime.generate(ids, given, tokens=tokens, stop=stop))

        async with self._writing:
            written = await asyncio.to_thread(run)
        return [int(token.ids[0]) for token in written], written[-1]

    def note_refusal(self, error: RefusedError) -> None:
        """Count a refusal; many of them are one event."""
        status = "503" if isinstance(error, UnavailableError) else "429"
        self.metrics.refusals.labels(status).inc()
        self.book.ended("refused")
        since, count = self._refused
        if time.monotonic() - since > REFUSALS_SECONDS:
            more = f" ({count} more before)" if count > 1 else ""
            self.book.event("refused", f"{error}{more}")
            self._refused = time.monotonic(), 1
        else:
            self._refused = since, count + 1

    def named(self, profile: str) -> Choice:
        """Return a profile by its name; one that does not run here is the client's mistake."""
        runtime = self.version.runtime
        try:
            return runtime.chooser.named(runtime.chain[profile].name)
        except EngineError as error:
            raise SpecError(str(error)) from error

    def _checked(self, inputs: Any, profile: str | None) -> list[Array]:
        runtime, most = self.version.runtime, self.config.limits.rows
        arrays = runtime.check(inputs)
        if len(arrays[0]) > most:
            raise DataError(f"{len(arrays[0])} samples in one request, at most {most}")
        if profile is not None:
            self.named(profile)
        return arrays

    def _count(self, served: Served, took: float, rows: int) -> None:
        answer, metrics = served.answer, self.metrics
        self.book.answered(answer.profile, took, served.late)
        metrics.answers.labels(answer.profile).inc()
        metrics.seconds.labels(answer.profile).observe(took / 1e3)
        metrics.waited.observe(served.waited_ms / 1e3)
        metrics.rows.observe(rows)
        if served.late:
            metrics.late.inc()
        if answer.reason.code is Code.HELD_BACK:
            metrics.downshifts.inc()

    def _take(self, version: Version) -> None:
        """Serve a version from now on."""
        config, runtime = self.config, version.runtime
        chain = [candidate.profile for candidate in runtime.candidates]
        policy = LoadPolicy(version.objective_ms, config.dwell, chain, version.pace, config.lanes)
        scheduler = Scheduler(
            runtime, version.pace, policy, waiting=config.limits.waiting, shadow=config.shadow,
            fixed=config.fixed, on_swap=self._swapped, on_drift=self.book.drifted,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        runtime.on_shift = partial(self._shifted, loop)
        self._version, self._scheduler = version, scheduler
        self.book.forget_drift()  # of another version
        self.loads += 1

    def _let_go(self, version: Version, scheduler: Scheduler) -> None:
        async def close() -> None:
            version.watching.close()
            await scheduler.close()

        task = asyncio.ensure_future(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _swapped(self, before: str, after: str, why: Remark) -> None:
        self.metrics.swaps.inc()
        self.book.event("swap", f"{before} to {after}: {why}")

    def _shifted(self, loop: asyncio.AbstractEventLoop, shift: Shift) -> None:
        loop.call_soon_threadsafe(self.book.event, "shift", shift.message)

    async def _tick(self) -> None:
        while True:
            self.book.tick()
            await asyncio.sleep(1.0)
