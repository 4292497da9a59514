from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.errors import SpecError
from t3c.quant.policy import RankTiedBits

policies = st.builds(
    RankTiedBits,
    a=st.floats(0, 1e300),
    b=st.floats(-1e300, 1e300) | st.floats(-10, 10),
    highest=st.integers(2, 8),
    offsets=st.lists(st.integers(-3, 3), max_size=3).map(tuple),
)
ranks = st.integers(1, 10**6)


@given(policies, ranks, ranks, st.sets(st.integers(2, 8), min_size=1).map(tuple))
def test_more_rank_never_has_fewer_bits(
    policy: RankTiedBits, one: int, other: int, choices: tuple[int, ...]
) -> None:
    below, above = sorted((one, other))
    assert 2 <= policy.bits(below) <= policy.bits(above) <= policy.highest
    assert policy.allowed(below, choices) <= policy.allowed(above, choices)


@given(st.floats(0, 3), st.floats(-2, 8), ranks)
def test_the_map_is_the_papers(a: float, b: float, rank: int) -> None:
    policy = RankTiedBits(a, b, 7)
    assert policy.bits(rank) == max(2, min(7, math.floor(a * math.log(rank) + b)))


def test_bits_by_hand() -> None:
    policy = RankTiedBits(highest=5, offsets=(1, 0, -9))
    assert [policy.bits(rank) for rank in (1, 2, 3, 7, 8, 20, 21, 10**6)] == [
        2,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
    ]
    assert policy.allowed(8, (3, 8, 2)) == 3
    assert policy.allowed(8, (2, 4, 8)) == 4
    assert policy.allowed(8, (8, 6)) == 6


@pytest.mark.parametrize(
    "wrong", [{"a": -0.1}, {"a": math.nan}, {"b": math.inf}, {"highest": 1}, {"highest": 9}]
)
def test_policies_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(SpecError):
        RankTiedBits(**wrong)  # type: ignore[arg-type]


def test_ranks_and_choices_that_cannot_be() -> None:
    with pytest.raises(SpecError, match="rank"):
        RankTiedBits().bits(0)
    with pytest.raises(SpecError, match="choose"):
        RankTiedBits().allowed(4, ())


def test_the_policy_needs_no_torch() -> None:
    code = "import sys, t3c.quant.policy; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
