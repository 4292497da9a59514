"""What an engine is measured by: layer points, groups of layers, profiles as a whole."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from t3c.artifact.devices import Device, Group, GroupTiming, LayerTiming
from t3c.artifact.reader import Artifact
from t3c.engines import Engine, Session
from t3c.engines.decode import empty_states
from t3c.engines.protocol import Array
from t3c.graph.assemble import assemble, example_input, synthetic_group, synthetic_layer
from t3c.graph.builder import Ranges
from t3c.graph.int4 import Activations
from t3c.measure.latency import interleave
from t3c.measure.processor import cpu_fields
from t3c.measure.quiet import Quiet
from t3c.spec import MAX_BITS, Form, Latency, LayerPoint, LayerSpec, Profile

ROUNDS = 40
DOT_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8")

Watch = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Subject:
    """A profile with all that decides how it is executed."""

    profile: Profile
    forms: Mapping[str, Form]
    ranges: Ranges
    grouped: Sequence[Group] = ()

    def graph(self, artifact: Artifact, weight_bits: int) -> onnx.ModelProto:
        return assemble(artifact, self.profile, self.forms, self.ranges, weight_bits, self.grouped)


def describe(engine: Engine) -> Device:
    """The device: this machine, the engine and its threads."""
    return Device(
        cpu=cpu_name(),
        engine=engine.name,
        engine_version=engine.version,
        threads=engine.threads,
        weight_bits=_exact_weight_bits(engine),
    )


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

    Bits do not matter to the time: codes of fewer bits run on the same int8 kernels. Whether its
    output is rounded to 8 bits again, or stays float, does matter to some engines.
    """

    def graph(rank: int, form: Form) -> onnx.ModelProto:
        return synthetic_layer(spec, _point(rank), form, to_float=to_float, activations=activations)

    graphs = {f"{spec.full_rank} dense": graph(spec.full_rank, Form.DENSE)}
    for rank in ranks:
        if Form.FACTORED in spec.forms(_point(rank)):
            graphs[f"{rank} factored"] = graph(rank, Form.FACTORED)
        if spec.alignable(rank):
            graphs[f"{rank} aligned"] = graph(rank, Form.ALIGNED)
    p50 = _time_graphs(engine, graphs, example_input(spec), quiet)
    timings = []
    for rank in ranks:
        ms = {Form.DENSE: p50[f"{spec.full_rank} dense"]}
        for form in (Form.FACTORED, Form.ALIGNED):
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
    points = [_point(rank) for rank in ranks]
    ways = (False,) if form is Form.ALIGNED else (True, False)
    graphs = {
        str(grouped): synthetic_group(specs, points, form, grouped, activations=activations)
        for grouped in ways
    }
    p50 = _time_graphs(engine, graphs, example_input(specs[0]), quiet)
    names = tuple(spec.name for spec in specs)
    apart = p50[str(False)]
    together = p50.get(str(True), apart)
    return GroupTiming(
        layers=names, ranks=tuple(ranks), form=form, together_ms=together, apart_ms=apart
    )


def _time_graphs(
    engine: Engine, graphs: Mapping[str, onnx.ModelProto], x: Array, quiet: Quiet | None
) -> dict[str, float]:
    sessions = {name: engine.compile(graph) for name, graph in graphs.items()}
    return {name: t.p50 for name, t in time_sessions(sessions, [x], ROUNDS, quiet=quiet).items()}


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
        shape = replace(spec, name="", aligned=(), unaligned=())
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
    sessions: Mapping[str, Session], inputs: list[Array]
) -> dict[str, Callable[[], object]]:
    """Each session as a call on the same input."""

    def runner(session: Session) -> Callable[[], object]:
        return lambda: session.run(inputs)

    return {name: runner(session) for name, session in sessions.items()}


def example_inputs(artifact: Artifact, seed: int = 0) -> list[Array]:
    """Inputs of the right shapes at batch 1: noise, and ones where they are whole numbers.

    Free axes are as long as in the example the model was exported with. A model with states reads
    one token, and remembers as many as the example has.
    """
    rng, model = np.random.default_rng(seed), artifact.manifest.model
    inputs, remembered = [], 0
    for entry in model.inputs:
        shape = list(entry.example or [n if isinstance(n, int) else 1 for n in entry.shape])
        if model.states:
            remembered = max(remembered, *shape[1:])
            shape = [n if isinstance(n, int) else 1 for n in entry.shape]
        noise = rng.normal(size=shape) if entry.dtype.startswith("float") else np.ones(shape)
        inputs.append(noise.astype(entry.dtype))
    return [*inputs, *empty_states(model.states, 1, remembered)]


def _point(rank: int) -> LayerPoint:
    return LayerPoint(rank, MAX_BITS)


def cpu_name() -> str:
    """The processor, with the vector instructions that decide between int8 kernels."""
    fields = cpu_fields()
    flags = fields.get("flags", "").split()
    kernels = [flag for flag in ("avx2", "avx512f", *DOT_PRODUCTS) if flag in flags]
    return " ".join([fields.get("model name", platform.machine()), *kernels])


def _exact_weight_bits(engine: Engine) -> int:
    """8, but for x86 without dot-product instructions 7: its int8 kernels add u8 x s8 products in
    pairs in 16 bits, which 255 x 127 x 2 overflows and 255 x 64 x 2 does not."""
    flags = cpu_fields().get("flags", "").split()
    if engine.name == "torch" or "avx2" not in flags:
        return 8
    return 8 if any(flag in flags for flag in DOT_PRODUCTS) else 7
