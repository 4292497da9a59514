"""The runtime: one artifact, any budget, a profile per call."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from t3c.artifact.devices import DeviceTable, choose_forms
from t3c.artifact.ledger import Certification, Ledger
from t3c.artifact.manifest import TensorEntry
from t3c.artifact.reader import Artifact
from t3c.artifact.shift import ShiftModel
from t3c.control.policy import summarize
from t3c.errors import DataError, SpecError
from t3c.runtime.calibrate import subject_of
from t3c.runtime.engines import Session, open_engine
from t3c.runtime.engines.protocol import Array
from t3c.runtime.measured import Subject, describe
from t3c.runtime.monitor import Monitor, MonitorConfig, Shift
from t3c.runtime.select import Candidate, Choice, select
from t3c.runtime.transfer import nearest, transferred
from t3c.runtime.watching import features, watched
from t3c.spec import Budget, Certificate, Profile

log = logging.getLogger("t3c.runtime")


@dataclass(frozen=True)
class Answer:
    """An output with what it stands for: the profile, its certificate, and warnings."""

    output: Array
    profile: str
    certificate: Certificate | None
    reason: str
    warnings: tuple[str, ...]
    shift: Shift | None = None


class Watched:
    """A session that also tells of activations, made when first needed, and what watches them."""

    def __init__(self, monitor: Monitor, compiled: Callable[[], Session], every: int) -> None:
        self.monitor = monitor
        self._compiled, self._every = compiled, every
        self._calls = itertools.count()
        self._session: Session | None = None
        self._lock = threading.Lock()

    def turn(self) -> bool:
        """Whether this call is one to watch."""
        return next(self._calls) % self._every == 0

    def session(self) -> Session:
        with self._lock:
            if self._session is None:
                self._session = self._compiled()
            return self._session


class Runtime:
    """Serves an artifact on one engine; `rt(x, budget)` picks the profile for each call.

    `rt.profile` and `rt.certificate` are those of the last call of this thread. With a monitor,
    `rt.on_shift` is called with every event that activations have moved.
    """

    def __init__(
        self,
        artifact: Artifact,
        engine: str,
        threads: int | None = None,
        monitor: MonitorConfig | None = None,
    ) -> None:
        self.artifact = artifact
        self.engine = open_engine(engine, threads)
        self.device = describe(self.engine)
        self.chain = artifact.manifest.chain
        self.table, self.note = self._find_table(artifact.devices())
        ledger = artifact.ledger()
        self.subjects = {p.name: self._subject(p, ledger) for p in self.chain}
        self.forms = {name: dict(subject.forms) for name, subject in self.subjects.items()}
        certified = self._find_certificates(ledger)
        self.certificates = {name: certificate for name, (certificate, _) in certified.items()}
        self.candidates = [self._candidate(p) for p in self.chain]
        self.controller = artifact.controller()
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()
        self._last = threading.local()
        self.on_shift: Callable[[Shift], object] = lambda shift: None
        self.watches = self._find_watches(monitor, certified) if monitor else {}

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        return self.artifact.manifest.model.inputs

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
        arrays = self.check(inputs)
        if budget is not None and not isinstance(budget, Budget):
            raise SpecError(f"a budget is a t3c.Budget, got {type(budget).__name__}")
        if profile is not None and budget is not None:
            raise SpecError("name a budget or a profile, not both")
        choice = self.choose(budget, arrays[0]) if profile is None else self._named(profile)
        output, shift = self._run(choice.profile, arrays)
        warnings = choice.warnings if shift is None else (*choice.warnings, shift.message)
        if self.note and budget is not None and budget.latency_ms is not None:
            warnings = (*warnings, self.note)
        if choice.profile not in self.certificates:
            warnings = (*warnings, f"{choice.profile} is not certified on this engine and device")
        for warning in warnings:
            log.warning("%s", warning)
        certificate = self.certificates.get(choice.profile)
        answer = Answer(output, choice.profile, certificate, choice.reason, warnings, shift)
        self._last.answer = answer
        if shift is not None:
            self.on_shift(shift)
        return answer

    def choose(self, budget: Budget | None, inputs: Array | None = None) -> Choice:
        """The profile for a budget, without running it.

        A controller that looks at inputs takes them into account where they are given.
        """
        budget = budget or Budget()
        if self.controller is None or not budget.limited:
            return select(self.candidates, budget)
        seen = inputs is not None and self.controller.policy.about.summarized
        proposal = self.controller.propose(
            (budget.latency_ms, budget.size_mb, budget.energy_mj),
            [(c.latency_ms(budget.quantile), c.size_mb, c.energy_mj) for c in self.candidates],
            summarize(inputs) if seen and inputs is not None else None,
        )
        return select(self.candidates, budget, proposal)

    def session(self, profile: str) -> Session:
        """The compiled graph of a profile, made when first asked for."""
        with self._lock:
            if profile not in self._sessions:
                self._sessions[profile] = self.engine.compile(self.graph(self.chain[profile]))
            return self._sessions[profile]

    def _run(self, profile: str, arrays: list[Array]) -> tuple[Array, Shift | None]:
        """The output, and what the monitor says where this call is watched."""
        watch = self.watches.get(profile)
        if watch is None or not watch.turn():
            return self.session(profile).run(arrays)[0], None
        output, raw = watch.session().run(arrays)
        return output, watch.monitor.observe(features(raw))

    def graph(self, profile: Profile) -> onnx.ModelProto:
        """The graph the engine runs for a profile of the artifact."""
        return self.subjects[profile.name].graph(self.artifact, self.device.weight_bits)

    def _named(self, profile: str) -> Choice:
        return Choice(self.chain[profile].name, "asked for by name")

    def _last_answer(self) -> Answer | None:
        return getattr(self._last, "answer", None)

    def check(self, inputs: Any) -> list[Array]:
        """The inputs as arrays of the artifact's own shapes and types, or one clear error."""
        entries = self.inputs
        if isinstance(inputs, Mapping):
            if set(inputs) != {e.name for e in entries}:
                raise DataError(f"inputs must be {', '.join(e.name for e in entries)}")
            given = [inputs[e.name] for e in entries]
        else:
            given = list(inputs) if isinstance(inputs, tuple) else [inputs]
        if len(given) != len(entries):
            raise DataError(f"{len(entries)} inputs are needed, got {len(given)}")
        arrays = [_checked(entry, value) for entry, value in zip(entries, given, strict=True)]
        if len({len(array) for array in arrays}) > 1:
            raise DataError(f"inputs differ in batch size: {[len(array) for array in arrays]}")
        return arrays

    def _find_table(self, tables: list[DeviceTable]) -> tuple[DeviceTable | None, str]:
        """This device's table, else one made from the nearest device's; and what to say of it."""
        for table in tables:
            if table.device == self.device:
                return table, "" if table.measured else f"latencies are from {table.source}"
        donor = nearest(tables, self.device)
        if donor is None:
            return None, "this artifact was never calibrated: latencies are not known"
        table = transferred(self.artifact, donor, tables, self.device)
        return table, f"this device was not calibrated: latencies are from {table.source}"

    def _subject(self, profile: Profile, ledger: Ledger | None) -> Subject:
        """The profile as this device executes it."""
        if self.table is not None:
            return subject_of(self.artifact, self.table, profile)
        forms = choose_forms((), self.artifact.manifest.specs, profile.points)
        for certification in reversed(ledger.on(self.engine.name)) if ledger else ():
            if certification.weight_bits == self.device.weight_bits:
                forms = certification.forms.get(profile.name, forms)
        return Subject(profile, forms, self.artifact.ranges(profile.name))

    def _find_certificates(
        self, ledger: Ledger | None
    ) -> dict[str, tuple[Certificate, Certification]]:
        """Certificates of the profiles as this device executes them.

        Bounds hold for all profiles of one certification at once, so the latest that has the most
        of them is taken, and no other.
        """
        best: dict[str, tuple[Certificate, Certification]] = {}
        for certification in ledger.on(self.engine.name) if ledger else ():
            found = {
                name: (certificate, certification)
                for name, forms in self.forms.items()
                if (certificate := certification.of(name, forms, self.device.weight_bits))
            }
            best = found if len(found) > len(best) else best
        return best

    def _find_watches(
        self,
        config: MonitorConfig,
        certified: Mapping[str, tuple[Certificate, Certification]],
    ) -> dict[str, Watched]:
        """A watched session of each profile whose certification has a model of its activations."""
        models = {
            name: certification.monitors[name]
            for name, (_, certification) in certified.items()
            if name in certification.monitors
        }
        if not models:
            raise SpecError(
                f"{self.artifact.path}: nothing to monitor by: certify it on {self.engine.name} "
                "with t3c certify"
            )

        def compiled(name: str, model: ShiftModel) -> Session:
            thresholds = dict(zip(model.tensors, model.thresholds, strict=True))
            return self.engine.compile(
                watched(self.graph(self.chain[name]), model.tensors, thresholds)
            )

        return {
            name: Watched(
                Monitor(model, rate=config.rate, seed=config.seed),
                partial(compiled, name, model),
                config.every,
            )
            for name, model in models.items()
        }

    def _candidate(self, profile: Profile) -> Candidate:
        known = self.table is not None and profile.name in self.table.profiles
        certificate = self.certificates.get(profile.name)
        return Candidate(
            profile.name,
            latency=self.table.profiles[profile.name] if self.table and known else None,
            size_mb=self.artifact.manifest.size_bytes(profile.name) / 1e6,
            energy_mj=self.table.energy_mj.get(profile.name) if self.table else None,
            drift=certificate.epsilon if certificate else None,
            guard=self.table.guard(profile.name) if self.table and known else 0.0,
        )


