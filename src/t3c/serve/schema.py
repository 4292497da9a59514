"""What `/v1` answers: the models of its JSON."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from t3c.artifact.devices import Device
from t3c.runtime.standing import ClassShare, Rendered, Shown
from t3c.serve.messages import Message
from t3c.spec import Certificate

Limit = Annotated[float | None, Field(gt=0, strict=True)]
MaxDrop = Annotated[float | None, Field(ge=0, strict=True)]


class BudgetBody(Message):
    """Limits for requests that name none; null is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    latency_ms: Limit = None
    size_mb: Limit = None
    energy_mj: Limit = None
    drift: Limit = None
    max_drop: MaxDrop = None
    quantile: str = Field(default="p50", pattern="^p(50|90|99)$")


class Standing(Rendered):
    """The profile that would serve a budget, and what is guaranteed of it."""

    certificate: Certificate | None
    guarantee: str


class StandingBudget(Rendered):
    """The budget of requests that name none, and what serves them now."""

    budget: BudgetBody
    objective_ms: float


class Tried(Rendered):
    """The answer to a picture or a text; what does not apply is null."""

    answers: list[ClassShare]
    output: list[float] | None
    text: str | None
    latency_ms: float
    guarantee: str


class Quantiles(Shown):
    """Milliseconds; null where nothing was answered."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Recent(Quantiles):
    """Latencies of the last minute."""

    requests: int


class Second(Quantiles):
    """One second: the profile that served most, and how requests ended."""

    t: int
    profile: str | None
    requests: int
    refused: int
    late: int


class Observed(Shown):
    """What was seen of a profile's drift from the largest one."""

    mean: float
    largest: float
    rows: int


class DriftRow(Shown):
    profile: str
    epsilon: float | None
    mean: float | None
    observed: Observed | None


class Event(Shown):
    t: float
    event: str
    text: str


class Load(Shown):
    requests_per_s: float
    utilization: float
    waiting: int


class Evidence(Shown):
    """What the monitors have gathered; 1 raises an alarm."""

    evidence: float


class LiveView(Rendered):
    """A server as the dashboard shows it."""

    model: str
    version: str
    state: str
    now: float
    uptime_s: float
    objective_ms: float
    budget: BudgetBody
    steps: int
    pressures: list[str]
    alarm: bool
    load: Load
    latency_ms: Recent
    totals: dict[str, int]
    series: list[Second]
    drift: list[DriftRow]
    monitor: Evidence | None
    events: list[Event]


class MergedView(LiveView):
    """Several replicas as one server."""

    replicas: int


class ProfileRow(Shown):
    """What is known of a profile here; `refused` says why it does not run.

    `quality` is the figure of its `metric`, `drop` how far it is below the original's.
    """

    name: str
    size_mb: float
    latency_ms: Quantiles | None
    guard: float
    energy_mj: float | None
    epsilon: float | None
    delta: float | None
    samples: int | None
    mean_drift: float | None
    metric: str | None
    quality: float | None
    drop: float | None
    refused: str | None
    refused_code: str | None
    active: bool


class Profiles(Shown):
    """Every profile, from the smallest to the largest."""

    model: str
    version: str
    t3c: str
    device: Device
    note: str
    takes: str
    writes: bool
    classes: list[str] | None
    profiles: list[ProfileRow]
