from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t3c.errors import DisturbedError, SpecError
from t3c.measure.latency import interleave, level, paced, quantiles, sample, summarize
from t3c.measure.quiet import Quiet, Reading
from t3c.spec import Latency


class Machine:
    """A machine whose time only passes in calls, pauses included, and that others may use."""

    def __init__(self, foreign: Iterator[float] | None = None) -> None:
        self.now = self.own = self.busy = 0.0
        self.share = foreign or repeat(0.0)
        self.pauses: list[float] = []

    def call(self, seconds: Callable[[], float]) -> Callable[[], None]:
        def run() -> None:
            took = seconds()
            self.now += took
            self.own += took
            self.busy += took

        return run

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def read(self) -> Reading:
        return Reading(self.now, self.own, self.busy)

    def read_disturbed(self) -> Reading:
        """Others have used the next share of a core since the last stretch began or ended."""
        last = getattr(self, "_last", 0.0)
        self.busy += (self.now - last) * next(self.share)
        self._last = self.now
        return self.read()

    def quiet(self, **settings: object) -> Quiet:
        return Quiet(read=self.read_disturbed, sleep=self.sleep, **settings)


def shares(*foreign: float) -> Iterator[float]:
    """The same for the start and the end of each stretch, then nothing."""
    pairs = chain.from_iterable((0.0, share) for share in foreign)
    return chain(pairs, repeat(0.0))


@settings(max_examples=50)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40), st.integers(1, 6))
def test_quantiles_rise_and_stay_within_the_samples(times: list[float], blocks: int) -> None:
    found = quantiles(times, blocks=[i % blocks for i in range(len(times))])
    assert min(times) <= found.p50 <= found.p90 <= found.p99 <= max(times)
    assert min(times) <= found.ci95[0] <= found.ci95[1] <= max(times)
    assert found.samples == len(times)


def test_quantiles_and_interval() -> None:
    times = np.random.default_rng(0).lognormal(size=400)
    found = quantiles(times)
    assert found.p50 == pytest.approx(np.median(times))
    assert found.p50 < found.p90 < found.p99
    assert found.ci95[0] < found.p50 < found.ci95[1]
    assert found.spread == 0
    assert quantiles(times) == found
    with pytest.raises(SpecError):
        quantiles([])
    with pytest.raises(SpecError, match="400"):
        quantiles(times, blocks=[0])


def test_a_latency_is_asked_by_quantile() -> None:
    latency = Latency(1, 2, 3, (1, 1), 10)
    assert [latency.at(q) for q in ("p50", "p90", "p99")] == [1, 2, 3]
    with pytest.raises(SpecError, match="p50, p90 and p99"):
        latency.at("p95")
    for spread in (-0.1, float("nan")):
        with pytest.raises(SpecError, match="spread"):
            Latency(1, 2, 3, (1, 1), 10, spread)


@pytest.mark.parametrize("count", [7, 24, 101])
def test_the_interval_is_that_of_samples_drawn_again(count: int) -> None:
    times = np.random.default_rng(count).lognormal(size=count)
    draws = np.random.default_rng(1).choice(times, size=(20_000, count))
    expected = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    found = np.mean([quantiles(times, seed).ci95 for seed in range(20)], axis=0)
    assert found == pytest.approx(expected, rel=0.03)


def test_the_interval_is_that_of_blocks_drawn_again() -> None:
    rng = np.random.default_rng(2)
    labels = np.repeat(np.arange(8), [10, 30, 20, 20, 15, 25, 20, 20])
    times = 10 + rng.normal(size=8)[labels] + rng.normal(0, 0.3, len(labels))
    medians = []
    for _ in range(4000):
        drawn = np.concatenate([times[labels == label] for label in rng.integers(8, size=8)])
        medians.append(np.median(rng.choice(drawn, len(times))))
    expected = np.quantile(medians, [0.025, 0.975])
    found = np.mean([quantiles(times, seed, labels).ci95 for seed in range(20)], axis=0)
    assert found == pytest.approx(expected, abs=0.05)
    low, high = quantiles(times).ci95
    assert found[1] - found[0] > 2 * (high - low)


def test_intervals_cover_the_median() -> None:
    rng = np.random.default_rng(1)
    intervals = [quantiles(rng.exponential(size=60)).ci95 for _ in range(100)]
    covered = np.mean([low <= np.log(2) <= high for low, high in intervals])
    assert covered > 0.88


