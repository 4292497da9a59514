"""devices/*.json: what an artifact takes on the machines it was measured on.

Each names the content hash it belongs to, and lies outside of that hash.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import Field

from t3c.artifact.plain import Record
from t3c.cost.proxy import LARGEST, Proxy
from t3c.errors import CorruptError
from t3c.measure.quiet import Conditions
from t3c.spec import (
    MAX_BITS,
    MIN_BITS,
    Factorization,
    Form,
    Latency,
    LayerPoint,
    LayerSpec,
)

Group = tuple[str, ...]
T = TypeVar("T")
MEASURED = "measured"
FEW_BITS = 4  # the most that kernels of fewer bits than 8 run
LEAST_GUARD = 0.02  # of a latency: what a machine moves by that nobody touches
DISTURBED = 0.3  # from this spread on, times are of what else ran, not of the artifact
TOGETHER = 0.97  # of the time apart, from which on a group of layers runs together
AS_FAST = 1.03  # how much slower forms may be that certificates are for, before they are given up


class Device(Record):
    """A machine, an engine and a number of threads.

    `weight_bits` is how wide weights may be for the engine's int8 kernels to be exact on this
    machine: 7 where pairs of products are summed in 16 bits, which saturate, else 8.
    """

    cpu: str
    engine: str = Field(pattern="^[a-z0-9_]+$")  # it is part of a file name
    engine_version: str
    threads: int = Field(ge=1, lt=2**31)
    weight_bits: int = Field(ge=MIN_BITS, le=MAX_BITS)

    @property
    def key(self) -> str:
        """A file name for it."""
        digest = hashlib.sha256(f"{self.cpu}/{self.engine_version}".encode()).hexdigest()[:8]
        return f"{self.engine}-{self.threads}t-{digest}"

    @property
    def title(self) -> str:
        """What to call it in a sentence."""
        return f"{self.cpu}, {self.engine}, {self.threads} thread{'s' if self.threads > 1 else ''}"


class LayerTiming(Record):
    """Measured time of one layer point's rank, in each form, in milliseconds.

    `few_ms` is that of views of at most 4 bits in kernels of their own, where there are some.
    """

    layer: str
    rank: int
    ms: dict[Form, float]
    few_ms: dict[Form, float] = Field(default_factory=dict)

    def at(self, bits: int, few: bool | None) -> dict[Form, float]:
        """Return the times of a view of so many bits, where kernels of `few` are used or not."""
        return self.few_ms if few and self.few_ms and bits <= FEW_BITS else self.ms


class GroupTiming(Record):
    """Measured time of layers that read one input, as one product and each by itself."""

    layers: Group
    ranks: tuple[int, ...]
    form: Form
    together_ms: float
    apart_ms: float

    @property
    def worth(self) -> bool:
        """Whether running them together is clearly faster."""
        return self.together_ms <= TOGETHER * self.apart_ms


class GridRow(Record):
    """One measured profile of the grid a proxy is fitted and judged on."""

    features: dict[str, Annotated[float, Field(ge=0, le=LARGEST)]]
    ms: float = Field(gt=1e-12, le=LARGEST)
    held_out: bool
    energy_mj: float | None = None


class Start(Record):
    """What a profile takes before it is warm, and the memory it needs then; or why not.

    `cold_ms` is from opening the artifact to the first answer in a process of its own,
    `peak_bytes` what that process grew by, `activation_bytes` the most that tensors between the
    layers hold at once.
    """

    cold_ms: float | None
    peak_bytes: int | None
    activation_bytes: int | None
    reason: str = ""


class DeviceTable(Record):
    """Everything calibrated on one device.

    `forms` are those each profile was timed in. `source` says how its times were come by: by
    measurement, or those of the profiles in `predicted` by another device's proxy, whose relative
    `error` is then known or None.
    """

    content: str
    device: Device
    layers: tuple[LayerTiming, ...] = ()
    groups: tuple[GroupTiming, ...] = ()
    profiles: dict[str, Latency]
    forms: dict[str, dict[str, Form]] = Field(default_factory=dict)
    starts: dict[str, Start] = Field(default_factory=dict)
    grid: tuple[GridRow, ...] = ()
    proxies: dict[str, Proxy] = Field(default_factory=dict)
    energy: str = "unavailable: not measured"
    energy_mj: dict[str, float] = Field(default_factory=dict)
    energy_proxy: Proxy | None = None
    conditions: Conditions | None = None
    source: str = MEASURED
    predicted: tuple[str, ...] = ()
    error: float | None = Field(default=None, ge=0, le=LARGEST)

    @property
    def disturbed(self) -> bool:
        """Whether something disturbed the measurement, and repeating it did not help."""
        known = self.conditions is not None and self.conditions.disturbed
        return known or self.spread >= DISTURBED

    @property
    def spread(self) -> float:
        """The largest share by which a profile's times went over its p50 for a while."""
        return max((latency.spread for latency in self.profiles.values()), default=0.0)

    @property
    def measured(self) -> bool:
        """Whether all its times were measured on the device itself."""
        return self.source == MEASURED

    def of_profiles(self, names: Collection[str], content: str) -> DeviceTable:
        """What is known of some profiles, for an artifact of them alone."""

        def part(by_profile: Mapping[str, T]) -> dict[str, T]:
            return {name: value for name, value in by_profile.items() if name in names}

        update = {
            "content": content, "profiles": part(self.profiles), "forms": part(self.forms),
            "starts": part(self.starts), "energy_mj": part(self.energy_mj),
            "predicted": tuple(name for name in self.predicted if name in names),
        }  # fmt: skip
        return self.model_copy(update=update)

    def guard(self, profile: str) -> float:
        """What to add to a profile's times, as a share, before they are held against a limit."""
        error = self.error or 0.0 if profile in self.predicted else 0.0
        return max(LEAST_GUARD, self.profiles[profile].spread, error)

    @property
    def few(self) -> bool | None:
        """Whether kernels of few bits pay on this device; None where they were not timed."""
        return few_pay(self.layers)

    @property
    def proxy(self) -> Proxy | None:
        """The hybrid proxy of this device."""
        return self.proxies.get("hybrid")

    def grouped(self, points: Mapping[str, LayerPoint], forms: Mapping[str, Form]) -> list[Group]:
        """The groups of layers that run faster as one product at these points."""
        measured = {(g.layers, g.ranks, g.form): g for g in self.groups}
        found = []
        for layers in dict.fromkeys(g.layers for g in self.groups):
            if not layers or not points.keys() >= set(layers):
                raise CorruptError(f"the table of {self.device.title} groups unknown layers")
            ranks = tuple(points[name].rank for name in layers)
            timing = measured.get((layers, ranks, forms[layers[0]]))
            if timing and timing.worth:
                found.append(layers)
        return found


