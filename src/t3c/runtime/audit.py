"""Checking the promise: more budget is never worse, and a budget that can be met is met."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from t3c.errors import SpecError
from t3c.runtime.measured import time_sessions
from t3c.runtime.runtime import Runtime
from t3c.spec import Budget, Latency


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    `speed` is the time profiles take now over what they took when calibrated (p50, the median over
    profiles). Budgets are judged on live times; where the machine runs slower than it did, that
    factor is taken out first, since no choice could have known it.
    """

    budgets: int
    monotone_violations: int
    budget_violations: int
    latency_order_violations: int
    speed: float | None

    @property
    def ok(self) -> bool:
        """Whether the promise held that does not depend on the machine's mood."""
        return self.monotone_violations == 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def audit(runtime: Runtime, budgets: int, rounds: int = 100, seed: int = 0) -> Audit:
    """Draw budgets, loosen each, and compare the choices with one another and with live times."""
    if budgets < 1:
        raise SpecError(f"budgets must be at least 1, got {budgets}")
    live = measure(runtime, rounds)
    table = runtime.table.profiles if runtime.table else {}
    speed = None
    if table:
        speed = float(np.median([live[name].p50 / table[name].p50 for name in live]))
    monotone = over = 0
    for tight, loose in draw_pairs(runtime, budgets, seed):
        monotone += not in_order(runtime, tight, loose)
        over += _misses(runtime, tight, live, max(speed or 1.0, 1.0))
    names = [profile.name for profile in runtime.chain]
    order = sum(
        live[above].ci95[1] < live[below].ci95[0] for below, above in itertools.pairwise(names)
    )
    return Audit(budgets, monotone, over, order, speed)


def measure(runtime: Runtime, rounds: int) -> dict[str, Latency]:
    """Live latencies of all profiles at batch 1, in turns."""
    sessions = {p.name: runtime.session(p.name) for p in runtime.chain}
    zeros = [
        np.zeros([size or 1 for size in entry.shape], dtype=entry.dtype) for entry in runtime.inputs
    ]
    return time_sessions(sessions, zeros, rounds)


def draw_pairs(runtime: Runtime, count: int, seed: int) -> list[tuple[Budget, Budget]]:
    """Random budgets over the range the profiles span, each with a looser one beside it.

    Every other pair is adjacent: the second is looser by less than a thousandth.
    """
    rng = np.random.default_rng(seed)
    latencies = [c.latency_ms for c in runtime.candidates if c.latency_ms is not None] or [1.0]
    sizes = [c.size_mb for c in runtime.candidates]

    def limit(values: list[float]) -> float | None:
        if rng.random() < 0.25:
            return None
        return float(np.exp(rng.uniform(np.log(min(values) * 0.8), np.log(max(values) * 1.25))))

    pairs = []
    for index in range(count):
        most = 1e-3 if index % 2 else 0.5
        tight = Budget(limit(latencies), limit(sizes))
        loose = Budget(
            *(_loosened(value, rng, most) for value in (tight.latency_ms, tight.size_mb))
        )
        pairs.append((tight, loose))
    return pairs


def in_order(runtime: Runtime, tight: Budget, loose: Budget) -> bool:
    """Whether the looser budget got a profile at least as large, of no more certified drift."""
    assert tight <= loose
    chosen = [runtime.choose(budget).profile for budget in (tight, loose)]
    small, large = (runtime.chain[name] for name in chosen)
    drifts = {c.profile: c.drift for c in runtime.candidates}
    a, b = drifts[small.name], drifts[large.name]
    return small <= large and (a is None or b is None or b <= a)


def _loosened(value: float | None, rng: np.random.Generator, most: float) -> float | None:
    return None if value is None else value * (1 + float(rng.uniform(0, most)))


def _misses(runtime: Runtime, budget: Budget, live: dict[str, Latency], speed: float) -> bool:
    """Whether the choice is over the limits while some profile is within them."""

    def within(profile: str) -> bool:
        latency, size, _ = budget.limits
        kept = live[profile].ci95[0] / speed <= latency
        return kept and runtime.artifact.manifest.size_bytes(profile) / 1e6 <= size

    return not within(runtime.choose(budget).profile) and any(map(within, live))
