from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from t3c.convert.config import KERNELS
from t3c.factor.compose import compose
from t3c.factor.ranks import RANK_AXES, scaled, strengths
from t3c.factor.regularize import gap_penalty, spectral_penalty
from t3c.spec import Factorization

seeds = st.integers(0, 10_000)
ranks = st.integers(2, 8)
(SVD,) = RANK_AXES[Factorization.SVD]


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
        loss = spectral_penalty(a, b) + gap_penalty(strengths((a, b), SVD), 0.1)
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
    torch.testing.assert_close(strengths((reduce, expand), SVD), terms.flatten(1).norm(dim=1))
    points = (reduce[..., None, None], expand[..., None, None])
    torch.testing.assert_close(strengths(points, SVD), strengths((reduce, expand), SVD))


@given(ranks, seeds)
def test_strengths_of_tucker_are_those_of_the_cores_slices(k: int, seed: int) -> None:
    core = normal(k, 5, 3, 3, seed=seed)
    expand = torch.linalg.qr(normal(9, k, seed=seed + 1)).Q[..., None, None]
    reduce = torch.linalg.qr(normal(6, 5, seed=seed + 2)).Q.T[..., None, None]
    out, into = (strengths((reduce, core, expand), a) for a in RANK_AXES[Factorization.TUCKER2])
    torch.testing.assert_close(out, core.flatten(1).norm(dim=1))
    torch.testing.assert_close(into, core.transpose(0, 1).flatten(1).norm(dim=1))


@given(st.sampled_from([Factorization.SVD, *KERNELS]), seeds)
def test_scaling_a_rank_by_zero_drops_it(kind: Factorization, seed: int) -> None:
    middle = [normal(4, 1 if kind is Factorization.CP else 4, 3, 3, seed=seed)]
    stages = [normal(4, 6, 1, 1, seed=seed + 1), *middle, normal(5, 4, 1, 1, seed=seed + 2)]
    if kind is Factorization.SVD:
        stages = [stages[0], stages[-1]]
    if kind is Factorization.TUCKER1:
        stages = stages[:-1]
    axes = RANK_AXES[kind][0]
    kept = scaled(stages, axes, torch.tensor([1.0, 1.0, 0.0, 0.0]))
    cut = [stage.narrow(axis, 0, 2) for (index, axis) in axes for stage in [stages[index]]]
    short = [*stages[: -len(axes)], *cut] if kind is not Factorization.CP else cut
    torch.testing.assert_close(compose(kept), compose(short))
    found = strengths(kept, axes)
    assert found[2:].tolist() == [0, 0]
    torch.testing.assert_close(found[:2], strengths(stages, axes)[:2])