def test_intervals_cover_the_median_though_the_machine_drifts() -> None:
    rng = np.random.default_rng(3)
    labels = np.repeat(np.arange(10), 20)
    honest, naive = [], []
    for _ in range(100):
        times = 10 + rng.normal(0, 0.3, 10)[labels] + rng.normal(0, 0.3, 200)
        honest.append(quantiles(times, blocks=labels).ci95)
        naive.append(quantiles(times).ci95)
    assert np.mean([low <= 10 <= high for low, high in honest]) > 0.85
    assert np.mean([low <= 10 <= high for low, high in naive]) < 0.6


def test_many_samples_are_drawn_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    times = np.random.default_rng(4).lognormal(size=300)
    labels = np.arange(300) // 30
    at_once = quantiles(times, blocks=labels)
    monkeypatch.setattr("t3c.measure.latency.CHUNK", 1000)
    assert quantiles(times, blocks=labels) == at_once


def test_spread_is_of_block_medians() -> None:
    times = [9.0, 9.0, 50.0, 10.0, 10.0, 10.0, 12.0, 12.0, 1.0]
    labels = [5, 5, 5, 1, 1, 1, 7, 7, 7]
    assert quantiles(times, blocks=labels).spread == pytest.approx(12 / 10 - 1)
    assert quantiles(times, blocks=[3] * 9).spread == 0


def test_candidates_take_turns() -> None:
    calls: list[str] = []
    ticks: list[tuple[int, int]] = []
    found = interleave(
        {n: lambda n=n: calls.append(n) for n in "abc"},
        rounds=30,
        tick=lambda done, rounds: ticks.append((done, rounds)),
    )
    assert {latency.samples for latency in found.values()} == {30}
    last = calls[-180:]  # each call that is timed has one before it that is not
    assert last[::2] == last[1::2]
    timed = [last[i : i + 6 : 2] for i in range(0, 180, 6)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in timed)
    assert len({tuple(turn) for turn in timed}) > 1
    assert ticks == [(done, 30) for done in range(1, 31)]
    with pytest.raises(SpecError, match="no latency samples"):
        interleave({"a": lambda: None}, rounds=0)


def test_candidates_are_timed_warm() -> None:
    machine = Machine()
    cold = chain([2.0, 0.5, 0.1, 0.05], repeat(0.01))
    candidates = {
        "cold": machine.call(lambda: next(cold)),
        "warm": machine.call(lambda: 0.02),
    }
    found = interleave(candidates, rounds=50, clock=lambda: machine.now)
    assert found["cold"].p99 == pytest.approx(10)
    assert found["warm"].p50 == pytest.approx(20)


