"""Layer points timed where they stand: by what the network's operations take, all layers at once.

A layer timed alone has its weights in the caches and pays for a call of its own; in the network it
runs between others. One compiled network tells the times of all its layers, so there are as many
compilations as a layer has ranks, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from t3c.artifact.devices import LayerTiming
from t3c.artifact.manifest import ELASTIC_DOMAIN, elastic_layer
from t3c.artifact.reader import Artifact
from t3c.device.execution import Execution, example_inputs
from t3c.device.grid import widest_ranges
from t3c.device.machine import describe
from t3c.device.measured import Watch
from t3c.engines import Counting, Engine, Operations
from t3c.measure.quiet import Quiet, slowdown
from t3c.spec import Form, Kind, LayerSpec, Profile

ROUNDS, MOST_ROUNDS = 24, 300  # of each network; as many as fit into its time
SECONDS = 0.6
WARM = 3  # runs before the first that counts
SHORTEST = 1e-4  # ms: clocks tick in microseconds
BELOW = (Form.FACTORED, Form.ALIGNED, Form.NARROW)  # forms of layers below full rank
LEAST = 0.01  # of a layer's dense time: what a point takes at the least
Times = dict[str, float]  # milliseconds of one run of each layer
Found = dict[tuple[str, int, Form], list[float]]


def time_in_place(
    artifact: Artifact,
    engine: Engine,
    *,
    few: Artifact | None = None,
    quiet: Quiet | None = None,
    watch: Watch = lambda what, done, total: None,
) -> tuple[LayerTiming, ...] | None:
    """Times of layer points in the network; None of an engine that does not tell them all.

    `artifact` stores every rank, in as many profiles as the layer with most ranks has of them.
    Each profile runs once in each form, in turns with the network at full rank, which levels a
    machine that becomes slower. Layers of one geometry take the median of theirs, and a higher
    rank no less than a lower one. `few` are the same profiles in views of at most 4 bits, where
    kernels of their own can run those.
    """
    if not isinstance(engine, Counting):
        return None
    specs, chain = artifact.manifest.specs, list(artifact.manifest.chain)
    network = _Network(artifact, engine, engine, quiet)
    dense = network.dense
    # Looking up what is always the same is done when a network is compiled, and takes no time.
    if not all(dense[name] > 0 for name, spec in specs.items() if spec.kind is not Kind.EMBEDDING):
        return None
    dense = {name: max(ms, SHORTEST) for name, ms in dense.items()}
    found = network.ranks(artifact, watch)
    timings = _timings(specs, chain, dense, found)
    if few is not None:
        top = few.manifest.chain.top
        whole = network.timed(few, top, dict.fromkeys(top.points, Form.DENSE))
        fewer = _timings(specs, chain, whole, network.ranks(few, watch))
        pairs = zip(timings, fewer, strict=True)
        timings = [_with_fewer(one, less, specs[one.layer]) for one, less in pairs]
    return tuple(timings)


def _form(spec: LayerSpec, profile: Profile, form: Form) -> Form:
    """Return how a layer runs where those below full rank are to run in a form: the others dense,
    those that are narrowed so beside the factored ones."""
    point = profile.points[spec.name]
    able = spec.forms(point) if point.rank < spec.full_rank else ()
    if Form.NARROW in able:
        return Form.NARROW
    return form if form in able else Form.DENSE


class _Network:
    """The network of an artifact, run at full rank and beside that in other forms."""

    def __init__(
        self, artifact: Artifact, engine: Engine, counting: Counting, quiet: Quiet | None
    ) -> None:
        self.counting, self.quiet = counting, quiet
        self.ranges, self.inputs = widest_ranges(artifact), example_inputs(artifact)
        self.bits = describe(engine).weight_bits
        self.layers = _nodes(artifact)
        self.runs = {name: spec.runs for name, spec in artifact.manifest.specs.items()}
        top = artifact.manifest.chain.top
        self.whole = self._compiled(artifact, top, dict.fromkeys(top.points, Form.DENSE))
        self.rounds = ROUNDS
        (first,) = self._sampled([self.whole])
        seconds = median(map(sum, zip(*first.values(), strict=True))) / 1e3
        self.rounds = int(np.clip(SECONDS / max(seconds, 1e-6), ROUNDS, MOST_ROUNDS))
        (again,) = self._sampled([self.whole])
        self.dense = _middle(again)

    def ranks(self, artifact: Artifact, watch: Watch) -> Found:
        """Return what layers take at each rank below the full one, in each form."""
        found: Found = {}
        specs, chain = artifact.manifest.specs, list(artifact.manifest.chain)
        wanted = [(p, form) for p in chain[:-1] for form in (Form.FACTORED, Form.ALIGNED)]
        for index, (profile, form) in enumerate(wanted):
            watch("timing layers in place", index, len(wanted))
            forms = {name: _form(specs[name], profile, form) for name in specs}
            below = {name: mine for name, mine in forms.items() if mine is not Form.DENSE}
            if form not in below.values() and Form.NARROW not in below.values():
                continue
            times = self.timed(artifact, profile, forms)
            for name, mine in below.items():
                found.setdefault((name, profile.points[name].rank, mine), []).append(times[name])
        watch("timing layers in place", len(wanted), len(wanted))
        return found

    def timed(self, artifact: Artifact, profile: Profile, forms: Mapping[str, Form]) -> Times:
        """Return what each layer takes in a profile, at the speed full rank was timed at."""
        other = self._compiled(artifact, profile, forms)
        repeated = 0
        while True:
            start = self.quiet.read() if self.quiet else None
            whole, times = self._sampled([self.whole, other])
            taken = _middle(whole)
            speed = sum(taken.values()) / sum(self.dense.values())
            if self.quiet is None or start is None:
                break
            before = {"whole": list(self.dense.values())}
            slower = slowdown({"whole": list(taken.values())}, [before])
            if self.quiet.keeps(self.quiet.judge(start, slower), repeated):
                break
            repeated += 1
        return {name: ms / speed for name, ms in _middle(times).items()}

    def _compiled(
        self, artifact: Artifact, profile: Profile, forms: Mapping[str, Form]
    ) -> Operations:
        execution = Execution(profile, forms, self.ranges, few=True)
        return self.counting.operations(execution.graph(artifact, self.bits))

    def _sampled(self, compiled: Sequence[Operations]) -> list[dict[str, list[float]]]:
        """Return each layer's times in every round of each network, run in turns."""
        found: list[dict[str, list[float]]] = [{n: [] for n in self.runs} for _ in compiled]
        for count in range(WARM + self.rounds):
            for place, one in enumerate(compiled):
                times = dict.fromkeys(self.runs, 0.0)
                for names, ms in one.run(self.inputs).items():
                    layer = _layer_of(names, self.layers)
                    if layer is not None:
                        times[layer] += ms / self.runs[layer]
                if count >= WARM:
                    for name, ms in times.items():
                        found[place][name].append(ms)
        return found


