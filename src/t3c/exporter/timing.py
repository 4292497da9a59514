"""What the layer points of an elastic model take on the engine that it is exported for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from t3c.artifact.devices import LayerTiming
from t3c.artifact.draft import Draft
from t3c.artifact.graph import Axes, Traced
from t3c.convert import LayerPlan, state_of
from t3c.device.in_place import time_in_place
from t3c.device.measured import Watch, time_layers
from t3c.engines import Engine, open_engine
from t3c.exporter import content
from t3c.exporter.allocate import Allocated
from t3c.exporter.config import ExportConfig
from t3c.exporter.described import Described
from t3c.graph.context import float_outputs
from t3c.measure.quiet import Conditions, watchful
from t3c.nn.inputs import evaluating
from t3c.spec import LayerPoint, Profile, ProfileChain


@dataclass(frozen=True)
class Timed:
    """What layer points take on a device, the activations that they do so on, and the conditions
    they were measured under, where those are known."""

    layers: tuple[LayerTiming, ...]
    activations: Literal["int8", "float"]
    conditions: Conditions | None = None


def time_points(
    model: nn.Module,
    config: ExportConfig | None = None,
    *,
    axes: Axes | None = None,
    watch: Watch = lambda what, done, total: None,
) -> Timed:
    """The layer points of an elastic model, timed on the engine that it is to be exported for."""
    config = config or ExportConfig()
    with evaluating(model):
        traced = content.topology(model, **({"axes": axes} if axes else {}))
        return time_traced(model, traced, open_engine(config.engine, config.threads), config, watch)


def time_traced(
    model: nn.Module, traced: Traced, engine: Engine, config: ExportConfig, watch: Watch
) -> Timed:
    """Layer times on the activations asked for, or on those that full ranks take less time on.

    Those of a model with states are of one token: decoding is what it is exported for.
    """
    plans = state_of(model).plan.layers
    ranks = [(p.spec.per_token if traced.stateful else p.spec, p.ranks) for p in plans]
    to_float = float_outputs(traced.model.graph, {spec.name: spec for spec, _ in ranks})
    asked = config.activations
    kinds: list[Literal["int8", "float"]] = ["int8", "float"] if asked == "auto" else [asked]
    tops = {spec.name: (spec.runs, served[-1]) for spec, served in ranks}
    found, quiet = [], watchful(True)
    for kind in kinds:
        timings = time_layers(engine, ranks, to_float, activations=kind, quiet=quiet, watch=watch)
        whole = sum(
            tops[t.layer][0] * min(t.ms.values()) for t in timings if t.rank == tops[t.layer][1]
        )
        found.append((whole, Timed(timings, kind)))
    best = min(found, key=lambda one: one[0])[1]
    if not config.in_place:
        return replace(best, conditions=quiet.conditions)
    draft = _every_rank(model, traced, weight_only=best.activations == "float")
    layers = time_in_place(draft, engine, best.layers, quiet=quiet, watch=watch)
    return replace(best, layers=layers, conditions=quiet.conditions)


def _every_rank(model: nn.Module, traced: Traced, *, weight_only: bool) -> Draft:
    """Return a draft that has every rank of every layer; its ranges are those of the example."""
    state = state_of(model)
    plans = state.plan.layers
    most = max(len(plan.ranks) for plan in plans)

    def rank(plan: LayerPlan, level: int) -> int:
        """Of layers with fewer ranks the lowest comes more than once."""
        return plan.ranks[max(0, level + len(plan.ranks) - most)]

    chain = ProfileChain(
        tuple(
            Profile(
                f"level{level}",
                {p.spec.name: LayerPoint(rank(p, level), p.bits[-1]) for p in plans},
            )
            for level in range(most)
        )
    )
    described = Described(model, traced, "levels", weight_only=weight_only)
    return content.ranged(content.pack(described, Allocated.of(chain)), state.example)