@pytest.mark.parametrize(
    ("seconds", "blocks"),
    [(0.1, 10), (0.03, 4), (0.02, 4), (0.01, 4), (0.004, 2), (0.003, 1), (0.0001, 1), (3.0, 100)],
)
def test_rounds_are_done_in_judged_blocks(seconds: float, blocks: int) -> None:
    machine = Machine()
    quiet = machine.quiet()
    call = machine.call(lambda: seconds / 2)  # two of them a round
    found = interleave({"a": call}, 100, quiet=quiet, clock=lambda: machine.now)
    assert len(quiet.kept) == pytest.approx(blocks, abs=blocks // 10)
    assert found["a"].samples == 100


def test_blocks_of_several_runs_are_summarized_together() -> None:
    machine = Machine()
    took = chain(repeat(0.1, 10 + 2 * 20), repeat(0.2))
    candidates = {"a": machine.call(lambda: next(took))}
    first = sample(candidates, 20, clock=lambda: machine.now)["a"]
    second = sample(candidates, 20, clock=lambda: machine.now)["a"]
    assert sum(map(len, first)) == sum(map(len, second)) == 20
    found = summarize(first + second)
    assert found.samples == 40
    assert found.p50 == pytest.approx(150)
    assert found.p99 == pytest.approx(200)
    assert summarize(first).p99 == pytest.approx(100)


def test_a_change_between_blocks_shows_in_the_spread() -> None:
    machine = Machine()
    took = chain(repeat(0.1, 10 + 2 * 30), repeat(0.11))
    call = machine.call(lambda: next(took))
    found = interleave({"a": call}, 40, clock=lambda: machine.now)["a"]
    assert found.p50 == pytest.approx(100)
    assert found.spread == pytest.approx(0.1)


def test_disturbed_blocks_are_repeated() -> None:
    # 10 calls a block after 10 to warm up: blocks 2 and 3 take twice as long and are disturbed.
    machine = Machine(shares(0, 1.2, 1.2))
    took = chain(repeat(0.1, 10 + 10), repeat(0.2, 10), repeat(0.1))
    ticks: list[int] = []
    quiet = machine.quiet()
    call = machine.call(lambda: next(took))
    found = interleave(
        {"a": call}, 40, quiet=quiet, tick=lambda done, _: ticks.append(done),
        clock=lambda: machine.now,
    )  # fmt: skip
    assert found["a"].samples == 40
    assert found["a"].p99 == pytest.approx(100)
    assert machine.pauses == [0.2, 0.4]
    assert [verdict.reason for verdict in quiet.thrown] == ["other processes used 1.20 cores"] * 2
    assert quiet.conditions.repeated == 2
    assert not quiet.conditions.disturbed
    assert ticks[-1] == 40
    assert sorted(set(ticks)) == list(range(1, 41))


def test_a_slow_stretch_is_repeated_where_nothing_else_is_known() -> None:
    machine = Machine()
    took = chain(repeat(0.05, 10 + 2 * 20), repeat(0.065, 16), repeat(0.05))
    quiet = Quiet(read=lambda: Reading(machine.now, 0.0), sleep=machine.sleep)
    call = machine.call(lambda: next(took))
    found = interleave({"a": call}, 50, quiet=quiet, clock=lambda: machine.now)
    assert found["a"].p90 == pytest.approx(50)
    assert quiet.conditions.repeated == 1
    assert quiet.conditions.foreign is None
    assert quiet.thrown[0].reason == "all that is measured ran 1.30 times slower"


def test_one_slower_candidate_is_a_finding_not_a_disturbance() -> None:
    machine = Machine()
    took = chain(repeat(0.1, 10 + 10), repeat(0.2))
    quiet = machine.quiet()
    candidates = {
        "changes": machine.call(lambda: next(took)),
        **{name: machine.call(lambda: 0.1) for name in "ab"},
    }
    interleave(candidates, 30, quiet=quiet, clock=lambda: machine.now)
    assert not quiet.thrown


def test_a_busy_machine_is_refused_or_recorded() -> None:
    machine = Machine(shares(*[0.5] * 1000))
    quiet = machine.quiet(retries=3)
    call = machine.call(lambda: 0.1)
    with pytest.raises(DisturbedError, match=r"used 0\.50 of a core, after 3 repeats.*--busy"):
        interleave({"a": call}, 40, quiet=quiet, clock=lambda: machine.now)
    assert len(quiet.thrown) == 3

    machine = Machine(shares(*[0.5] * 1000))
    quiet = machine.quiet(retries=3, refuse=False)
    candidates = {"a": machine.call(lambda: 0.1)}
    found = interleave(candidates, 40, quiet=quiet, clock=lambda: machine.now)
    assert found["a"].samples == 40
    assert quiet.conditions.repeated == 3
    assert quiet.conditions.disturbed
    assert quiet.conditions.foreign == pytest.approx(0.5)
    assert quiet.conditions.reason == "other processes used 0.50 of a core"
    interleave(candidates, 40, quiet=quiet, clock=lambda: machine.now)
    assert quiet.conditions.repeated == 3


def test_lots_are_brought_to_one_speed() -> None:
    """Candidates of a slow hour and of a fast one compare by what both hours had in common."""
    slow = {"a": [[2.0, 2.0]], "b": [[4.0]], "late": [[6.0, 6.0]]}
    fast = {"a": [[1.0], [1.0]], "b": [[2.0]], "early": [[3.0]]}
    found = level([slow, fast], ["a", "b"])
    medians = {name: float(np.median(np.concatenate(blocks))) for name, blocks in found.items()}
    assert medians["late"] == pytest.approx(medians["early"])
    assert medians["late"] / medians["a"] == pytest.approx(3)
    assert medians["b"] / medians["a"] == pytest.approx(2)
    assert [len(block) for block in found["a"]] == [2, 1, 1]
    assert level([], ["a"]) == {}


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-4, 200), (0.01, 100), (1.0, 10)])
def test_short_calls_are_timed_more_often(seconds: float, rounds: int) -> None:
    machine = Machine()
    calls = {"a": machine.call(lambda: seconds / 2)}
    found = paced(calls, 10, seconds=1.0, clock=lambda: machine.now)
    assert found == pytest.approx(rounds, rel=0.01)
