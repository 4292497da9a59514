"""What the command line says of artifacts, answers and comparisons: as models and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from pydantic import Field
from rich.console import Console
from rich.table import Table

from t3c.artifact.devices import Device, DeviceTable
from t3c.artifact.ledger import ParityEntry, QualityEntry
from t3c.artifact.manifest import ModelEntry
from t3c.artifact.reader import Artifact
from t3c.cost.proxy import Proxy
from t3c.measure.quiet import Conditions
from t3c.runtime.answer import Answer
from t3c.runtime.placed import disturbance
from t3c.runtime.remarks import Code, Remark
from t3c.runtime.runtime import Runtime
from t3c.runtime.select import explain
from t3c.runtime.standing import ClassShare, Rendered, Shown, guarantee, top_classes
from t3c.spec import Budget, Certificate, Form, LayerPoint, LayerSpec

if TYPE_CHECKING:
    from t3c.evidence.bench import Result


class ProfileSummary(Shown):
    """A profile in short: `points` are its layers' ranks and bits, `p50_ms` is by device.

    `mean_width` is the share of channels that narrowed layers keep; None where none are.
    `epsilon` and `quality` are the latest that the ledger has.
    """

    name: str
    size_bytes: int
    mean_bits: float
    mean_width: float | None
    epsilon: float | None
    quality: QualityEntry | None
    p50_ms: dict[str, float]
    points: dict[str, tuple[int, int]]


class ArtifactSummary(Shown):
    """An artifact in short; `disturbed` says by device why its times cannot be relied on."""

    path: str
    schema_version: int
    t3c_version: str
    content: str
    verified: bool
    trimmed_from: str | None
    bytes: int
    content_bytes: int
    model: ModelEntry
    layers: int
    profiles: list[ProfileSummary]
    devices: list[str]
    disturbed: dict[str, str]
    parity: list[ParityEntry]

    def to_json(self) -> dict[str, object]:
        return self.model_dump(mode="json", exclude={"model": {"quantized"}})


def summarize(artifact: Artifact, verified: bool) -> ArtifactSummary:
    """Return an artifact in short."""
    manifest, ledger, devices = artifact.manifest, artifact.ledger(), artifact.devices()
    epsilons = {entry.profile: entry.epsilon for entry in ledger.entries} if ledger else {}
    qualities = {entry.profile: entry for entry in ledger.quality} if ledger else {}
    rows = []
    for profile in manifest.profiles:
        name, points = profile.name, profile.points
        rows.append(
            ProfileSummary(
                name=name, size_bytes=profile.size_bytes, epsilon=epsilons.get(name),
                quality=qualities.get(name),
                mean_bits=sum(p.bits for p in points.values()) / len(points),
                mean_width=_mean_width(manifest.specs, points),
                p50_ms={t.device.key: t.profiles[name].p50 for t in devices if name in t.profiles},
                points={layer: (p.rank, p.bits) for layer, p in points.items()},
            )
        )  # fmt: skip
    return ArtifactSummary(
        path=str(artifact.path), schema_version=manifest.schema_version,
        t3c_version=manifest.t3c_version, content=artifact.content, verified=verified,
        trimmed_from=manifest.trimmed_from, bytes=artifact.size_on_disk(),
        content_bytes=artifact.content_bytes(), model=manifest.model,
        layers=len(manifest.layers), profiles=rows, devices=[t.device.key for t in devices],
        disturbed={t.device.key: str(r) for t in devices if (r := disturbance(artifact.path, t))},
        parity=list(ledger.parity) if ledger else [],
    )  # fmt: skip


def _mean_width(specs: Mapping[str, LayerSpec], points: Mapping[str, LayerPoint]) -> float | None:
    """Return the share of channels kept, in the mean over units of narrowed layers."""
    shares = {s.unit: points[n].rank / s.full_rank for n, s in specs.items() if s.narrows}
    return sum(shares.values()) / len(shares) if shares else None


class Row(Shown):
    """The output of one sample; `output` is as deeply nested as `shape` says."""

    shape: list[int]
    output: list[object] | float
    classes: list[ClassShare]


class Explained(Shown):
    """A profile as the choice saw it, and why it was or was not chosen."""

    profile: str
    latency_ms: float | None
    guard: float
    with_guard_ms: float | None
    size_mb: float
    energy_mj: float | None
    epsilon: float | None
    drop: float | None
    chosen: bool
    why: str
    why_codes: list[Code]


class Told(Rendered):
    """What stands behind an answer: its profile and its guarantee; `explain` where asked for."""

    certificate: Certificate | None
    guarantee: str
    device: Device
    explain: list[Explained] = Field(default_factory=list)

    @classmethod
    def about(
        cls, runtime: Runtime, answer: Answer, budget: Budget | None, **other: object
    ) -> Self:
        """Render an answer; with a budget, explain its choice."""
        explained: dict[str, object] = {}
        warnings = answer.warnings
        if budget is not None:
            explained = {"explain": explain_choice(runtime, answer, budget)}
            table = runtime.table
            found = None if table is None else disturbance(runtime.artifact.path, table)
            warnings = warnings if found is None else (*warnings, found)
        return cls.of(
            answer.profile, answer.reason, warnings, certificate=answer.certificate,
            guarantee=guarantee(answer.certificate), device=runtime.device, **explained, **other,
        )  # fmt: skip

    def to_json(self) -> dict[str, object]:
        """Return plain values; `explain` is left out where it was not asked for."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


