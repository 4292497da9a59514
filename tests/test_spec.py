from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.errors import BudgetError, SpecError
from t3c.spec import (
    Budget,
    Factorization,
    Form,
    ImageSpec,
    Kind,
    LayerPoint,
    LayerSpec,
    Profile,
    ProfileChain,
    check_menu,
)

limits = st.none() | st.floats(0.1, 10)
budgets = st.builds(Budget, limits, limits, limits)


@given(budgets, budgets, budgets)
def test_budgets_are_partially_ordered(a: Budget, b: Budget, c: Budget) -> None:
    assert a <= a
    if a <= b and b <= a:
        assert a.limits == b.limits
    if a <= b and b <= c:
        assert a <= c
    assert a <= Budget()


def test_budgets_that_do_not_compare() -> None:
    a, b = Budget(latency_ms=1), Budget(size_mb=1)
    assert not a <= b
    assert not b <= a


@pytest.mark.parametrize("name", ["latency_ms", "size_mb", "energy_mj", "drift"])
def test_impossible_budgets(name: str) -> None:
    for value in (-1.0, 0.0, float("nan")):
        with pytest.raises(BudgetError, match=f"{name} must be positive, got {value:g}"):
            Budget(**{name: value})
    with pytest.raises(BudgetError, match=f"{name} must be finite"):
        Budget(**{name: float("inf")})


def test_a_loss_may_be_none_but_not_less() -> None:
    assert Budget(max_drop=0).capped
    assert not Budget(latency_ms=1).capped
    for value in (-0.1, float("nan")):
        with pytest.raises(BudgetError, match=f"max_drop must be 0 or more, got {value:g}"):
            Budget(max_drop=value)
    with pytest.raises(BudgetError, match="max_drop must be finite"):
        Budget(max_drop=float("inf"))
    with pytest.raises(BudgetError, match="max_drop must be a number, got True"):
        Budget(max_drop=True)


@pytest.mark.parametrize(("rank", "bits"), [(0, 8), (4, 1), (4, 9), (-3, 8)])
def test_impossible_points(rank: int, bits: int) -> None:
    with pytest.raises(SpecError):
        LayerPoint(rank, bits)


def test_menus_are_chains() -> None:
    a, b, c = LayerPoint(8, 4), LayerPoint(8, 8), LayerPoint(16, 6)
    check_menu((a, b))
    for broken in [(), (b, a), (b, c), (a, a)]:
        with pytest.raises(SpecError):
            check_menu(broken)


def test_profiles_are_chains() -> None:
    small = Profile("small", {"x": LayerPoint(8, 4), "y": LayerPoint(8, 8)})
    large = Profile("large", {"x": LayerPoint(8, 8), "y": LayerPoint(16, 8)})
    across = Profile("across", {"x": LayerPoint(16, 8), "y": LayerPoint(8, 4)})
    chain = ProfileChain((small, large))
    assert chain["large"] is chain.top
    with pytest.raises(SpecError, match="does not stand below"):
        ProfileChain((small, across))
    with pytest.raises(SpecError, match="does not stand below"):
        ProfileChain((large, small))
    with pytest.raises(SpecError, match="different layers"):
        ProfileChain((small, Profile("other", {"z": LayerPoint(8, 8)})))
    with pytest.raises(SpecError, match="no profile 'tiny': there are small, large"):
        chain["tiny"]
    with pytest.raises(TypeError):
        small.points["x"] = LayerPoint(1, 8)  # type: ignore[index]


@given(
    out=st.integers(1, 300),
    into=st.integers(1, 300),
    tile=st.sampled_from([1, 8, 16]),
    data=st.data(),
)
def test_tucker_schedule_is_monotone_and_tiled(
    out: int, into: int, tile: int, data: st.DataObject
) -> None:
    spec = LayerSpec("x", Kind.CONV2D, Factorization.TUCKER2, out, into, (3, 3), tile=tile)
    k = data.draw(st.integers(1, spec.full_rank))
    below = spec.channel_ranks(k)
    above = spec.channel_ranks(data.draw(st.integers(k, spec.full_rank)))
    assert below[0] <= above[0] <= out
    assert below[1] <= above[1] <= into
    assert all(r % tile == 0 or r == c for r, c in zip(below, (out, into), strict=True))
    assert spec.channel_ranks(spec.full_rank) == (out, into)
    reduce, core, expand = spec.stage_shapes(k)
    assert (reduce[0], core[0]) == (core[1], expand[1])


def test_shapes_that_are_executed() -> None:
    spec = LayerSpec("x", Kind.LINEAR, Factorization.SVD, 20, 30)
    assert spec.executed_shapes(LayerPoint(8, 4), Form.FACTORED) == ((8, 30), (20, 8))
    assert spec.executed_shapes(LayerPoint(8, 4), Form.DENSE) == ((20, 30),)
    assert spec.executed_shapes(LayerPoint(20, 8), Form.FACTORED) == ((20, 30),)
    with pytest.raises(SpecError, match=r"rank 21 is outside 1\.\.20"):
        spec.stage_shapes(21)


def test_impossible_images() -> None:
    for wrong in [{"mean": (0.0, 0.0)}, {"std": (0.0,)}, {"mean": (0.5,), "std": (1.0, 1.0, 1.0)}]:
        with pytest.raises(SpecError):
            ImageSpec(8, 8, **wrong)
