"""Checking the promise: more budget is never worse, and a budget that can be met is met."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from t3c.device.execution import example_inputs
from t3c.device.measured import runners
from t3c.engines.protocol import Array
from t3c.errors import DataError, SpecError
from t3c.measure.latency import interleave, paced
from t3c.measure.pinning import pinned
from t3c.measure.quiet import Conditions, Quiet, settle, watchful
from t3c.runtime.runtime import Runtime
from t3c.spec import Budget, Latency, Profile

ROUNDS = 120
PROMISES = ("rank_and_bits", "size", "cost", "drift", "accuracy")
Tick = Callable[[int, int], object]


@dataclass(frozen=True)
class Audit:
    """The figures of an audit.

    `monotone` counts the pairs of budgets, one looser than the other, that broke each promise: a
    profile no smaller in rank and bits and in size, of no more certified drift, that takes no less
    (calibrated p50, beyond the intervals) and is no less accurate (beyond a paired 95% interval,
    where there are labels). `reachable` are the budgets that some profile keeps by its live p50;
    `over` is the share of those whose choice did not, at its live p50 and p90. `speed` is the
    time profiles take now over what they took when calibrated (p50, the median over profiles).
    """

    budgets: int
    monotone_violations: int
    budget_violations: int
    latency_order_violations: int
    monotone: dict[str, int]
    reachable: int
    over: dict[str, float | None]
    live: dict[str, Latency]
    speed: float | None = None
    accuracy: dict[str, float] = field(default_factory=dict)
    conditions: Conditions | None = None

    @property
    def ok(self) -> bool:
        """Whether the promise held that does not depend on the machine's mood."""
        return self.monotone_violations == 0


def audit(
    runtime: Runtime,
    budgets: int,
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
    data: tuple[Array, Array] | None = None,
    busy: bool = False,
    tick: Tick = lambda done, rounds: None,
) -> Audit:
    """Draw budgets, loosen each, and compare the choices with one another and with live times.

    `data` are samples and their labels, for accuracy. A machine that is `busy` is measured
    anyway; otherwise it is an error.
    """
    if budgets < 1:
        raise SpecError(f"budgets must be at least 1, got {budgets}")
    quiet = watchful(busy)
    settle(quiet)
    right = {} if data is None else correct(runtime, *data)
    live = measure(runtime, rounds, quiet=quiet, tick=tick)
    pairs = draw_pairs(runtime, budgets, seed)
    broken = [broken_promises(runtime, tight, loose, right) for tight, loose in pairs]
    reachable = [tight for tight, _ in pairs if _reachable(runtime, tight, live)]
    missed = {
        name: over(runtime, reachable, live, name) if reachable else None for name in ("p50", "p90")
    }
    return Audit(
        budgets=budgets,
        monotone_violations=sum(map(bool, broken)),
        budget_violations=round((missed["p50"] or 0.0) * len(reachable)),
        latency_order_violations=len(out_of_order(runtime, live)),
        monotone={name: sum(name in found for found in broken) for name in PROMISES},
        reachable=len(reachable),
        over=missed,
        live=live,
        speed=_speed(runtime, live),
        accuracy={name: float(hits.mean()) for name, hits in right.items()},
        conditions=quiet.conditions,
    )


def measure(
    runtime: Runtime,
    rounds: int,
    *,
    quiet: Quiet | None = None,
    tick: Tick = lambda done, rounds: None,
) -> dict[str, Latency]:
    """Live latencies of all profiles at batch 1, in turns."""
    with pinned(runtime.engine.threads):
        sessions = {p.name: runtime.session(p.name) for p in runtime.chain}
        calls = runners(sessions, example_inputs(runtime.artifact))
        return interleave(calls, paced(calls, rounds), quiet=quiet, tick=tick)


def correct(runtime: Runtime, samples: Array, labels: Array) -> dict[str, Array]:
    """Which samples each profile answers rightly."""
    arrays = runtime.check(samples)[0]
    if labels.shape != arrays.shape[:1]:
        raise DataError(f"samples of shape {arrays.shape} have labels of shape {labels.shape}")
    found = {}
    for profile in runtime.chain:
        session = runtime.session(profile.name)
        answers = [session.run([sample[None]])[0].argmax(axis=-1)[0] for sample in arrays]
        found[profile.name] = np.asarray(answers) == labels
    return found