def load(
    path: str | Path,
    engine: str = "openvino",
    threads: int | None = None,
    *,
    monitor: MonitorConfig | None = None,
) -> Runtime:
    """Open an artifact on an engine; every file is checked first. A monitor watches for shifts.

    >>> rt = load("resnet.t3c")  # doctest: +SKIP
    >>> y = rt(x, budget=Budget(latency_ms=12))  # doctest: +SKIP
    """
    return Runtime(Artifact(path), engine, threads, monitor)


def _checked(entry: TensorEntry, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"input {entry.name!r}: not an array: {error}") from error
    wanted = np.dtype(entry.dtype)
    fits = array.ndim == len(entry.shape) and all(
        size is None or size == got for size, got in zip(entry.shape, array.shape, strict=False)
    )
    if not fits:
        shape = tuple("batch" if size is None else size for size in entry.shape)
        raise DataError(
            f"input {entry.name!r}: shape {array.shape} does not fit ({', '.join(map(str, shape))})"
        )
    if array.size == 0:
        raise DataError(f"input {entry.name!r}: empty batch")
    if array.dtype != wanted:
        if array.dtype.kind not in "fiub" or not np.can_cast(array.dtype, wanted, "same_kind"):
            raise DataError(f"input {entry.name!r}: dtype {array.dtype} does not fit {wanted}")
        with np.errstate(over="ignore"):
            array = array.astype(wanted)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(f"input {entry.name!r} holds NaN or infinite values")
    return array