class Answered(Told):
    """An answer with its classes, where it has them."""

    answers: list[Row]


class Written(Told):
    """A text that was written, by the profiles of its tokens."""

    text: str
    ids: list[int]
    prompt_tokens: int
    stopped: bool
    profiles: list[str]
    first_ms: float
    tokens_per_second: float | None


def answered(runtime: Runtime, answer: Answer, budget: Budget | None = None) -> Answered:
    """Return an answer as it is shown; with a budget, explained."""
    classes = runtime.artifact.manifest.model.classes
    rows = []
    for output in answer.output:
        top = top_classes(output, classes)
        rows.append(Row(shape=list(output.shape), output=output.tolist(), classes=top))
    return Answered.about(runtime, answer, budget, answers=rows)


def explain_choice(runtime: Runtime, answer: Answer, budget: Budget) -> list[Explained]:
    """Return every profile as the choice saw it, and why it was or was not chosen."""
    told = explain(runtime.candidates, budget, answer.profile)
    for name, refusal in runtime.refused.items():
        told[name] = [Remark(Code.REFUSED, name, causes=(refusal,))]
    return [
        Explained(
            profile=c.profile,
            latency_ms=None if c.latency is None else c.latency.at(budget.quantile),
            guard=c.guard, with_guard_ms=c.latency_ms(budget.quantile), size_mb=c.size_mb,
            energy_mj=c.energy_mj, epsilon=c.drift, drop=c.drop,
            chosen=c.profile == answer.profile,
            why="; ".join(map(str, told[c.profile])), why_codes=[w.code for w in told[c.profile]],
        )
        for c in runtime.placed.candidates
    ]  # fmt: skip


class TimedProfile(Shown):
    """The times of a profile on a device; of its start only where that was measured."""

    p50: float
    p90: float
    p99: float
    ci95: tuple[float, float]
    samples: int
    spread: float
    guard: float
    factored: int
    cold_ms: float | None = None
    peak_bytes: int | None = None
    activation_bytes: int | None = None
    reason: str = ""
    energy_mj: float | None


class TableSummary(Shown):
    """A device's table in short."""

    device: Device
    table: str
    source: str
    error: float | None
    profiles: dict[str, TimedProfile]
    proxies: dict[str, Proxy]
    grouped: int
    groups: int
    energy: str
    energy_proxy: Proxy | None
    conditions: Conditions | None

    def to_json(self) -> dict[str, object]:
        hidden = {"proxies": {"__all__": {"coefficients"}}}
        return self.model_dump(mode="json", exclude_unset=True, exclude=hidden)


