"""Spans for OpenTelemetry, where that is configured; nothing at all elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from t3c.errors import MissingExtraError

CONFIGURED = (
    "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)  # fmt: skip


class Tracing:
    """Spans of a provider; None makes none.

    >>> with Tracing(None).span("infer", {}) as attributes:
    ...     attributes["t3c.profile"] = "tiny"
    """

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("t3c.serve")

    @contextmanager
    def span(self, name: str, headers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """A span below the client's own; what is put into the dict becomes its attributes."""
        attributes: dict[str, Any] = {}
        if self._tracer is None:
            yield attributes
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        context = extract(dict(headers))
        with self._tracer.start_as_current_span(
            name, context=context, kind=SpanKind.SERVER
        ) as span:
            try:
                yield attributes
            finally:
                span.set_attributes({k: v for k, v in attributes.items() if v is not None})

    def close(self) -> None:
        """Send what was not sent yet."""
        if self._provider is not None:
            self._provider.shutdown()


def configured_tracing(environment: Mapping[str, str] = os.environ) -> Tracing:
    """Tracing to where the standard variables of OpenTelemetry say, if they say anything."""
    if not any(environment.get(name) for name in CONFIGURED):
        return Tracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as missing:
        raise MissingExtraError("opentelemetry-exporter-otlp-proto-http", "otel") from missing
    named = {"service.name": environment.get("OTEL_SERVICE_NAME", "t3c")}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)
