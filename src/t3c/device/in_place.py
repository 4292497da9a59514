"""Layer points timed where they stand: what the whole network takes with them and without.

A layer timed alone has its weights in the caches and pays for a call of its own; in the network it
runs between others. What a rank saves there is what a budget gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from t3c.artifact.devices import LayerTiming
from t3c.artifact.reader import Artifact
from t3c.device.execution import Execution, example_inputs
from t3c.device.grid import widest_ranges
from t3c.device.machine import describe
from t3c.device.measured import Watch, exact, runners, time_sessions
from t3c.engines import Engine, Session
from t3c.measure.latency import paced
from t3c.measure.quiet import Quiet
from t3c.spec import Form, Latency, LayerSpec, Profile

ROUNDS = 40  # at the least: short networks are timed more often
LOT = 8  # networks compiled at the same time, besides the whole one
CHANCE = 0.005  # of the network's time
LEAST = 0.05  # of a layer's dense time: what a point takes at the least
Variant = tuple[int, Form]


def time_in_place(
    artifact: Artifact,
    engine: Engine,
    alone: Sequence[LayerTiming],
    *,
    quiet: Quiet | None = None,
    watch: Watch = lambda what, done, total: None,
) -> tuple[LayerTiming, ...]:
    """Times of layer points as the network has them, from those that were timed `alone`.

    `artifact` stores every rank of them. The time of the network at full rank is shared out among
    its layers as they take it alone; a point takes that, and what the network takes more or less
    with it. Layers of one geometry are exchanged together and share the difference. Chance is
    smoothed out: a higher rank gains no more than a lower one, and a difference as small as that
    between two compilations of one network is none.
    """
    specs, places = artifact.manifest.specs, _Places(artifact, engine, quiet)
    wanted: dict[LayerSpec, list[str]] = {}
    for name, spec in specs.items():
        wanted.setdefault(replace(spec, name="", aligned=(), unaligned=()), []).append(name)
    gains: dict[str, dict[Variant, float]] = {}
    for index, names in enumerate(wanted.values()):
        watch(f"timing in place: {names[0]}", index, len(wanted))
        variants = [
            (t.rank, form)
            for t in alone
            if t.layer == names[0] and t.rank < specs[names[0]].full_rank
            for form in t.ms
            # Weights of one geometry need not all have an aligned form.
            if form is not Form.DENSE
            and all(form in specs[name].forms(exact(t.rank)) for name in names)
        ]
        runs = sum(specs[name].runs for name in names)
        found = {v: gain / runs for v, gain in places.gains(names, variants).items()}
        gains |= dict.fromkeys(names, found)
    watch("timing in place", len(wanted), len(wanted))
    whole = sum(spec.runs * _dense(alone, name) for name, spec in specs.items())
    scale = places.whole_ms / whole
    return tuple(_placed(t, scale * _dense(alone, t.layer), gains[t.layer]) for t in alone)


class _Places:
    """The network of an artifact, to be run with some of its layers at other points."""

    def __init__(self, artifact: Artifact, engine: Engine, quiet: Quiet | None) -> None:
        self.artifact, self.engine, self.quiet = artifact, engine, quiet
        self.points = artifact.manifest.chain.top.points
        self.ranges, self.inputs = widest_ranges(artifact), example_inputs(artifact)
        self.bits = describe(engine).weight_bits
        self.whole = self._compiled((), 0, Form.DENSE)
        self.whole_ms = self._timed({})["whole"].p50

    def gains(self, names: Sequence[str], variants: Sequence[Variant]) -> dict[Variant, float]:
        """By how many milliseconds the network is faster with these layers at each variant."""
        found: dict[Variant, float] = {}
        for start in range(0, len(variants), LOT):
            lot = variants[start : start + LOT]
            times = self._timed({str(v): self._compiled(names, *v) for v in lot})
            found |= {v: times["whole"].p50 - times[str(v)].p50 for v in lot}
        least = CHANCE * self.whole_ms
        return {v: gain if abs(gain) > least else 0.0 for v, gain in _falling(found).items()}

    def _timed(self, sessions: Mapping[str, Session]) -> dict[str, Latency]:
        together = {"whole": self.whole, **sessions}
        rounds = paced(runners(together, self.inputs), ROUNDS)
        return time_sessions(together, self.inputs, rounds, quiet=self.quiet)

    def _compiled(self, names: Sequence[str], rank: int, form: Form) -> Session:
        points = {**self.points, **{name: exact(rank) for name in names}}
        forms = dict.fromkeys(points, Form.DENSE) | dict.fromkeys(names, form)
        execution = Execution(Profile("in place", points), forms, self.ranges)
        return self.engine.compile(execution.graph(self.artifact, self.bits))


def _falling(gains: Mapping[Variant, float]) -> dict[Variant, float]:
    """The gains nearest to these, in squares, that do not rise with the rank of a form."""
    from scipy.optimize import isotonic_regression

    found: dict[Variant, float] = {}
    for form in {form for _, form in gains}:
        mine = sorted(v for v in gains if v[1] is form)
        smooth = isotonic_regression([gains[v] for v in mine], increasing=False).x
        found |= dict(zip(mine, map(float, smooth), strict=True))
    return found


def _dense(alone: Sequence[LayerTiming], layer: str) -> float:
    return next(t.ms[Form.DENSE] for t in alone if t.layer == layer)


def _placed(alone: LayerTiming, dense: float, gains: Mapping[Variant, float]) -> LayerTiming:
    """The times of one rank, by what it gains in place; dense in all forms that were not tried."""
    ms = {form: max(dense - gains.get((alone.rank, form), 0.0), LEAST * dense) for form in alone.ms}
    return alone.model_copy(update={"ms": ms})
