"""ledger.json: the certificates of an artifact, and all that they rest on; its quality.

It names the content hash it belongs to, and lies outside of that hash.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from pydantic import Field, model_validator

from t3c.artifact.devices import forms_key
from t3c.artifact.plain import Record
from t3c.artifact.shift import ShiftModel
from t3c.errors import SpecError
from t3c.spec import Certificate, Form, Metric

CLOSE = 1e-6  # of a drop to that of its figures, which are rounded

Keys = tuple[str, ...]
T = TypeVar("T")


class LayerTerm(Record):
    """What one layer has to do with a profile's drift.

    `gain` is the largest ||J|| behind it, over samples and along the way to the profile, `residual`
    the operator norm of what its weight has lost, `rms` and `largest` are of the norm of its input,
    `p99` the 99th percentile of single activations. `spectral` is gain times residual times rms,
    `first_order` what its change does to the output, both relative to the output; `worst_case`
    bounds how far its own output can be, relative to that.
    """

    layer: str
    gain: float = Field(ge=0)
    residual: float = Field(ge=0)
    rms: float = Field(ge=0)
    largest: float = Field(ge=0)
    p99: float = Field(ge=0)
    spectral: float = Field(ge=0)
    first_order: float = Field(ge=0)
    worst_case: float | None = None


class SliceEntry(Record):
    """Drift of one slice of the samples at one profile; `interval` is of `within`, at 95%."""

    label: str
    profile: str
    samples: int
    mean: float
    p95: float
    within: float
    interval: tuple[float, float]
    flip_rate: float | None


class Settings(Record):
    """How the estimates were made."""

    gain_samples: int
    probes: int
    steps: int
    path: tuple[float, ...]
    path_samples: int
    worst_samples: int
    seed: int


class HeldOut(Record):
    """What the bounds did on samples that no step had seen.

    `coverage` is of all profiles at once, `expected` where it lies with 95% probability; `ratio` is
    epsilon over the 95th percentile of drift, profile by profile.
    """

    samples: int
    data: str
    coverage: float
    expected: tuple[float, float]
    within: dict[str, float]
    ratio: dict[str, float]


class Capped(Record):
    """The profiles whose mean of a measure is within a cap, tested from the largest down."""

    measure: str
    cap: float
    profiles: tuple[str, ...]


class Certification(Record):
    """The certificates of all profiles on one engine and its forms.

    `keys` are hashes of the samples, by the slice they were in. `agreement` is the correlation of
    estimates with mean drift over the profiles, `quantiles` are of relative drift.
    """

    engine: str
    engine_version: str
    weight_bits: int
    forms: dict[str, dict[str, Form]]
    assumption: str
    delta: float
    data: str
    keys: dict[str, Keys]
    settings: Settings | None
    entries: tuple[Certificate, ...]
    quantiles: dict[str, dict[str, float]] = Field(default_factory=dict)
    layers: dict[str, tuple[LayerTerm, ...]] = Field(default_factory=dict)
    agreement: dict[str, float | None] = Field(default_factory=dict)
    slices: tuple[SliceEntry, ...] = ()
    held_out: HeldOut | None = None
    capped: Capped | None = None
    monitors: dict[str, ShiftModel] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Certification:
        if not self.entries:
            raise SpecError("a certification has at least one certificate")
        if self.layers and any(entry.profile not in self.layers for entry in self.entries):
            raise SpecError("the terms of layers are not of every certified profile")
        if any(entry.measures.keys() != self.entries[0].measures.keys() for entry in self.entries):
            raise SpecError("certificates differ in their measures")
        return self

    def of(self, profile: str, forms: Mapping[str, Form], weight_bits: int) -> Certificate | None:
        """The certificate of a profile that runs in these forms."""
        key = forms_key(forms, weight_bits)
        return next((e for e in self.entries if (e.profile, e.forms) == (profile, key)), None)

    def of_profiles(self, names: Collection[str]) -> Certification:
        """The same for some of the profiles: bounds that hold for all at once hold for these."""

        def part(by_profile: Mapping[str, T]) -> dict[str, T]:
            return {name: value for name, value in by_profile.items() if name in names}

        held, capped = self.held_out, self.capped
        if held is not None:
            found = {"within": part(held.within), "ratio": part(held.ratio)}
            held = held.model_copy(update=found)
        if capped is not None:
            kept = tuple(name for name in capped.profiles if name in names)
            capped = capped.model_copy(update={"profiles": kept})
        update = {
            "entries": tuple(entry for entry in self.entries if entry.profile in names),
            "forms": part(self.forms), "quantiles": part(self.quantiles),
            "layers": part(self.layers), "monitors": part(self.monitors),
            "slices": tuple(s for s in self.slices if s.profile in names),
            "held_out": held, "capped": capped,
        }  # fmt: skip
        return self.model_copy(update=update)


class ParityEntry(Record):
    """How far an engine's outputs of a profile are from torch's, on `samples` samples.

    `stored` is what is stored, run in float, against the model it was made of, `rounding` what
    rounding activations makes of that in torch, and `rounded` the engine against torch on the same
    rounded graph, all relative to the norm of the output; `largest` is the largest difference of
    one value of the last, relative to the largest output.
    `reason` says why the engine is not to run the profile, if it is not.
    """

    engine: str
    engine_version: str
    weight_bits: int
    profile: str
    samples: int
    stored: float | None = Field(ge=0)
    rounding: float | None = Field(default=None, ge=0)
    rounded: float | None = Field(ge=0)
    largest: float | None = Field(ge=0)
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason


class QualityEntry(Record):
    """How good a profile's answers are on an engine executing these forms, beside the original's.

    `value` and `original` are figures of the metric on the same `samples`, `data` a hash of them.
    `drop` is how far the profile is below the original, as a share of samples, of perplexity its
    growth; `ci95` is the paired interval of it.
    """

    profile: str
    engine: str
    engine_version: str
    forms: str
    metric: Metric
    value: float = Field(ge=0)
    original: float = Field(ge=0)
    drop: float
    ci95: tuple[float, float]
    samples: int = Field(ge=1)
    data: str

    @model_validator(mode="after")
    def _consistent(self) -> QualityEntry:
        grows = self.metric is Metric.PERPLEXITY
        figures = (self.value, self.original)
        if (min(figures) < 1) if grows else (max(figures) > 1):
            raise SpecError(f"profile {self.profile!r}: {self.metric} is out of its range")
        drop = self.value / self.original - 1 if grows else self.original - self.value
        if not math.isclose(drop, self.drop, rel_tol=CLOSE, abs_tol=CLOSE):
            raise SpecError(f"profile {self.profile!r}: its drop is not that of its figures")
        if not self.ci95[0] <= self.drop <= self.ci95[1]:
            raise SpecError(f"profile {self.profile!r}: its drop is outside of its interval")
        return self


class Ledger(Record):
    """What is known of an artifact: certifications, one for each engine and set of forms, latest
    last, how far each engine is from torch, and how good profiles are."""

    content: str
    certifications: tuple[Certification, ...] = ()
    parity: tuple[ParityEntry, ...] = ()
    quality: tuple[QualityEntry, ...] = ()

    def on(self, engine: str) -> list[Certification]:
        """Those of an engine, latest first."""
        return [c for c in reversed(self.certifications) if c.engine == engine]

    @property
    def entries(self) -> tuple[Certificate, ...]:
        """The certificates of all certifications."""
        return tuple(entry for c in self.certifications for entry in c.entries)

    def added(self, certification: Certification) -> Ledger:
        """The ledger with one more; an earlier one of the same engine and forms gives way."""

        def identity(c: Certification) -> tuple[object, ...]:
            return (c.engine, c.weight_bits, *((e.profile, e.forms) for e in c.entries))

        kept = [c for c in self.certifications if identity(c) != identity(certification)]
        return self.model_copy(update={"certifications": (*kept, certification)})

    def compared(self, rows: Sequence[ParityEntry]) -> Ledger:
        """The ledger with these differences in place of earlier ones of the same."""

        def identity(row: ParityEntry) -> tuple[object, ...]:
            return (row.engine, row.weight_bits, row.profile)

        new = {identity(row) for row in rows}
        kept = [row for row in self.parity if identity(row) not in new]
        return self.model_copy(update={"parity": (*kept, *rows)})

    def parity_of(self, engine: str, weight_bits: int) -> dict[str, ParityEntry]:
        """What is known of the profiles on an engine."""
        found = [p for p in self.parity if (p.engine, p.weight_bits) == (engine, weight_bits)]
        return {row.profile: row for row in found}

    def judged(self, rows: Sequence[QualityEntry]) -> Ledger:
        """The ledger with these qualities in place of earlier ones of the same."""

        def identity(row: QualityEntry) -> tuple[str, ...]:
            return (row.profile, row.engine, row.forms)

        new = {identity(row) for row in rows}
        kept = [row for row in self.quality if identity(row) not in new]
        return self.model_copy(update={"quality": (*kept, *rows)})

    def quality_of(
        self, profile: str, engine: str, forms: Mapping[str, Form], weight_bits: int
    ) -> QualityEntry | None:
        """The quality of a profile that runs on an engine in these forms."""
        key = (profile, engine, forms_key(forms, weight_bits))
        return next((q for q in self.quality if (q.profile, q.engine, q.forms) == key), None)

    def of_profiles(self, names: Collection[str], content: str) -> Ledger:
        """What is known of some profiles, in an artifact of them alone."""
        parts = [c.of_profiles(names) for c in self.certifications]
        return Ledger(
            content=content,
            certifications=tuple(part for part in parts if part.entries),
            parity=tuple(row for row in self.parity if row.profile in names),
            quality=tuple(row for row in self.quality if row.profile in names),
        )
