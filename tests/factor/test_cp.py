from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorly.decomposition import parafac
from torch import Tensor
from torch.nn.functional import conv1d, conv2d

from t3c.factor.compose import compose
from t3c.factor.cp import cp_stages

seeds = st.integers(0, 10_000)
kernels = st.sampled_from([(1,), (3,), (5,), (1, 1), (3, 3), (1, 5)])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut(stages: tuple[Tensor, ...], k: int) -> Tensor:
    reduce, spatial, expand = stages
    return compose((reduce[:k], spatial[:k], expand[:, :k]))


def metric_of(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """C^{1/2} and C^{-1/2} of a moment with eigenvalues from 0.01 to 9."""
    vectors = torch.linalg.qr(normal(n, n, seed=seed)).Q
    root = torch.linspace(0.1, 3, n, dtype=torch.float64)
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


@given(st.integers(1, 7), st.integers(1, 7), kernels, seeds)
@settings(max_examples=40)
def test_each_component_takes_its_sigma_off_the_residual(
    o: int, i: int, kernel: tuple[int, ...], seed: int
) -> None:
    weight = normal(o, i, *kernel, seed=seed)
    root, inverse = metric_of(i, seed)
    stages = cp_stages(weight, 9, root, inverse)
    before = torch.einsum("oi...,ij->oj...", weight, root).norm()
    for k in range(1, 10):
        sigma = (stages[0][k - 1].flatten() @ root).norm()
        after = torch.einsum("oi...,ij->oj...", weight - cut(stages, k), root).norm()
        assert after**2 == pytest.approx(float(before**2 - sigma**2), rel=1e-9, abs=1e-9)
        before = after


@given(st.integers(1, 5), seeds)
@settings(max_examples=40)
def test_an_orthogonal_sum_is_taken_apart_exactly(terms: int, seed: int) -> None:
    a, b, c = (torch.linalg.qr(normal(n, terms, seed=seed + n)).Q for n in (8, 6, 9))
    weights = torch.linspace(1, 3, terms, dtype=torch.float64)
    weight = torch.einsum("or,ir,pr,r->oip", a, b, c, weights).reshape(8, 6, 3, 3)
    stages = cp_stages(weight, terms + 2)
    torch.testing.assert_close(cut(stages, terms), weight, atol=1e-7, rtol=0)
    found = stages[0].flatten(1).norm(dim=1).sort(descending=True).values
    torch.testing.assert_close(found[:terms], weights.flip(0), atol=1e-7, rtol=0)


@given(seeds)
@settings(max_examples=20)
def test_the_first_component_is_as_good_as_tensorlys(seed: int) -> None:
    weight = normal(10, 8, 3, 3, seed=seed)
    weight *= torch.arange(1.0, 11)[:, None, None, None]
    theirs, _ = parafac(
        weight.reshape(10, 8, 9).numpy(), 1, n_iter_max=500, tol=1e-12, normalize_factors=True,
        random_state=np.random.RandomState(0),
    )  # fmt: skip
    assert float(cp_stages(weight, 1)[0].norm()) >= 0.97 * float(theirs[0])


def test_the_metric_of_the_data_serves_the_data() -> None:
    ratios = []
    for seed in range(8):
        weight, (root, inverse) = normal(12, 10, 3, 3, seed=seed), metric_of(10, seed)
        residuals = [
            torch.einsum("oihw,ij->ojhw", weight - compose(stages), root).norm()
            for stages in (cp_stages(weight, 8, root, inverse), cp_stages(weight, 8))
        ]
        ratios.append(float(residuals[0] / residuals[1]))
    assert max(ratios) < 1
    assert sum(ratios) / len(ratios) < 0.95


@pytest.mark.parametrize("kernel", [(3,), (3, 5)])
def test_the_stages_run_as_three_convolutions(kernel: tuple[int, ...]) -> None:
    conv = conv1d if len(kernel) == 1 else conv2d
    weight, x = normal(6, 4, *kernel, seed=1), normal(2, 4, *[11] * len(kernel), seed=2)
    reduce, spatial, expand = cp_stages(weight, 5)
    inner = conv(conv(x, reduce), spatial, stride=2, padding=1, groups=5)
    whole = conv(x, compose((reduce, spatial, expand)), stride=2, padding=1)
    torch.testing.assert_close(conv(inner, expand), whole)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e20])
def test_what_is_used_up_leaves_zeros_at_any_scale(scale: float) -> None:
    weight = scale * torch.ones(3, 2, 3, 3)
    stages = cp_stages(weight, 4)
    torch.testing.assert_close(compose(stages), weight, rtol=1e-5, atol=0)
    assert all(stage.dtype == weight.dtype for stage in stages)
    assert all(not stage[1:].any() for stage in stages[:2])
    assert not stages[2][:, 1:].any()


def test_the_same_kernel_gives_the_same_stages_and_stays_as_it_was() -> None:
    weight = normal(9, 7, 3, 3, seed=0)
    before = weight.clone()
    first, second = cp_stages(weight, 5), cp_stages(weight, 5)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(weight, before)
