"""The runtime: one artifact, any budget, a profile per call, from as many threads as there are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from t3c.artifact.manifest import TensorEntry
from t3c.artifact.reader import Artifact
from t3c.control.proposed import Controlled
from t3c.engines import Session, open_engine
from t3c.engines.cache import CompileCache, default_folder
from t3c.engines.protocol import Array
from t3c.errors import EngineError, SpecError
from t3c.graph.watching import features
from t3c.runtime.adapt import Alarm
from t3c.runtime.answer import Answer
from t3c.runtime.calls import Held, Request, answer_all
from t3c.runtime.checking import Checking
from t3c.runtime.chooser import Chooser
from t3c.runtime.counters import Counters, Notices
from t3c.runtime.generating import Writing, begin
from t3c.runtime.monitor import MonitorConfig, Shift
from t3c.runtime.placed import Placed
from t3c.runtime.pool import Lease
from t3c.runtime.rejected import rejected_tiles
from t3c.runtime.remarks import Code, Remark
from t3c.runtime.select import Candidate, Choice, cap_warnings
from t3c.runtime.sessions import SessionKey, open_sessions
from t3c.runtime.signals import Signals
from t3c.runtime.watches import Watch, find_watches
from t3c.spec import Budget, Certificate, Profile

NO_LIMIT = Budget()


class Runtime:
    """Serves an artifact on one engine; `rt(x, budget)` picks the profile for each call.

    Sessions are compiled when first needed and stay warm, all of them or as many as `memory_mb`
    allows; a switch of profiles is a look-up, and what a call runs on stays until it is done.
    `rt.signals` takes thermal and load events, `rt.counters` counts. `rt.profile` and
    `rt.certificate` are those of the last call of this thread. With a monitor, `rt.on_shift` is
    called with every event that activations have moved.
    """

    def __init__(
        self,
        artifact: Artifact,
        engine: str,
        threads: int | None = None,
        monitor: MonitorConfig | None = None,
        *,
        memory_mb: float | None = None,
        cache: CompileCache | None = None,
    ) -> None:
        placed = Placed(artifact, open_engine(engine, threads, cache))
        self.placed, self.artifact, self.engine = placed, artifact, placed.engine
        self.device, self.chain = placed.device, placed.chain
        self.table, self.note = placed.table, placed.note
        self.executions, self.forms = placed.executions, placed.forms
        self.certificates = placed.certificates
        self.counters, self.signals = Counters(), Signals()
        names = [profile.name for profile in self.chain]
        self.alarm = Alarm(names, monitor.hold if monitor else 1)
        self.chooser = Chooser(
            engine, placed.candidates, artifact.controller(), self.signals, self.alarm
        )
        for name, reason in placed.refused.items():
            self.chooser.refuse(name, reason)
        self.chooser.check_some_left()
        self.check = Checking(artifact.manifest.model).arrays
        self._refusing = threading.Lock()
        self._last = threading.local()
        self._notices = Notices(self.counters)
        self.on_shift: Callable[[Shift], object] = lambda shift: None
        self.watches = find_watches(placed, monitor) if monitor else {}
        self.pool = open_sessions(placed, self.watches, self.counters, memory_mb)
        self._keys = {name: SessionKey(name) for name in names}
        self._uncertified = {name: Remark(Code.NOT_CERTIFIED, name) for name in names}

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        return self.artifact.manifest.model.inputs

    @property
    def candidates(self) -> list[Candidate]:
        """The profiles that may serve, from the smallest to the largest."""
        return self.chooser.candidates

    @property
    def controller(self) -> Controlled | None:
        """What proposes profiles for budgets, if the artifact carries it."""
        return self.chooser.controller

    @property
    def refused(self) -> Mapping[str, Remark]:
        """The profiles that do not run here, and why."""
        return self.chooser.refused

    @property
    def profile(self) -> str | None:
        """The profile of this thread's last call."""
        answer = self._last_answer()
        return answer.profile if answer else None

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of this thread's last call; None where it is not certified here."""
        answer = self._last_answer()
        return answer.certificate if answer else None

    def __call__(
        self, inputs: Any, budget: Budget | None = None, *, profile: str | None = None
    ) -> Array:
        """The output for an array, or a tuple or dict of arrays, of any batch size."""
        return self.answer(inputs, budget, profile=profile).output

    def answer(
        self, inputs: Any, budget: Budget | None = None, *, profile: str | None = None
    ) -> Answer:
        """The output, and which profile gave it, why, and with what certificate."""
        return self.served(self.check(inputs), budget, profile)

    def served(
        self, arrays: list[Array], budget: Budget | None = None, profile: str | None = None
    ) -> Answer:
        """The answer to inputs that were checked."""
        if profile is not None and budget is not None:
            raise SpecError("name a budget or a profile, not both")
        if profile is None:
            choice = self.choose(budget, arrays[0])
        else:
            choice = self.chooser.named(self.chain[profile].name)
        choice, lease = self.lease(choice, named=profile is not None)
        try:
            outputs, shift = self.run(choice.profile, lease.session, arrays)
        finally:
            lease.release()
        return self.told(outputs, choice, budget, shift)

    async def answer_async(
        self,
        inputs: Any,
        budget: Budget | None = None,
        *,
        profile: str | None = None,
        executor: Executor | None = None,
    ) -> Answer:
        """The answer, computed in a thread of the executor, by default the event loop's own."""
        call = partial(self.answer, inputs, budget, profile=profile)
        return await asyncio.get_running_loop().run_in_executor(executor, call)

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers to requests, in order; those that one profile serves run as one batch."""
        return answer_all(self, requests)

    def generate(
        self,
        ids: Any,
        budget: Budget | None = None,
        *,
        tokens: int,
        stop: Iterable[int] = (),
        temperature: float = 0.0,
        seed: int = 0,
        profile: str | None = None,
    ) -> Writing:
        """Up to `tokens` more tokens of each row of ids (batch, length), one by one.

        The budget is that of a token, and may change from one to the next.

        >>> for token in rt.generate(ids, Budget(latency_ms=5), tokens=64):  # doctest: +SKIP
        ...     print(token.ids, token.profile)
        """
        generation = begin(self, ids, stop=stop, temperature=temperature, seed=seed)
        return Writing(self, generation, tokens, budget, profile)

    def hold(self, budget: Budget | None = None) -> Held:
        """The profile for a budget, chosen once for many calls of a thread."""
        return Held(self, budget)

    def choose(self, budget: Budget | None, inputs: Array | None = None) -> Choice:
        """The profile for a budget, without running it: what would serve it now.

        A controller that looks at inputs takes them into account where they are given.
        """
        return self.chooser.choose(NO_LIMIT if budget is None else budget, inputs)

    def session(self, profile: str) -> Session:
        """The compiled graph of a profile, made when first asked for."""
        with self.pool.lease(SessionKey(self.chain[profile].name)) as session:
            return session

    def warm(self, *profiles: str) -> None:
        """Compile profiles, by default all, before they are needed."""
        self.pool.warm(self._keys[self.chain[name].name] for name in profiles)
        for candidate in () if profiles else self.candidates:
            try:
                self.pool.warm([self._keys[candidate.profile]])
            except EngineError as error:
                self._refuse(candidate.profile, error)

    def graph(self, profile: Profile) -> onnx.ModelProto:
        """The graph the engine runs for a profile of the artifact."""
        return self.placed.graph(profile.name)

    def stats(self) -> dict[str, Any]:
        """What was counted, and the bytes of the sessions that are warm."""
        resident = {str(key): size for key, size in self.pool.resident.items()}
        return {**self.counters.snapshot(), "resident": resident}

    def close(self) -> None:
        """Let all sessions go; those that calls still run on stay until these are done."""
        self.pool.clear()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lease(
        self, choice: Choice, *, named: bool = False
    ) -> tuple[Choice, Lease[SessionKey, Session]]:
        """The session of a choice, or of the nearest smaller profile that the engine can run."""
        while True:
            try:
                return choice, self.pool.lease(self._keys[choice.profile])
            except EngineError as error:
                if named:
                    raise
                choice = self._fall_back(choice, error)

    def told(
        self, outputs: list[Array], choice: Choice, budget: Budget | None, shift: Shift | None
    ) -> Answer:
        """Outputs with what they stand for, counted and logged."""
        profile = choice.profile
        warnings = choice.warnings
        if budget is not None and budget.capped:  # of what serves in place of another
            capped = cap_warnings(self.chooser.known[profile], budget)
            warnings = (*warnings, *(w for w in capped if w not in warnings))
        if shift is not None:
            warnings = (*warnings, Remark(Code.SHIFTED, profile, causes=(shift,)))
        if self.note and budget is not None and budget.latency_ms is not None:
            warnings = (*warnings, self.note)
        certificate = self.certificates.get(profile)
        if certificate is None:
            warnings = (*warnings, self._uncertified[profile])
        answer = Answer(
            outputs[0], profile, certificate, choice.reason, warnings, shift, choice.flagged,
            tuple(outputs),
        )  # fmt: skip
        self._last.answer = answer
        self.counters.add("calls", profile)
        if self._notices.serving != profile:
            self._notices.swap(profile, choice.reason)
        if warnings and warnings != self._notices.heard:
            self._notices.warn(profile, warnings)
        return answer

    def run(
        self, profile: str, session: Session, arrays: list[Array]
    ) -> tuple[list[Array], Shift | None]:
        """The outputs, and what the monitor says where this call is watched."""
        try:
            watch = self.watches.get(profile) if self.watches else None
            if watch is None or not watch.turn():
                return session.run(arrays), None
            return self._run_watched(profile, watch, session, arrays)
        except EngineError as error:
            self.counters.add("errors", profile)
            self.counters.event("errors", profile=profile, error=error)
            raise

    def _run_watched(
        self, profile: str, watch: Watch, session: Session, arrays: list[Array]
    ) -> tuple[list[Array], Shift | None]:
        try:
            lease = self.pool.lease(SessionKey(profile, watched=True))
        except EngineError as error:  # what cannot be watched is still answered
            self.watches.pop(profile, None)
            self.counters.add("errors", profile)
            self.counters.event("errors", profile=profile, error=error, watched=True)
            return session.run(arrays), None
        with lease as telling:
            *outputs, raw = telling.run(arrays)
        shift = watch.monitor.observe(features(raw))
        if shift is None:
            if self.alarm.saw(len(raw)):
                self.counters.event("calm", profile=profile)
            return outputs, None
        self.alarm.strike(profile)
        self.counters.add("shift", profile)
        layers = [name for name, _ in shift.layers]
        self.counters.event("shift", profile=profile, layers=layers, message=shift.message)
        self.on_shift(shift)
        return outputs, shift

    def _fall_back(self, choice: Choice, error: EngineError) -> Choice:
        """Another profile, and what to say of the one that the engine refuses."""
        self._refuse(choice.profile, error)
        return self.chooser.instead(choice)

    def _refuse(self, profile: str, error: EngineError) -> None:
        """Serve a profile no more; which of its tiles are at fault is found out once."""
        with self._refusing:
            if profile in self.refused:
                return
            specs = self.artifact.manifest.specs.values()
            tiles = rejected_tiles(self.engine, specs, self.executions[profile])
            causes = (str(error), *tiles)
            self.chooser.refuse(profile, Remark(Code.ENGINE_FAILED, profile, causes=causes))
        self.counters.add("fallback", profile)
        self.counters.event("fallback", profile=profile, error=error, rejected=tiles)

    def _last_answer(self) -> Answer | None:
        return getattr(self._last, "answer", None)


def load(
    path: str | Path,
    engine: str = "openvino",
    threads: int | None = None,
    *,
    monitor: MonitorConfig | None = None,
    memory_mb: float | None = None,
    cache: bool = True,
) -> Runtime:
    """Open an artifact on an engine; every file is checked first.

    A monitor watches for shifts. At most `memory_mb` of compiled profiles stay warm. The cache
    keeps them compiled for the next process, where the engine gains by it: in T3C_CACHE, or the
    user's cache folder.

    >>> rt = load("resnet.t3c")  # doctest: +SKIP
    >>> y = rt(x, budget=Budget(latency_ms=12))  # doctest: +SKIP
    """
    kept = CompileCache(default_folder()) if cache else None
    return Runtime(Artifact(path), engine, threads, monitor, memory_mb=memory_mb, cache=kept)
