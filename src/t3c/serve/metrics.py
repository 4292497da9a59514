"""What Prometheus reads at /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
LOTS = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """One registry for each server, so that several in a process do not meet."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self.http = Counter(
            "t3c_http_requests", "HTTP requests by route and status", ["route", "status"],
            registry=registry,
        )  # fmt: skip
        self.answers = Counter(
            "t3c_answers", "Requests answered, by profile", ["profile"], registry=registry
        )
        self.refusals = Counter(
            "t3c_refusals", "Requests refused, by status", ["status"], registry=registry
        )
        self.late = Counter("t3c_late_answers", "Answers after their deadline", registry=registry)
        self.downshifts = Counter(
            "t3c_downshifts", "Requests that load, heat or charge brought to a smaller profile",
            registry=registry,
        )  # fmt: skip
        self.swaps = Counter("t3c_swaps", "Profiles that took another's place", registry=registry)
        self.reloads = Counter(
            "t3c_reloads", "Artifact versions loaded, and rolled back", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "t3c_request_seconds", "From a request's first byte to its answer", ["profile"],
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.waited = Histogram(
            "t3c_waited_seconds", "What requests waited for a lane", buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self.rows = Histogram(
            "t3c_request_rows", "Samples of a request", buckets=LOTS, registry=registry
        )
        self.waiting = Gauge(
            "t3c_waiting_requests", "Neither answered nor refused", registry=registry
        )
        self.utilization = Gauge(
            "t3c_utilization", "Share of the lanes' time that load takes of the largest profile",
            registry=registry,
        )  # fmt: skip
        self.ceiling = Gauge(
            "t3c_ceiling", "1 for the largest profile that load allows", ["profile"],
            registry=registry,
        )  # fmt: skip
        self.epsilon = Gauge(
            "t3c_certified_drift", "epsilon of the profile's certificate", ["profile"],
            registry=registry,
        )  # fmt: skip
        self.drift = Gauge(
            "t3c_observed_drift", "Mean drift from the largest profile, as observed", ["profile"],
            registry=registry,
        )  # fmt: skip
        self.evidence = Gauge(
            "t3c_shift_evidence", "Of moved activations; 1 raises an alarm", registry=registry
        )
        self.objective = Gauge("t3c_objective_seconds", "The latency objective", registry=registry)

    def page(self) -> bytes:
        return bytes(generate_latest(self.registry))
