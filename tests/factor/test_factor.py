from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from t3c.factor.compose import compose, prefix
from t3c.factor.metric import whitening
from t3c.factor.svd import svd_stages
from t3c.factor.tucker import tucker2_stages

seeds = st.integers(0, 10_000)


def matrix(m: int, n: int, seed: int) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed))


def moment_of(n: int, seed: int) -> Tensor:
    a = matrix(4 * n, n, seed + 1) * torch.linspace(0.05, 3, n)
    return a.T @ a / len(a)


def cut(stages: tuple[Tensor, ...], k: int) -> Tensor:
    reduce, expand = stages
    return compose([reduce[:k], expand[:, :k]])


@given(st.integers(1, 20), st.integers(1, 20), seeds)
def test_full_rank_is_the_original(m: int, n: int, seed: int) -> None:
    weight = matrix(m, n, seed)
    for moment in (None, moment_of(n, seed)):
        torch.testing.assert_close(
            compose(svd_stages(weight, moment)), weight, atol=1e-5, rtol=1e-5
        )


@given(st.integers(2, 16), st.integers(2, 16), seeds)
def test_plain_prefixes_are_the_best_of_their_rank(m: int, n: int, seed: int) -> None:
    weight = matrix(m, n, seed)
    stages = svd_stages(weight)
    values = torch.linalg.svdvals(weight.double())
    for k in range(1, min(m, n)):
        residual = float((weight - cut(stages, k)).double().norm())
        assert residual == pytest.approx(float(values[k:].norm()), rel=1e-3, abs=1e-5)


@given(seeds)
def test_data_aware_prefixes_are_the_best_in_their_metric(seed: int) -> None:
    weight, moment = matrix(12, 10, seed), moment_of(10, seed)
    root, _ = whitening(moment, 10)
    values = torch.linalg.svdvals(weight.double() @ root)
    plain, aware = svd_stages(weight), svd_stages(weight, moment)
    for k in range(1, 10):
        best = float(values[k:].norm())
        ours, theirs = (((weight - cut(s, k)).double() @ root).norm() for s in (aware, plain))
        assert float(ours) == pytest.approx(best, rel=1e-3, abs=1e-5)
        assert float(theirs) > 1.001 * best


@given(st.integers(1, 12), st.integers(1, 12), seeds)
def test_tucker_at_full_rank_is_the_original(o: int, i: int, seed: int) -> None:
    weight = matrix(o, i * 9, seed).reshape(o, i, 3, 3)
    for moment in (None, moment_of(i, seed)):
        back = compose(tucker2_stages(weight, moment))
        torch.testing.assert_close(back, weight, atol=2e-5, rtol=1e-4)


@given(seeds)
@settings(max_examples=25)
def test_tucker_residual_falls_with_either_rank(seed: int) -> None:
    weight = matrix(10, 8 * 9, seed).reshape(10, 8, 3, 3)
    stages = tucker2_stages(weight)
    residual = {}
    for ro in range(1, 11):
        for ri in range(1, 9):
            shapes = ((ri, 8), (ro, ri), (10, ro))
            residual[ro, ri] = float((weight - compose(prefix(stages, shapes))).norm())
    assert all(residual[o, i] <= residual[o - 1, i] + 1e-5 for o, i in residual if o > 1)
    assert all(residual[o, i] <= residual[o, i - 1] + 1e-5 for o, i in residual if i > 1)


def test_whitening_inverts_itself_and_follows_the_moment() -> None:
    moment = moment_of(6, 3)
    root, inverse = whitening(moment, 6, ridge=1e-6)
    torch.testing.assert_close(root @ inverse, torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(root @ root, moment.double(), rtol=1e-3, atol=1e-4)


def test_dead_inputs_do_not_break_the_metric() -> None:
    stages = svd_stages(matrix(6, 5, 0), torch.zeros(5, 5))
    assert all(torch.isfinite(stage).all() for stage in stages)