def draw_pairs(runtime: Runtime, count: int, seed: int) -> list[tuple[Budget, Budget]]:
    """Random budgets over the range the profiles span, each with a looser one beside it.

    Every other pair is adjacent: the second is looser by less than a thousandth.
    """
    rng = np.random.default_rng(seed)
    known = [latency for c in runtime.candidates if (latency := c.latency_ms()) is not None]
    latencies, sizes = known or [1.0], [c.size_mb for c in runtime.candidates]

    def limit(values: list[float]) -> float | None:
        if rng.random() < 0.25:
            return None
        return float(np.exp(rng.uniform(np.log(min(values) * 0.8), np.log(max(values) * 1.25))))

    pairs = []
    for index in range(count):
        most = 1e-3 if index % 2 else 0.5
        tight = Budget(limit(latencies), limit(sizes))
        latency, size = (_loosened(v, rng, most) for v in (tight.latency_ms, tight.size_mb))
        loose = Budget(latency, size)
        pairs.append((tight, loose))
    return pairs


def broken_promises(
    runtime: Runtime, tight: Budget, loose: Budget, right: Mapping[str, Array] | None = None
) -> list[str]:
    """Which promises the choice for the looser budget breaks against that for the tighter."""
    assert tight <= loose
    small, large = (runtime.chain[runtime.choose(budget).profile] for budget in (tight, loose))
    if small.name == large.name:
        return []
    kept = _kept(runtime, small, large, right or {})
    return [name for name in PROMISES if not kept[name]]


def _kept(
    runtime: Runtime, small: Profile, large: Profile, right: Mapping[str, Array]
) -> dict[str, bool]:
    """Return of each promise whether it is kept on the way to a larger profile."""
    candidates = {c.profile: c for c in runtime.candidates}
    below, above = candidates[small.name], candidates[large.name]
    sizes = [runtime.artifact.manifest.size_bytes(p.name) for p in (small, large)]
    times = below.latency, above.latency
    drifts = below.drift, above.drift
    gained = right[large.name] - right[small.name].astype(float) if right else np.zeros(1)
    error = gained.std() / np.sqrt(len(gained))
    return {
        "rank_and_bits": small <= large,
        "size": sizes[0] <= sizes[1],
        "cost": times[0] is None or times[1] is None or times[0].ci95[0] <= times[1].ci95[1],
        "drift": drifts[0] is None or drifts[1] is None or drifts[1] <= drifts[0],
        "accuracy": bool(gained.mean() + 1.96 * error >= 0),
    }


def out_of_order(runtime: Runtime, live: Mapping[str, Latency]) -> list[tuple[str, str]]:
    """Pairs of profiles of which the larger is faster, beyond their intervals."""
    names = [profile.name for profile in runtime.chain]
    return [
        (below, above)
        for below, above in itertools.combinations(names, 2)
        if live[above].ci95[1] < live[below].ci95[0]
    ]


def _loosened(value: float | None, rng: np.random.Generator, most: float) -> float | None:
    return None if value is None else value * (1 + float(rng.uniform(0, most)))


def _within(runtime: Runtime, budget: Budget, live: Latency, profile: str, quantile: str) -> bool:
    latency, size, _ = budget.limits
    kept = runtime.artifact.manifest.size_bytes(profile) / 1e6 <= size
    return kept and live.at(quantile) <= latency


def _reachable(runtime: Runtime, budget: Budget, live: Mapping[str, Latency]) -> bool:
    return any(_within(runtime, budget, live[name], name, "p50") for name in live)


def over(
    runtime: Runtime, budgets: list[Budget], live: Mapping[str, Latency], quantile: str
) -> float:
    """The share of budgets whose choice is over them."""
    chosen = [runtime.choose(budget).profile for budget in budgets]
    kept = [
        _within(runtime, budget, live[name], name, quantile)
        for budget, name in zip(budgets, chosen, strict=True)
    ]
    return 1 - sum(kept) / len(kept)


def _speed(runtime: Runtime, live: Mapping[str, Latency]) -> float | None:
    table = runtime.table.profiles if runtime.table else {}
    ratios = [live[name].p50 / table[name].p50 for name in live if name in table]
    return float(np.median(ratios)) if ratios else None
