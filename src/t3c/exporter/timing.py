"""What the layer points of an elastic model take on the engine that it is exported for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from t3c.artifact.devices import FEW_BITS, LayerTiming
from t3c.artifact.draft import Draft
from t3c.artifact.graph import Axes, Traced
from t3c.convert import LayerPlan, state_of
from t3c.device.execution import Execution, example_inputs
from t3c.device.in_place import time_in_place
from t3c.device.machine import describe
from t3c.device.measured import ROUNDS, Watch, runners, time_layers, time_sessions
from t3c.engines import Engine, open_engine
from t3c.exporter import content
from t3c.exporter.allocate import Allocated
from t3c.exporter.config import ExportConfig
from t3c.exporter.described import Described
from t3c.graph.context import float_outputs
from t3c.graph.int4 import Activations
from t3c.measure.latency import paced
from t3c.measure.quiet import Conditions, Quiet, watchful
from t3c.nn.inputs import evaluating
from t3c.nn.view import grouped
from t3c.spec import MAX_BITS, Form, LayerPoint, Profile, ProfileChain


@dataclass(frozen=True)
class Timed:
    """What layer points take on a device, the activations that they do so on, and the conditions
    they were measured under, where those are known.

    `tried` are the milliseconds of the network at full rank, by activations, where they were
    chosen.
    """

    layers: tuple[LayerTiming, ...]
    activations: Activations
    conditions: Conditions | None = None
    tried: Mapping[str, float] = field(default_factory=dict)


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

    They are taken in the whole network where the engine tells what its operations take, else of
    each layer alone. Those of a model with states are of one token: decoding is what it is
    exported for.
    """
    asked = config.activations
    kinds: list[Activations] = ["int8", "float"] if asked == "auto" else [asked]
    drafts = {kind: _every_rank(model, traced, weight_only=kind == "float") for kind in kinds}
    quiet = watchful(True)
    tried = _times_of(drafts, engine, quiet) if len(drafts) > 1 else {}
    kind = min(kinds, key=lambda kind: tried.get(kind, 0.0))
    few = None
    if kind == "float" and any(plan.bits[0] <= FEW_BITS for plan in state_of(model).plan.layers):
        few = _every_rank(model, traced, weight_only=True, most_bits=FEW_BITS)
    layers = time_in_place(drafts[kind], engine, few=few, quiet=quiet, watch=watch)
    if layers is None:  # the engine does not tell what its operations take
        plans = state_of(model).plan.layers
        ranks = [(p.spec.per_token if traced.stateful else p.spec, p.ranks) for p in plans]
        to_float = float_outputs(traced.model.graph, {spec.name: spec for spec, _ in ranks})
        layers = time_layers(engine, ranks, to_float, activations=kind, quiet=quiet, watch=watch)
    return Timed(layers, kind, quiet.conditions, tried)


def _times_of(
    drafts: Mapping[Activations, Draft], engine: Engine, quiet: Quiet
) -> dict[str, float]:
    """Return the milliseconds of the network at full rank, by the activations it runs on."""
    sessions, bits = {}, describe(engine).weight_bits
    for kind, draft in drafts.items():
        top = draft.manifest.chain.top
        forms = dict.fromkeys(top.points, Form.DENSE)
        graph = Execution(top, forms, draft.ranges(top.name)).graph(draft, bits)
        sessions[str(kind)] = engine.compile(graph)
    inputs = example_inputs(next(iter(drafts.values())))
    rounds = paced(runners(sessions, inputs), ROUNDS)
    times = time_sessions(sessions, inputs, rounds, quiet=quiet)
    return {str(kind): times[str(kind)].p50 for kind in drafts}


def _every_rank(
    model: nn.Module, traced: Traced, *, weight_only: bool, most_bits: int = MAX_BITS
) -> Draft:
    """Return a draft that has every rank of every layer, in the most bits there are up to some;
    its ranges are those of the example."""
    state = state_of(model)
    plans = state.plan.layers
    most = max(len(plan.ranks) for plan in plans)

    def rank(plan: LayerPlan, level: int) -> int:
        """Of layers with fewer ranks the lowest comes more than once."""
        return plan.ranks[max(0, level + len(plan.ranks) - most)]

    def bits(plan: LayerPlan) -> int:
        return max((q for q in plan.bits if q <= most_bits), default=plan.bits[0])

    chain = ProfileChain(
        tuple(
            Profile(
                f"level{level}",
                {p.spec.name: LayerPoint(rank(p, level), bits(p)) for p in plans},
            )
            for level in range(most)
        )
    )
    described = Described(model, traced, "levels", weight_only=weight_only)
    with grouped(model, weight_only):
        return content.ranged(content.pack(described, Allocated.of(chain)), state.example)
