"""Latencies that can be compared: warm, interleaved round-robin in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from t3c.errors import SpecError
from t3c.spec import Latency

BOOTSTRAPS = 2000


def quantiles(times_ms: Sequence[float], seed: int = 0) -> Latency:
    """p50, p90, p99 of the samples and a bootstrap interval (95%, B=2000) of the p50."""
    if not len(times_ms):
        raise SpecError("no latency samples")
    samples = np.asarray(times_ms, dtype=np.float64)
    rng = np.random.default_rng(seed)
    draws = rng.choice(samples, size=(BOOTSTRAPS, len(samples)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    p50, p90, p99 = np.quantile(samples, [0.5, 0.9, 0.99])
    return Latency(float(p50), float(p90), float(p99), (float(low), float(high)), len(samples))


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 20,
) -> dict[str, Latency]:
    """Time each candidate once a round, in an order drawn anew each round.

    A disturbance then falls on all of them alike, and none always runs in the wake of another.
    """
    for call in candidates.values():
        for _ in range(warmup):
            call()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            call = candidates[name]
            start = time.perf_counter_ns()
            call()
            times[name].append((time.perf_counter_ns() - start) / 1e6)
    return {name: quantiles(samples) for name, samples in times.items()}
