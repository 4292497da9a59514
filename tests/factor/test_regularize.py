from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from t3c.factor.regularize import gap_penalty, spectral_penalty, strengths, unit_norm

seeds = st.integers(0, 10_000)
ranks = st.integers(2, 8)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal_rows(k: int, n: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(n, k, seed=seed)).Q.T * torch.arange(1.0, k + 1)[:, None]


@given(ranks, seeds)
def test_spectral_penalty_is_zero_for_orthogonal_components_alone(k: int, seed: int) -> None:
    reduce, expand = orthogonal_rows(k, 9, seed), orthogonal_rows(k, 11, seed + 1).T
    assert float(spectral_penalty(reduce, expand)) < 1e-25
    tilted = reduce.clone()
    tilted[0] += 0.1 * tilted[1]
    assert float(spectral_penalty(tilted, expand)) > 1e-5
    assert float(spectral_penalty(reduce, tilted.T)) > 1e-5


@given(ranks, seeds)
def test_spectral_penalty_is_the_mean_squared_cosine_at_any_scale(k: int, seed: int) -> None:
    reduce, expand = normal(k, 9, seed=seed), normal(11, k, seed=seed + 1)
    cosines = [torch.corrcoef(torch.cat([x, -x], 1))[:k, :k] for x in (reduce, expand.T)]
    off = ~torch.eye(k, dtype=torch.bool)
    expected = torch.stack([c[off].square().mean() for c in cosines]).mean()
    scale = normal(k, seed=seed + 2).exp()
    found = spectral_penalty(scale[:, None] * reduce, expand / scale)
    torch.testing.assert_close(found, expected)


def test_spectral_penalty_makes_components_orthogonal() -> None:
    reduce, expand = (normal(6, 6, seed=s).requires_grad_() for s in (0, 1))
    optimizer = torch.optim.Adam([reduce, expand], lr=0.05)
    before = spectral_penalty(reduce, expand).item()
    for _ in range(200):
        optimizer.zero_grad()
        spectral_penalty(reduce, expand).backward()
        optimizer.step()
    assert spectral_penalty(reduce, expand).item() < 1e-4 * before


@given(ranks, seeds, st.floats(1e-3, 1e3))
def test_gap_penalty_is_zero_for_a_falling_spectrum_alone(k: int, seed: int, scale: float) -> None:
    gap = 1 / (2 * k)
    wide = scale * torch.linspace(1, 0, k, dtype=torch.float64)
    assert float(gap_penalty(wide, gap)) == 0
    place = seed % (k - 1)
    touching = wide.clone()
    touching[place + 1] = touching[place] - 0.5 * gap * scale
    assert float(gap_penalty(touching, gap)) >= 0.49 * gap / (k - 1)
    assert float(gap_penalty(wide.flip(0), gap)) > float(gap_penalty(touching, gap))


def test_gap_penalty_pulls_neighbours_apart() -> None:
    s = torch.tensor([1.0, 0.5, 0.499, 0.2], requires_grad=True)
    gap_penalty(s, 0.01).backward()
    assert s.grad is not None
    assert s.grad[1] < 0 < s.grad[2]
    assert s.grad[3] == 0


@given(st.integers(1, 6), seeds)
def test_dead_components_have_finite_gradients(k: int, seed: int) -> None:
    reduce, expand = normal(k, 5, seed=seed), normal(7, k, seed=seed + 1)
    for dead in (slice(0, 1), slice(None)):
        a, b = reduce.clone(), expand.clone()
        a[dead], b[:, dead] = 0, 0
        a.requires_grad_()
        b.requires_grad_()
        loss = spectral_penalty(a, b) + gap_penalty(strengths((a, b)), 0.1)
        loss.backward()
        assert torch.isfinite(loss)
        assert a.grad is not None
        assert b.grad is not None
        assert torch.isfinite(a.grad).all()
        assert torch.isfinite(b.grad).all()


@given(ranks, seeds)
def test_strengths_are_norms_of_the_components(k: int, seed: int) -> None:
    reduce, expand = normal(k, 9, seed=seed), normal(11, k, seed=seed + 1)
    terms = torch.stack([torch.outer(expand[:, j], reduce[j]) for j in range(k)])
    torch.testing.assert_close(strengths((reduce, expand)), terms.flatten(1).norm(dim=1))
    points = (reduce[..., None, None], expand[..., None, None])
    torch.testing.assert_close(strengths(points), strengths((reduce, expand)))


@given(ranks, seeds)
def test_strengths_of_tucker_are_those_of_the_cores_slices(k: int, seed: int) -> None:
    core = normal(k, 5, 3, 3, seed=seed)
    expand = torch.linalg.qr(normal(9, k, seed=seed + 1)).Q[..., None, None]
    stages = (normal(5, 6, 1, 1, seed=seed + 2), core, expand)
    torch.testing.assert_close(strengths(stages), core.flatten(1).norm(dim=1))


@given(ranks, seeds)
def test_unit_norm_keeps_the_product(k: int, seed: int) -> None:
    reduce, expand = normal(k, 9, seed=seed), normal(11, k, seed=seed + 1)
    reduce[0] = 0
    rows, s, columns = unit_norm(reduce, expand)
    torch.testing.assert_close(columns * s @ rows, expand @ reduce)
    assert rows.norm(dim=1)[1:].tolist() == pytest.approx([1.0] * (k - 1))
    assert columns.norm(dim=0).tolist() == pytest.approx([1.0] * k)