def _nodes(artifact: Artifact) -> dict[str, str]:
    """Return the layer of each of its nodes, by the node's name and that of its output."""
    found: dict[str, str] = {}
    for node in artifact.graph().graph.node:
        if node.domain == ELASTIC_DOMAIN:
            found |= dict.fromkeys((node.name, node.output[0]), elastic_layer(node))
    return found


def _layer_of(names: Sequence[str], layers: Mapping[str, str]) -> str | None:
    """Return the layer that an operation belongs to: one that a name of it is, or is below."""
    for name in names:
        while name:
            if name in layers:
                return layers[name]
            name = name.rpartition("/")[0]
    return None


def _middle(times: Mapping[str, Sequence[float]]) -> Times:
    """Return the mean of the middle half of each layer's times: clocks tick in microseconds."""
    found = {}
    for name, taken in times.items():
        ranked, cut = np.sort(np.asarray(taken)), len(taken) // 4
        found[name] = float(ranked[cut : len(ranked) - cut].mean())
    return found


def _with_fewer(timing: LayerTiming, fewer: LayerTiming, spec: LayerSpec) -> LayerTiming:
    """Return a timing with those of few bits; below full rank, dense is a product in 8 bits."""
    dense = {Form.DENSE: timing.ms[Form.DENSE]} if timing.rank < spec.full_rank else {}
    return timing.model_copy(update={"few_ms": fewer.ms | dense})


def _timings(
    specs: Mapping[str, LayerSpec], chain: Sequence[Profile], dense: Times, found: Found
) -> list[LayerTiming]:
    """Return the times of every rank of every layer, those of one geometry being the same."""
    alike: dict[LayerSpec, list[str]] = {}
    for name, spec in specs.items():
        alike.setdefault(spec.geometry, []).append(name)
    timings = []
    for names in alike.values():
        whole = median(dense[name] for name in names)
        ranks = {name: sorted({p.points[name].rank for p in chain}) for name in names}
        shared = _rising(names, ranks[names[0]], found)
        for name in names:
            for rank in ranks[name]:
                ms = {Form.DENSE: whole}
                for form in BELOW:
                    if (name, rank, form) in found:
                        ms[form] = max(shared[rank, form], LEAST * whole)
                timings.append(LayerTiming(layer=name, rank=rank, ms=ms))
    order = {name: index for index, name in enumerate(specs)}
    return sorted(timings, key=lambda timing: (order[timing.layer], timing.rank))


def _rising(
    names: Sequence[str], ranks: Sequence[int], found: Found
) -> dict[tuple[int, Form], float]:
    """Return the times of some layers together, nearest to theirs, that do not fall with rank."""
    from scipy.optimize import isotonic_regression

    rising: dict[tuple[int, Form], float] = {}
    for form in BELOW:
        times = {
            rank: [ms for name in names for ms in found.get((name, rank, form), ())]
            for rank in ranks
        }
        known = {rank: median(taken) for rank, taken in times.items() if taken}
        if known:
            smooth = isotonic_regression(list(known.values())).x
            rising |= {(rank, form): float(ms) for rank, ms in zip(known, smooth, strict=True)}
    return rising
