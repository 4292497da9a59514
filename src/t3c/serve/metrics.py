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
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        counter, gauge = self._counter, self._gauge
        self.http = counter(
            "t3c_http_requests", "HTTP requests by route and status", "route", "status"
        )
        self.answers = counter("t3c_answers", "Requests answered, by profile", "profile")
        self.refusals = counter("t3c_refusals", "Requests refused, by status", "status")
        self.late = counter("t3c_late_answers", "Answers after their deadline")
        self.downshifts = counter(
            "t3c_downshifts", "Requests that load, heat or charge brought to a smaller profile"
        )
        self.swaps = counter("t3c_swaps", "Profiles that took another's place")
        self.reloads = counter(
            "t3c_reloads", "Artifact versions loaded, and rolled back", "outcome"
        )
        self.seconds = Histogram(
            "t3c_request_seconds", "From a request's first byte to its answer", ["profile"],
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.waited = Histogram(
            "t3c_waited_seconds", "What requests waited for a lane", buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.rows = Histogram(
            "t3c_request_rows", "Samples of a request", buckets=LOTS, registry=self.registry
        )
        self.waiting = gauge("t3c_waiting_requests", "Neither answered nor refused")
        self.utilization = gauge(
            "t3c_utilization", "Share of the lanes' time that load takes of the largest profile"
        )
        self.ceiling = gauge("t3c_ceiling", "1 for the largest profile that load allows", "profile")
        self.epsilon = gauge(
            "t3c_certified_drift", "epsilon of the profile's certificate", "profile"
        )
        self.drift = gauge(
            "t3c_observed_drift", "Mean drift from the largest profile, as observed", "profile"
        )
        self.evidence = gauge("t3c_shift_evidence", "Of moved activations; 1 raises an alarm")
        self.objective = gauge("t3c_objective_seconds", "The latency objective")

    def page(self) -> bytes:
        return bytes(generate_latest(self.registry))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)
