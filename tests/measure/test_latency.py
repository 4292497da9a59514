from __future__ import annotations

import numpy as np
import pytest

from t3c.errors import SpecError
from t3c.measure.latency import interleave, quantiles


def test_quantiles_and_interval() -> None:
    times = np.random.default_rng(0).lognormal(size=400)
    found = quantiles(times)
    assert found.p50 == pytest.approx(np.median(times))
    assert found.p50 < found.p90 < found.p99
    assert found.ci95[0] < found.p50 < found.ci95[1]
    assert quantiles(times) == found
    with pytest.raises(SpecError):
        quantiles([])


def test_intervals_cover_the_median() -> None:
    rng = np.random.default_rng(1)
    intervals = [quantiles(rng.exponential(size=60)).ci95 for _ in range(150)]
    covered = np.mean([low <= np.log(2) <= high for low, high in intervals])
    assert covered > 0.88


def test_candidates_take_turns() -> None:
    calls: list[str] = []
    found = interleave({n: lambda n=n: calls.append(n) for n in "abc"}, rounds=30, warmup=2)
    assert {latency.samples for latency in found.values()} == {30}
    timed = [calls[6:][i : i + 3] for i in range(0, 90, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in timed)
    assert len({tuple(turn) for turn in timed}) > 1
