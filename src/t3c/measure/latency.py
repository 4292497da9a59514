"""Latencies that can be compared: warm, interleaved round-robin in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from t3c.errors import SpecError
from t3c.measure.quiet import Quiet, slowdown
from t3c.measure.steady import warm_up
from t3c.spec import Latency

BOOTSTRAPS = 2000
CHUNK = 1_000_000
BLOCKS = 4
BLOCK_SECONDS = 1.0
LEAST_BLOCK_SECONDS = 0.25
LOT_SECONDS = 5.0  # that times of a lot of short calls are taken over

Floats = NDArray[np.float64]
Blocks = list[list[float]]
Name = TypeVar("Name")


def quantiles(
    times_ms: Sequence[float],
    seed: int = 0,
    blocks: Sequence[int] | None = None,
) -> Latency:
    """p50, p90, p99 of the samples and a bootstrap interval (95%, B=2000) of the p50.

    `blocks` tells which block of time each sample is from. Samples of one block are alike, so
    with 4 or more of them the bootstrap draws blocks, then samples from these.
    """
    if not len(times_ms):
        raise SpecError("no latency samples")
    samples = np.asarray(times_ms, dtype=np.float64)
    labels = np.zeros(len(samples), dtype=np.int64)
    if blocks is not None:
        labels = np.unique(np.asarray(blocks), return_inverse=True)[1]
    if len(labels) != len(samples):
        raise SpecError(f"{len(samples)} latency samples, but the block of {len(labels)}")
    medians = _resampled_medians(samples, labels, np.random.default_rng(seed))
    low, high = np.quantile(medians, [0.025, 0.975])
    p50, p90, p99 = np.quantile(samples, [0.5, 0.9, 0.99])
    of_blocks = [np.median(samples[labels == label]) for label in range(labels.max() + 1)]
    spread = max(0.0, max(of_blocks) / p50 - 1)
    return Latency(
        float(p50), float(p90), float(p99), (float(low), float(high)), len(samples), float(spread)
    )


def _resampled_medians(samples: Floats, labels: NDArray[Any], rng: np.random.Generator) -> Floats:
    """Medians of BOOTSTRAPS resamples, drawn in chunks."""
    order = np.argsort(samples)
    ranked, owner, count = samples[order], labels[order], len(samples)
    below, above = _middle_ranks(count, rng)
    blocks = int(labels.max()) + 1
    medians = np.empty(BOOTSTRAPS)
    if blocks < BLOCKS:
        medians[:] = (ranked[(below * count).astype(int)] + ranked[(above * count).astype(int)]) / 2
        return medians
    chunk = max(1, CHUNK // count)
    for part in (slice(start, start + chunk) for start in range(0, BOOTSTRAPS, chunk)):
        drawn = rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=len(medians[part]))
        weight = np.cumsum(drawn[:, owner], axis=1)
        at = [
            np.sum(weight <= (middle[part] * weight[:, -1])[:, None], axis=1)
            for middle in (below, above)
        ]
        medians[part] = np.mean(ranked[at], axis=0)
    return medians


def _middle_ranks(count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Where, from 0 to 1, the one or two middle ones of `count` uniform draws lie.

    Order statistics of uniform draws are Beta distributed, so the draws need not be made.
    """
    half = count // 2
    if count % 2:
        middle = rng.beta(half + 1, half + 1, BOOTSTRAPS)
        return middle, middle
    below = rng.beta(half, half + 1, BOOTSTRAPS)
    # The next one is the least of the `half` draws that are uniform above it.
    return below, below + (1 - below) * rng.beta(1, half, BOOTSTRAPS)


def paced(
    candidates: Mapping[Name, Callable[[], object]],
    rounds: int,
    *,
    seconds: float = LOT_SECONDS,
    most: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """At least `rounds`, and as many more, up to `most` times, as some seconds of timing take."""
    for call in candidates.values():
        call()  # the first one may compile
    begin = clock()
    for call in candidates.values():
        call()
        call()
    one = max(clock() - begin, 1e-6)
    return max(rounds, min(most * rounds, round(seconds / one)))


def interleave(
    candidates: Mapping[Name, Callable[[], object]],
    rounds: int,
    *,
    quiet: Quiet | None = None,
    tick: Callable[[int, int], object] = lambda done, rounds: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, Latency]:
    """The latency of each candidate, timed in turns as by `sample`."""
    sampled = sample(candidates, rounds, quiet=quiet, tick=tick, clock=clock)
    return {name: summarize(blocks) for name, blocks in sampled.items()}


def summarize(blocks: Blocks) -> Latency:
    """The latency of samples in blocks of time."""
    labels = [label for label, block in enumerate(blocks) for _ in block]
    return quantiles([ms for block in blocks for ms in block], blocks=labels)


def level(lots: Sequence[Mapping[Name, Blocks]], common: Sequence[Name]) -> dict[Name, Blocks]:
    """Lots measured at different times as one, brought to one speed of the machine.

    The candidates in `common` are in every lot: how long they took in one, over what they took in
    all, is taken out of that lot.
    """
    if not lots:
        return {}
    medians = [{n: float(np.median(np.concatenate(lot[n]))) for n in common} for lot in lots]
    whole = {n: float(np.median([median[n] for median in medians])) for n in common}
    found: dict[Name, Blocks] = {}
    for lot, median in zip(lots, medians, strict=True):
        speed = float(np.median([median[n] / whole[n] for n in common]))
        for name, blocks in lot.items():
            scaled = [[ms / speed for ms in block] for block in blocks]
            found.setdefault(name, []).extend(scaled)
    return found


def sample(
    candidates: Mapping[Name, Callable[[], object]],
    rounds: int,
    *,
    quiet: Quiet | None = None,
    tick: Callable[[int, int], object] = lambda done, rounds: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, Blocks]:
    """Milliseconds of each candidate, once a round, in an order drawn anew each round.

    A disturbance then falls on all of them alike, and none always runs in the wake of another. A
    call that is not timed goes before each that is: the caches are then its own, as in service.
    Rounds are done in blocks of about a second; those that `quiet` finds disturbed are repeated.
    """
    for call in candidates.values():
        warm_up(call, clock=clock)
    kept: list[dict[Name, list[float]]] = []
    order = list(candidates)
    rng = np.random.default_rng(0)
    done = repeated = 0
    while done < rounds:
        start = quiet.read() if quiet else None
        block: dict[Name, list[float]] = {name: [] for name in candidates}
        begin, taken = clock(), 0
        while not _complete(clock() - begin, taken, done, rounds):
            rng.shuffle(order)
            for name in order:
                call = candidates[name]
                call()
                before = clock()
                call()
                block[name].append((clock() - before) * 1e3)
            taken += 1
            tick(done + taken, rounds)
        if quiet and start:
            verdict = quiet.judge(start, slowdown(block, kept))
            if not quiet.keeps(verdict, repeated):
                repeated += 1
                continue
        kept.append(block)
        done += taken
    return {name: [block[name] for block in kept] for name in candidates}


def _complete(seconds: float, taken: int, done: int, rounds: int) -> bool:
    """Whether a block is long enough: BLOCK_SECONDS, less if the run would not fill 4 of these.

    The last block takes a rest too short to be judged by itself.
    """
    left = rounds - done - taken
    if not taken or not left:
        return not left
    pace = seconds / taken
    length = min(BLOCK_SECONDS, max(LEAST_BLOCK_SECONDS, pace * rounds / BLOCKS))
    return seconds >= length and pace * left >= length / 2
