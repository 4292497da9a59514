from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from t3c.errors import SpecError
from t3c.nn.masks import soft_top_k, temperature_at

scores_of = st.lists(st.floats(-20, 20), min_size=2, max_size=24).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)
shares = st.floats(0.01, 0.99)
temperatures = st.floats(0.01, 5)


@given(scores_of, shares, temperatures, st.none() | st.integers(0, 100))
def test_the_mass_is_k(scores: Tensor, share: float, temperature: float, seed: int | None) -> None:
    k = share * len(scores)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    mask = soft_top_k(scores, k, temperature, generator=generator)
    assert float(mask.sum()) == pytest.approx(k, rel=1e-9)
    assert bool(((mask >= 0) & (mask <= 1)).all())


@given(scores_of, shares, temperatures)
def test_higher_scores_have_higher_masks(scores: Tensor, share: float, temperature: float) -> None:
    ordered = scores.sort().values
    mask = soft_top_k(ordered, share * len(scores), temperature)
    apart = (ordered.diff() > 1e-3) & (mask[1:] > 1e-12) & (mask[:-1] < 1 - 1e-12)
    assert bool((mask.diff() >= -1e-12).all())
    assert bool((mask.diff()[apart] > 0).all())


@given(st.permutations(range(10)), st.integers(1, 9))
def test_a_low_temperature_selects_the_k_largest(order: list[int], k: int) -> None:
    scores = 0.1 * torch.tensor(order, dtype=torch.float64)
    hard = torch.zeros(10, dtype=torch.float64)
    hard[scores.topk(k).indices] = 1
    torch.testing.assert_close(soft_top_k(scores, k, 2e-3), hard, atol=1e-9, rtol=0)
    assert float((soft_top_k(scores, k, 2.0) - hard).abs().max()) > 0.05


@given(scores_of, shares, st.floats(0.1, 5))
def test_gradients_keep_the_mass_and_are_those_of_the_mask(
    scores: Tensor, share: float, temperature: float
) -> None:
    def mask(z: Tensor) -> Tensor:
        return soft_top_k(z, share * len(scores), temperature)

    jacobian = torch.autograd.functional.jacobian(mask, scores)
    assert float(jacobian.sum(dim=0).abs().max()) < 1e-9 / temperature
    step = 1e-5 * temperature
    shifts = step * torch.eye(len(scores), dtype=torch.float64)
    numeric = torch.stack([(mask(scores + d) - mask(scores - d)) / (2 * step) for d in shifts], 1)
    torch.testing.assert_close(jacobian, numeric, atol=1e-6 / temperature, rtol=0)


@given(scores_of, st.integers(0, 24), st.floats(0.1, 30))
def test_zero_singular_values_are_never_selected(scores: Tensor, dead: int, k: float) -> None:
    scores[:dead] = -math.inf
    scores.requires_grad_()
    mask = soft_top_k(scores, k, 0.5, generator=torch.Generator().manual_seed(0))
    alive = max(len(scores) - dead, 0)
    assert not mask[:dead].any()
    assert mask.sum().item() == pytest.approx(min(k, alive), rel=1e-9)
    if k < alive:
        (gradient,) = torch.autograd.grad(mask @ torch.arange(len(mask)).double(), scores)
        assert torch.isfinite(gradient).all()


@given(scores_of, temperatures, st.floats(0, 3))
def test_all_are_kept_from_k_equal_n_on(scores: Tensor, temperature: float, more: float) -> None:
    assert bool((soft_top_k(scores, len(scores) + more, temperature) == 1).all())


def test_noise_draws_without_replacement_in_proportion_to_the_singular_values() -> None:
    draws, p = 3000, [0.5, 0.3, 0.15, 0.05]
    generator = torch.Generator().manual_seed(0)
    scores = torch.tensor(p).log()
    masks = [soft_top_k(scores, 2, 1e-4, generator=generator) for _ in range(draws)]
    found = torch.stack(masks).mean(0).tolist()
    for i, share in enumerate(p):
        second = sum(q * share / (1 - q) for j, q in enumerate(p) if j != i)
        expected = share + second
        assert abs(found[i] - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


def test_noise_keeps_the_order_of_scores_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.linspace(2, -2, 6)
    masks = torch.stack([soft_top_k(scores, 2.5, 1.0, generator=generator) for _ in range(1500)])
    assert bool((masks.mean(0).diff() < -0.02).all())
    assert bool((masks.std(0) > 0.05).all())


@pytest.mark.parametrize(("k", "temperature"), [(0, 1.0), (-1, 1.0), (math.nan, 1.0), (1, 0.0)])
def test_what_cannot_be_is_refused(k: float, temperature: float) -> None:
    with pytest.raises(SpecError, match="must be positive"):
        soft_top_k(torch.zeros(3), k, temperature)


def test_the_temperature_falls_to_its_least() -> None:
    assert temperature_at(0, 100) == 2.0
    assert temperature_at(50, 100) == pytest.approx(math.sqrt(2))
    assert temperature_at(100, 100) == pytest.approx(1.0)
    assert temperature_at(10_000, 100) == 0.3