def summarize_table(table: DeviceTable, path: str) -> TableSummary:
    """Return a device's table in short."""
    return TableSummary(
        device=table.device, table=path, source=table.source, error=table.error,
        profiles={name: _timed(table, name) for name in table.profiles},
        proxies=table.proxies,
        grouped=sum(group.worth for group in table.groups), groups=len(table.groups),
        energy=table.energy, energy_proxy=table.energy_proxy, conditions=table.conditions,
    )  # fmt: skip


def _timed(table: DeviceTable, name: str) -> TimedProfile:
    forms = table.forms.get(name, {}).values()
    started = table.starts[name].model_dump() if name in table.starts else {}
    return TimedProfile(
        **vars(table.profiles[name]), guard=table.guard(name),
        factored=sum(form in (Form.FACTORED, Form.ALIGNED) for form in forms),
        energy_mj=table.energy_mj.get(name), **started,
    )  # fmt: skip


def print_table(summary: TableSummary, console: Console) -> None:
    """Print a calibration for people."""
    device = summary.device
    console.print(
        f"{device.cpu}, {device.engine} {device.engine_version}, "
        f"{device.threads} threads: {summary.source}"
    )
    titles = ("p50 ms", "p90", "p99", "guard", "factored layers", "cold start ms", "peak MB")
    table = Table("profile", *titles)
    for name, row in summary.profiles.items():
        peak = None if row.peak_bytes is None else row.peak_bytes / 1e6
        table.add_row(
            name, f"{row.p50:.3f}", f"{row.p90:.3f}", f"{row.p99:.3f}", f"{row.guard:.1%}",
            str(row.factored), cell(row.cold_ms, ".0f"), cell(peak, ".0f"),
        )  # fmt: skip
    console.print(table)
    for name, fit in summary.proxies.items():
        if fit.mape is not None:
            console.print(
                f"proxy {name}: off by {fit.mape:.1%} on {fit.held_out} profiles not "
                f"among the {fit.fitted} it was fitted to (R^2 {cell(fit.r2, '.3f')}; "
                f"a constant {cell(fit.constant_mape, '.1%')})"
            )
    if summary.groups:
        console.print(f"{summary.grouped} of {summary.groups} groups of layers run as one product")
    console.print(f"energy {summary.energy}")
    if summary.conditions:
        print_conditions(summary.conditions, console)


def print_conditions(conditions: Conditions, console: Console) -> None:
    """Print what disturbed a measurement, if anything did."""
    if conditions.repeated:
        console.print(f"{conditions.repeated} disturbed stretches were measured again")
    if conditions.disturbed:
        console.print(f"warning: a disturbed stretch was kept: {conditions.reason}")


def print_variants(result: Result) -> None:
    """Print a comparison as a table."""
    table = Table()
    metric = str(result.variants[0].metric or "quality")
    for title in ("variant", metric, "p50 ms", "p90 ms", "MB", "drift", "epsilon", "covered"):
        table.add_column(title, no_wrap=True, justify="left" if title == "variant" else "right")
    for v in result.variants:
        table.add_row(
            v.name, cell(v.quality, ".3f"), f"{v.latency_ms.p50:.3f}", f"{v.latency_ms.p90:.3f}",
            f"{v.size_bytes / 1e6:.3f}", cell(v.drift.mean, ".4f"), cell(v.drift.epsilon, ".4f"),
            cell(v.drift.coverage, ".3f"),
        )  # fmt: skip
    console = Console(markup=False, highlight=False)
    console.print(table)
    device, monotone = result.device, result.monotone
    console.print(
        f"{result.variants[0].samples} test samples; batch 1, in turns, on {device.cpu}, "
        f"{device.engine} {device.engine_version}, {device.threads} threads; "
        f"{monotone.violations} violations in {monotone.checked} monotone checks"
    )


def cell(value: float | None, form: str) -> str:
    """Return a number, or a dash for what is not available."""
    return "-" if value is None else format(value, form)
