"""Placement: med is within the target by a bound, luck does not decide, int8 is beaten or left."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.compression.place import Candidate, Fate, Plain, falling, place
from t3c.errors import SpecError

COUNT = 40_000


def losing(share: float, count: int = COUNT) -> np.ndarray:
    """Losses (count,) of which a share is 1: the same samples first, as of nested profiles."""
    losses = np.zeros(count)
    losses[: round(share * count)] = 1
    return losses


def chain(*drops: float, base: float = 0.1) -> list[Candidate]:
    """Candidates whose time and size rise by tenths and whose losses are these above the base."""
    return [
        Candidate(f"c{i}", 1 + 0.1 * i, 100 + 10 * i, losing(base + drop))
        for i, drop in enumerate(drops)
    ]


REFERENCE = losing(0.1)


def test_med_is_the_fastest_within_the_target_and_tiny_within_five_times_it() -> None:
    found = place(chain(0.1, 0.015, 0.01, 0.004, 0.001, 0.0), REFERENCE, 0.005)
    names = ("tiny", "small", "med", "large", "max")
    assert found.profiles == tuple(zip(names, ("c1", "c2", "c3", "c4", "c5"), strict=True))
    fates = {row.candidate: row.fate for row in found.rows}
    assert fates["c0"] is Fate.LOSES


def test_a_bound_decides_not_a_mean() -> None:
    few = [replace(c, losses=c.losses[::400]) for c in chain(0.004, 0.0)]
    assert dict(place(few, REFERENCE[::400], 0.005).profiles)["max"] == "c1"
    assert "med" not in dict(place(few, REFERENCE[::400], 0.005).profiles)
    assert dict(place(chain(0.004, 0.0), REFERENCE, 0.01).profiles)["med"] == "c0"


def test_a_lucky_candidate_below_two_that_fail_does_not_become_med() -> None:
    found = place(chain(0.0, 0.02, 0.02, 0.001, 0.0), REFERENCE, 0.005)
    assert dict(found.profiles)["med"] == "c3"


def test_what_is_slower_than_a_larger_one_is_not_shipped() -> None:
    candidates = chain(0.002, 0.001, 0.0)
    slow = replace(candidates[0], p50=2.0)
    rows = place([slow, *candidates[1:]], REFERENCE, 0.005).rows
    assert rows[0].fate is Fate.SLOWER


def test_bytes_are_worth_a_little_time() -> None:
    top = Candidate("top", 1.0, 100.0, losing(0.1))
    for size, p50, shipped in ((85.0, 1.02, True), (85.0, 1.04, False), (95.0, 1.02, False)):
        found = place([Candidate("c", p50, size, losing(0.1)), top], REFERENCE, 0.005)
        assert ("c" in dict(found.profiles).values()) == shipped


def test_what_was_not_judged_is_not_shipped() -> None:
    candidates = chain(0.01, 0.004, 0.002, 0.0)
    rows = place([replace(candidates[0], losses=None), *candidates[1:]], REFERENCE, 0.005).rows
    assert (rows[0].fate, rows[0].drop, rows[0].profile) == (Fate.LOSES, None, None)
    assert rows[1].profile == "med"
    with pytest.raises(SpecError, match="the largest was not judged"):
        place([*candidates[:-1], replace(candidates[-1], losses=None)], REFERENCE, 0.005)


def test_plain_int8_has_to_be_beaten() -> None:
    candidates = chain(0.004, 0.002, 0.0)
    plain = Plain(p50=1.0, size=100.0, losses=losing(0.1))
    found = place(candidates, REFERENCE, 0.005, plain)
    assert dict(found.profiles) == {"max": "c2"}
    assert {row.fate for row in found.rows[:2]} == {Fate.NOT_WORTH}
    smaller = replace(plain, size=120.0)
    assert dict(place(candidates, REFERENCE, 0.005, smaller).profiles)["med"] == "c0"


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30))
def test_pooled_values_never_rise_and_keep_their_mean(values: list[float]) -> None:
    found = falling(values)
    assert len(found) == len(values)
    assert all(a >= b - 1e-12 for a, b in pairwise(found))
    assert np.mean(found) == pytest.approx(np.mean(values), abs=1e-9)


@given(
    st.lists(st.tuples(st.floats(0.5, 2), st.floats(0, 0.2)), min_size=1, max_size=12),
    st.floats(0.001, 0.1),
)
def test_profiles_are_in_order_and_max_is_always_there(
    drawn: list[tuple[float, float]], limit: float
) -> None:
    candidates = [
        Candidate(f"c{i}", p50, 10.0 + i, losing(0.1 + drop, 200))
        for i, (p50, drop) in enumerate(drawn)
    ]
    found = place(candidates, losing(0.1, 200), limit)
    order = {c.name: i for i, c in enumerate(candidates)}
    taken = [order[candidate] for _, candidate in found.profiles]
    assert taken == sorted(set(taken))
    assert found.profiles[-1] == ("max", candidates[-1].name)
    names = [name for name, _ in found.profiles]
    usual = ["tiny", "small", "med", "large", "max"]
    assert names == [name for name in usual if name in names]
    times = [candidates[i].p50 for i in taken]
    sizes = [candidates[i].size for i in taken]
    for here, above in pairwise(range(len(taken))):
        smaller = sizes[here] < 0.9 * sizes[above]
        assert times[here] <= times[above] * (1.03 if smaller else 1.01)
