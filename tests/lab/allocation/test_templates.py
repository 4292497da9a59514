"""Templates: who gets more, at every share."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.allocation.templates import EARLY, Place, ladder, template
from t3c.convert.config import Role

CNN = [
    Place("stem", Role.CONVOLUTION, 0.0),
    Place("early", Role.DEPTHWISE, 0.2),
    Place("middle", Role.CONVOLUTION, 0.5),
    Place("hidden", Role.LINEAR, 0.9),
    Place("head", Role.LINEAR, 1.0, last=True),
]
TRANSFORMER = [
    Place("table", Role.EMBEDDING, 0.0),
    Place("first attention", Role.PROJECTION, 0.1),
    Place("first mlp", Role.LINEAR, 0.2),
    Place("last attention", Role.PROJECTION, 0.9),
    Place("last mlp", Role.LINEAR, 1.0),
]

shares = st.floats(0.01, 1)
any_places = st.lists(
    st.builds(Place, st.text(), st.sampled_from(Role), st.floats(0, 1), st.booleans()),
    min_size=1,
    unique_by=lambda place: place.name,
)


@given(any_places, shares, shares)
def test_shares_rise_with_the_share_and_stay_in_range(
    places: list[Place], one: float, other: float
) -> None:
    low, high = (template(places, share) for share in sorted((one, other)))
    assert low.keys() == {place.name for place in places}
    for name in low:
        # Nobody gets less than was asked for.
        assert min(one, other) * (1 - 1e-12) <= low[name] <= high[name] <= 1


@given(any_places)
def test_a_share_of_one_is_all(places: list[Place]) -> None:
    assert set(template(places, 1.0).values()) == {1.0}


@given(st.floats(0.01, 0.95))
def test_convolutional(share: float) -> None:
    mine = template(CNN, share)
    assert mine["stem"] > mine["early"] > mine["middle"] == mine["hidden"] == share
    assert mine["head"] > mine["middle"]
    ends = template([Place("end", Role.CONVOLUTION, EARLY)], share)["end"]
    assert ends == pytest.approx(share, rel=1e-12)


@given(st.floats(0.01, 0.95))
def test_transformer(share: float) -> None:
    mine = template(TRANSFORMER, share)
    assert mine["first attention"] == mine["last attention"] == share
    assert share < mine["first mlp"] == mine["last mlp"]
    # Slightly higher: less than a classifier or an early convolution gets.
    assert mine["first mlp"] < template(CNN, share)["head"]


def test_one_projection_makes_a_transformer() -> None:
    conv = Place("patches", Role.CONVOLUTION, 0.0)
    attention = Place("attention", Role.PROJECTION, 1.0)
    assert template([conv, attention], 0.25)["patches"] == 0.25
    assert template([conv], 0.25)["patches"] > 0.25


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_ladder(count: int) -> None:
    rungs = ladder(count)
    assert len(rungs) == count
    assert rungs[-1] == 1
    if count > 1:
        assert rungs[0] == 1 / 8
        factors = [above / below for below, above in itertools.pairwise(rungs)]
        assert factors == pytest.approx([8 ** (1 / (count - 1))] * (count - 1))
