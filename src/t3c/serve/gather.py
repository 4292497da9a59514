"""What several replicas tell, as one server would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from t3c.runtime.standing import Shown
from t3c.serve import schema
from t3c.serve.book import EVENTS, OUTCOMES


def merge_views(views: Mapping[str, schema.LiveView]) -> schema.MergedView:
    """Return the live views of some replicas as one. Counts add up; quantiles are those of the
    slowest replica, which all requests together do not exceed."""
    every = list(views.values())
    seconds: dict[int, list[schema.Second]] = {}
    for second in (second for view in every for second in view.series):
        seconds.setdefault(second.t, []).append(second)
    events = [
        event.model_copy(update={"text": f"{name}: {event.text}"})
        for name, view in views.items()
        for event in view.events
    ]
    loads, recent = [view.load for view in every], [view.latency_ms for view in every]
    evidence = [view.monitor.evidence for view in every if view.monitor]
    merged = dict(every[0])
    merged |= {
        "replicas": len(every),
        "uptime_s": max(view.uptime_s for view in every),
        "steps": max(view.steps for view in every),
        "pressures": sorted({why for view in every for why in view.pressures}),
        "alarm": any(view.alarm for view in every),
        "load": schema.Load(
            **_sums(loads, "requests_per_s", "waiting"),
            utilization=max(load.utilization for load in loads),
        ),
        "latency_ms": schema.Recent(**_slowest(recent), **_sums(recent, "requests")),
        "totals": {name: sum(view.totals[name] for view in every) for name in OUTCOMES},
        "series": [_merge_second(same) for _, same in sorted(seconds.items())],
        "drift": [_merge_drift(row, every) for row in every[0].drift],
        "monitor": schema.Evidence(evidence=max(evidence)) if evidence else None,
        "events": sorted(events, key=lambda event: -event.t)[:EVENTS],
    }
    return schema.MergedView.model_validate(merged)


def _merge_second(same: Sequence[schema.Second]) -> schema.Second:
    served = Counter[str]()
    for second in same:
        if second.profile is not None:
            served[second.profile] += second.requests
    return schema.Second(
        t=same[0].t,
        profile=served.most_common(1)[0][0] if served else None,
        **_sums(same, "requests", "refused", "late"),
        **_slowest(same),
    )


def _merge_drift(row: schema.DriftRow, every: Sequence[schema.LiveView]) -> schema.DriftRow:
    same = [one for view in every for one in view.drift if one.profile == row.profile]
    seen = [one.observed for one in same if one.observed]
    if not seen:
        return row.model_copy(update={"observed": None})
    rows = sum(one.rows for one in seen)
    mean = sum(one.mean * one.rows for one in seen) / rows
    whole = schema.Observed(mean=mean, largest=max(one.largest for one in seen), rows=rows)
    return row.model_copy(update={"observed": whole})


def _sums(parts: Sequence[Shown], *names: str) -> dict[str, Any]:
    return {name: sum(getattr(part, name) for part in parts) for name in names}


def _slowest(parts: Sequence[schema.Quantiles]) -> dict[str, Any]:
    values = {
        name: [getattr(part, name) for part in parts] for name in schema.Quantiles.model_fields
    }
    return {
        name: max((value for value in found if value is not None), default=None)
        for name, found in values.items()
    }


class _Pages(Collector):
    """The metrics of several pages, each with its replica's name."""

    def __init__(self, pages: Mapping[str, bytes]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for name, page in self._pages.items():
            for one in text_string_to_metric_families(page.decode()):
                family = found.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                family.samples += [
                    sample._replace(labels={**sample.labels, "replica": name})
                    for sample in one.samples
                ]
        yield from found.values()


def merge_pages(pages: Mapping[str, bytes]) -> bytes:
    """The metrics of every replica as one page for Prometheus, told apart by a label."""
    registry = CollectorRegistry()
    registry.register(_Pages(pages))
    return bytes(generate_latest(registry))