def few_pay(timings: Sequence[LayerTiming]) -> bool | None:
    """Return whether all layers at full rank take less time in kernels of few bits, than as bytes.

    Such weights are faster to read and slower to unpack, so that the caches decide. None where
    they were not timed.
    """
    full = {t.layer: t for t in sorted(timings, key=lambda t: t.rank) if t.few_ms}
    if not full:
        return None
    fewer, more = (
        math.fsum(min(ms.values()) for ms in known)
        for known in ([t.few_ms for t in full.values()], [t.ms for t in full.values()])
    )
    return fewer < more


@dataclass(frozen=True)
class FormChoice:
    """The form a layer point runs in, and why."""

    form: Form
    reason: str


def explain_forms(
    timings: tuple[LayerTiming, ...],
    specs: Mapping[str, LayerSpec],
    points: Mapping[str, LayerPoint],
) -> dict[str, FormChoice]:
    """The form measured fastest, factored if none is faster; dense at full rank, as stored."""
    table, few = {(t.layer, t.rank): t for t in timings}, few_pay(timings)

    def ms(name: str, point: LayerPoint) -> Mapping[Form, float]:
        timing = table.get((name, point.rank))
        return {} if timing is None else timing.at(point.bits, few)

    return {n: _choice(specs[n], point, ms(n, point)) for n, point in points.items()}


def choose_forms(
    timings: tuple[LayerTiming, ...],
    specs: Mapping[str, LayerSpec],
    points: Mapping[str, LayerPoint],
) -> dict[str, Form]:
    """The form of each layer at its point."""
    return {n: choice.form for n, choice in explain_forms(timings, specs, points).items()}


def _choice(spec: LayerSpec, point: LayerPoint, ms: Mapping[Form, float]) -> FormChoice:
    if spec.factorization is Factorization.NONE:
        return FormChoice(Form.DENSE, "elastic in bits alone")
    if spec.stored_dense(point):
        return FormChoice(Form.DENSE, "full rank: stored dense")
    if spec.narrows:
        return FormChoice(Form.NARROW, "what is left out is in no form")
    if Form.FACTORED not in spec.forms(point):
        return FormChoice(Form.DENSE, "its channels come in groups: factors save bytes, not work")
    if not {Form.FACTORED, Form.DENSE} <= ms.keys():
        return FormChoice(Form.FACTORED, "not timed on this device")
    timed = {form: ms[form] for form in spec.forms(point) if form in ms}
    times = ", ".join(f"{form} {took:.3f} ms" for form, took in timed.items())
    refused = dict(spec.unaligned).get(point.rank)
    return FormChoice(
        min(timed, key=lambda form: timed[form]),
        times if refused is None else f"{times}; not aligned: {refused}",
    )


def forms_key(forms: Mapping[str, Form], weight_bits: int) -> str:
    """A short name of what an engine executes, for a certificate to be keyed by."""
    text = ";".join([f"{name}={forms[name]}" for name in sorted(forms)] + [f"{weight_bits} bits"])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
