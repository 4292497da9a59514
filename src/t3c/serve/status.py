"""A service as it is now: its profiles, its load, its metrics."""

from __future__ import annotations

import time
from dataclasses import asdict

from t3c.runtime.runtime import Runtime
from t3c.runtime.standing import guarantee
from t3c.serve import schema
from t3c.serve.book import OUTCOMES
from t3c.serve.service import Service
from t3c.spec import Budget
from t3c.version import __version__


def standing(
    service: Service, budget: Budget | None, profile: str | None = None
) -> schema.Standing:
    """Return which profile would serve a budget now, and what would be guaranteed."""
    choice = service.standing(budget, profile)
    certificate = service.version.runtime.certificates.get(choice.profile)
    return schema.Standing.of(
        choice.profile, choice.reason, choice.warnings, certificate=certificate,
        guarantee=guarantee(certificate),
    )  # fmt: skip


def standing_budget(service: Service) -> schema.StandingBudget:
    """Return the budget of requests that name none, and what serves them."""
    choice = service.standing(None)
    return schema.StandingBudget.of(
        choice.profile, choice.reason, choice.warnings,
        budget=schema.BudgetBody(**asdict(service.budget)),
        objective_ms=service.scheduler.policy.objective_ms,
    )  # fmt: skip


def profiles(service: Service) -> schema.Profiles:
    """Return every profile with what is known of it here."""
    version = service.version
    runtime, model = version.runtime, version.model
    takes = "image" if model.image else "text" if version.tokenizer else "numbers"
    return schema.Profiles(
        model=model.name, version=version.name, t3c=__version__, device=runtime.device,
        note=str(runtime.note or ""), takes=takes, writes=bool(model.states),
        classes=list(model.classes) if model.classes else None,
        profiles=_profile_rows(runtime, service.standing(None).profile),
    )  # fmt: skip


def _profile_rows(runtime: Runtime, active: str) -> list[schema.ProfileRow]:
    rows = []
    for candidate in runtime.placed.candidates:
        name, latency = candidate.profile, candidate.latency
        certificate, refused = runtime.certificates.get(name), runtime.refused.get(name)
        quality, quantiles = runtime.placed.quality.get(name), None
        if latency is not None:
            quantiles = schema.Quantiles(p50=latency.p50, p90=latency.p90, p99=latency.p99)
        rows.append(
            schema.ProfileRow(
                name=name, size_mb=candidate.size_mb, latency_ms=quantiles,
                guard=candidate.guard, energy_mj=candidate.energy_mj,
                epsilon=certificate.epsilon if certificate else None,
                delta=certificate.delta if certificate else None,
                samples=certificate.samples if certificate else None,
                mean_drift=certificate.mean if certificate else None,
                metric=quality.metric if quality else None,
                quality=quality.value if quality else None,
                drop=quality.drop if quality else None,
                refused=str(refused) if refused else None,
                refused_code=refused.code if refused else None,
                active=name == active,
            )
        )  # fmt: skip
    return rows


def live_view(service: Service) -> schema.LiveView:
    """Return the server as the dashboard shows it."""
    version, scheduler, book = service.version, service.scheduler, service.book
    runtime, policy = version.runtime, scheduler.policy
    now, choice = time.monotonic(), service.standing(None)
    evidence = _evidence(runtime)
    return schema.LiveView.of(
        choice.profile, choice.reason, choice.warnings,
        model=version.model.name, version=version.name, state=service.state,
        now=time.time(), uptime_s=time.time() - book.started,
        objective_ms=policy.objective_ms, budget=schema.BudgetBody(**asdict(service.budget)),
        steps=len(policy.chain) - 1 - policy.chain.index(scheduler.ceiling),
        pressures=list(runtime.signals.asked.reasons), alarm=runtime.alarm.raised is not None,
        load=schema.Load(
            requests_per_s=policy.rate(now), waiting=scheduler.waiting,
            utilization=policy.utilization(now, choice.profile),
        ),
        latency_ms=book.latency(), totals={name: book.totals[name] for name in OUTCOMES},
        series=book.series(), drift=[_drift_row(service, p.name) for p in runtime.chain],
        monitor=None if evidence is None else schema.Evidence(evidence=evidence),
        events=list(book.events),
    )  # fmt: skip


def metrics_page(service: Service) -> bytes:
    """Return what Prometheus reads, with gauges as they are now."""
    metrics = service.metrics
    if service.loads:
        runtime, scheduler = service.version.runtime, service.scheduler
        policy = scheduler.policy
        metrics.waiting.set(scheduler.waiting)
        metrics.utilization.set(policy.utilization(time.monotonic(), policy.chain[-1]))
        metrics.objective.set(policy.objective_ms / 1e3)
        for name in policy.chain:
            metrics.ceiling.labels(name).set(name == scheduler.ceiling)
            row = _drift_row(service, name)
            if row.epsilon is not None:
                metrics.epsilon.labels(name).set(row.epsilon)
            if row.observed is not None:
                metrics.drift.labels(name).set(row.observed.mean)
        metrics.evidence.set(_evidence(runtime) or 0.0)
    return metrics.page()


def _drift_row(service: Service, profile: str) -> schema.DriftRow:
    certificate = service.version.runtime.certificates.get(profile)
    return schema.DriftRow(
        profile=profile, epsilon=certificate.epsilon if certificate else None,
        mean=certificate.mean if certificate else None, observed=service.book.observed(profile),
    )  # fmt: skip


def _evidence(runtime: Runtime) -> float | None:
    """Return the most that a monitor has gathered; None if nothing is monitored."""
    return max((watch.monitor.evidence for watch in runtime.watches.values()), default=None)
