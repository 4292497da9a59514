"""Measure layer points, groups of layers and sessions on an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import onnx

from t3c.artifact.devices import GroupTiming, LayerTiming
from t3c.engines import Engine, Session
from t3c.engines.protocol import Array
from t3c.graph.int4 import Activations
from t3c.graph.synthetic import example_input, synthetic_group, synthetic_layer
from t3c.measure.latency import Name, interleave
from t3c.measure.quiet import Quiet
from t3c.spec import MAX_BITS, Form, Latency, LayerPoint, LayerSpec

ROUNDS = 40

Graph = tuple[onnx.ModelProto, Array]  # and its input

Watch = Callable[[str, int, int], object]


def time_layer(
    engine: Engine,
    spec: LayerSpec,
    ranks: Iterable[int],
    quiet: Quiet | None = None,
    *,
    to_float: bool = False,
    activations: Activations = "int8",
) -> list[LayerTiming]:
    """Time a layer at each rank in each form it can run in, interleaved, on random weights.

    Bits do not matter to the time: codes of fewer bits run on the same int8 kernels. Those of
    weights alone save reading, which a layer in the caches does not do: `time_in_place` tells.
    Whether its output is rounded to 8 bits again, or stays float, does matter to some engines.
    """

    def graph(rank: int, form: Form) -> Graph:
        made = synthetic_layer(spec, exact(rank), form, to_float=to_float, activations=activations)
        return made, example_input(spec.narrowed(rank))

    graphs = {f"{spec.full_rank} dense": graph(spec.full_rank, Form.DENSE)}
    for rank in ranks:
        if Form.FACTORED in spec.forms(exact(rank)):
            graphs[f"{rank} factored"] = graph(rank, Form.FACTORED)
        if spec.alignable(rank):
            graphs[f"{rank} aligned"] = graph(rank, Form.ALIGNED)
        if Form.NARROW in spec.forms(exact(rank)):
            graphs[f"{rank} narrow"] = graph(rank, Form.NARROW)
    p50 = _time_graphs(engine, graphs, quiet)
    timings = []
    for rank in ranks:
        ms = {Form.DENSE: p50[f"{spec.full_rank} dense"]}
        for form in (Form.FACTORED, Form.ALIGNED, Form.NARROW):
            if f"{rank} {form}" in p50:
                ms[form] = p50[f"{rank} {form}"]
        timings.append(LayerTiming(layer=spec.name, rank=rank, ms=ms))
    return timings


def time_group(
    engine: Engine,
    specs: Sequence[LayerSpec],
    ranks: Sequence[int],
    form: Form,
    quiet: Quiet | None = None,
    activations: Activations = "int8",
) -> GroupTiming:
    """Time layers that read one input as one product and one by one.

    Aligned layers read other channels each: there is no product of all to time.
    """
    points = [exact(rank) for rank in ranks]
    ways = (False,) if form is Form.ALIGNED else (True, False)
    x = example_input(specs[0])
    graphs = {
        str(grouped): (synthetic_group(specs, points, form, grouped, activations=activations), x)
        for grouped in ways
    }
    p50 = _time_graphs(engine, graphs, quiet)
    names = tuple(spec.name for spec in specs)
    apart = p50[str(False)]
    together = p50.get(str(True), apart)
    return GroupTiming(
        layers=names, ranks=tuple(ranks), form=form, together_ms=together, apart_ms=apart
    )


def _time_graphs(
    engine: Engine, graphs: Mapping[str, Graph], quiet: Quiet | None
) -> dict[str, float]:
    calls: dict[str, Callable[[], object]] = {}
    for name, (graph, x) in graphs.items():
        calls |= runners({name: engine.compile(graph)}, [x])
    return {name: t.p50 for name, t in interleave(calls, ROUNDS, quiet=quiet).items()}


def time_layers(
    engine: Engine,
    layers: Sequence[tuple[LayerSpec, tuple[int, ...]]],
    to_float: Collection[str] = (),
    *,
    activations: Activations = "int8",
    quiet: Quiet | None = None,
    watch: Watch = lambda what, done, total: None,
    known: Mapping[str, list[LayerTiming]] | None = None,
    keep: Callable[[str, list[LayerTiming]], object] = lambda key, timings: None,
) -> tuple[LayerTiming, ...]:
    """Every rank of every layer in every form, on the engine. Layers of one geometry share.

    The outputs of those `to_float` are not rounded again, and with float `activations` none are.
    `known` are timings by geometry that need not be measured again; `keep` gets the new ones.
    """
    shared = dict(known or {})
    timings: list[LayerTiming] = []
    for index, (spec, ranks) in enumerate(layers):
        watch(f"timing layers: {spec.name}", index, len(layers))
        floats = spec.name in to_float
        shape = spec.geometry
        key = f"{shape} {ranks}{' to float' if floats else ''}"
        if activations == "float":
            key += " on float"
        if key not in shared:
            shared[key] = time_layer(
                engine, spec, ranks, quiet, to_float=floats, activations=activations
            )
            keep(key, shared[key])
        timings += [t.model_copy(update={"layer": spec.name}) for t in shared[key]]
    watch("timing layers", len(layers), len(layers))
    return tuple(timings)


def time_sessions(
    sessions: Mapping[str, Session],
    inputs: list[Array],
    rounds: int,
    *,
    quiet: Quiet | None = None,
    tick: Callable[[int, int], object] = lambda done, rounds: None,
) -> dict[str, Latency]:
    """Latency of each session on the same input, taken in turns."""
    return interleave(runners(sessions, inputs), rounds, quiet=quiet, tick=tick)


def runners(
    sessions: Mapping[Name, Session], inputs: list[Array]
) -> dict[Name, Callable[[], object]]:
    """Each session as a call on the same input."""

    def runner(session: Session) -> Callable[[], object]:
        return lambda: session.run(inputs)

    return {name: runner(session) for name, session in sessions.items()}


def exact(rank: int) -> LayerPoint:
    """Return a point of a rank at all bits."""
    return LayerPoint(rank, MAX_BITS)
