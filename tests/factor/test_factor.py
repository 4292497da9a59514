from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from t3c.factor import svd
from t3c.factor.compose import compose, prefix
from t3c.factor.metric import Metric, data_metric
from t3c.factor.svd import svd_stages
from t3c.factor.tucker import tucker1_stages, tucker2_stages

seeds = st.integers(0, 10_000)


def matrix(m: int, n: int, seed: int) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed))


def moment_of(n: int, seed: int) -> Tensor:
    a = matrix(4 * n, n, seed + 1) * torch.linspace(0.05, 3, n)
    return a.T @ a / len(a)


def metrics(n: int, seed: int) -> tuple[Metric | None, ...]:
    return None, data_metric(moment_of(n, seed))


def cut(stages: tuple[Tensor, ...], k: int) -> Tensor:
    reduce, expand = stages
    return compose([reduce[:k], expand[:, :k]])


@given(st.integers(1, 20), st.integers(1, 20), seeds)
def test_full_rank_is_the_original(m: int, n: int, seed: int) -> None:
    weight = matrix(m, n, seed)
    for metric in metrics(n, seed):
        back = compose(svd_stages(weight, metric=metric))
        torch.testing.assert_close(back, weight, atol=1e-5, rtol=1e-5)


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
    weight, metric = matrix(12, 10, seed), data_metric(moment_of(10, seed))
    root = metric.root
    values = torch.linalg.svdvals(weight.double() @ root)
    plain, aware = svd_stages(weight), svd_stages(weight, metric=metric)
    for k in range(1, 10):
        best = float(values[k:].norm())
        ours, theirs = (((weight - cut(s, k)).double() @ root).norm() for s in (aware, plain))
        assert float(ours) == pytest.approx(best, rel=1e-3, abs=1e-5)
        assert float(theirs) > 1.001 * best


@given(seeds)
def test_prefixes_are_the_best_for_inputs_and_use_both(seed: int) -> None:
    weight = matrix(12, 10, seed)
    inputs, outputs = data_metric(moment_of(10, seed)), data_metric(moment_of(12, seed + 7))
    values = torch.linalg.svdvals(outputs.root @ weight.double() @ inputs.root)
    both, one = svd_stages(weight, None, inputs, outputs), svd_stages(weight, None, inputs)
    for k in range(1, 10):
        best = float(values[k:].norm())
        ours, theirs = (
            (outputs.root @ (weight - cut(s, k)).double() @ inputs.root).norm() for s in (both, one)
        )
        assert float(ours) == pytest.approx(best, rel=1e-3, abs=1e-5)
        assert float(theirs) > 1.001 * best


@given(seeds)
@settings(max_examples=25)
def test_tucker_for_a_use_loses_less_of_what_is_used(seed: int) -> None:
    weight = matrix(16, 8 * 9, seed).reshape(16, 8, 3, 3)
    used = data_metric(moment_of(16, seed), ridge=1e-2)
    both, plain = tucker2_stages(weight, outputs=used), tucker2_stages(weight)
    torch.testing.assert_close(compose(both), weight, atol=1e-4, rtol=1e-4)
    shapes = ((8, 8), (6, 8), (16, 6))  # all inputs: the best outputs are then known
    lost, plainly = (
        float((used.root @ (weight - compose(prefix(s, shapes))).double().flatten(1)).norm())
        for s in (both, plain)
    )
    best = torch.linalg.svdvals(used.root @ weight.double().flatten(1))[6:].norm()
    assert lost == pytest.approx(float(best), rel=1e-3)
    assert plainly > 1.01 * lost


@given(st.integers(1, 10), seeds)
@settings(max_examples=25)
def test_tucker_of_inputs_is_the_best_that_reads_as_many_combinations(rank: int, seed: int) -> None:
    weight = matrix(12, 10 * 9, seed).reshape(12, 10, 3, 3)
    metric = data_metric(moment_of(10, seed), ridge=1e-2)
    used = data_metric(moment_of(12, seed + 1), ridge=1e-2)
    stages = tucker1_stages(weight, metric=metric, outputs=used)
    torch.testing.assert_close(compose(stages), weight, atol=1e-4, rtol=1e-3)

    def weighed(change: torch.Tensor) -> torch.Tensor:
        """(in, out x kernel), in both metrics."""
        rows = torch.einsum("po,oi...->pi...", used.root, change.double())
        return metric.root @ rows.movedim(1, 0).flatten(1)

    kept = compose(prefix(stages, ((rank, 10), (12, rank))))
    best = torch.linalg.svdvals(weighed(weight))[rank:].norm()
    lost = float(weighed(weight - kept).norm())
    assert lost == pytest.approx(float(best), rel=1e-3, abs=1e-4)


@given(st.integers(1, 12), st.integers(1, 12), seeds)
def test_tucker_at_full_rank_is_the_original(o: int, i: int, seed: int) -> None:
    weight = matrix(o, i * 9, seed).reshape(o, i, 3, 3)
    for metric in metrics(i, seed):
        for stages in (tucker1_stages, tucker2_stages):
            back = compose(stages(weight, metric=metric))
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
    metric = data_metric(moment, ridge=1e-6)
    eye = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(metric.root @ metric.inverse, eye)
    torch.testing.assert_close(metric.root @ metric.root, moment.double(), rtol=1e-3, atol=1e-4)


def test_dead_inputs_do_not_break_the_metric() -> None:
    stages = svd_stages(matrix(6, 5, 0), metric=data_metric(torch.zeros(5, 5)))
    assert all(torch.isfinite(stage).all() for stage in stages)


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 24), seeds)
def test_a_truncated_svd_is_a_prefix_of_the_whole(m: int, n: int, rank: int, seed: int) -> None:
    weight = matrix(m, n, seed)
    for metric in metrics(n, seed):
        short, whole = svd_stages(weight, rank, metric), svd_stages(weight, metric=metric)
        k = min(m, n, rank)
        torch.testing.assert_close(cut(short, k), cut(whole, k), atol=1e-4, rtol=1e-4)
        eye = torch.eye(k)
        torch.testing.assert_close(short[1].T @ short[1], eye, atol=1e-5, rtol=1e-5)


def test_large_matrices_are_factored_by_random_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    decay = torch.linspace(0, -4, 200).exp()
    weight = (matrix(300, 200, 1) * decay) @ matrix(200, 200, 2)
    best = torch.linalg.svdvals(weight.double())
    monkeypatch.setattr(svd, "EXACT_SIDE", 100)
    monkeypatch.setattr(svd, "_leading_eigenvectors", refuse_above(100, svd._leading_eigenvectors))
    stages = svd_stages(weight, 40)
    for k in (10, 20, 40):
        residual = float((weight - cut(stages, k)).double().norm())
        assert residual == pytest.approx(float(best[k:].norm()), rel=2e-3)


Decompose = Callable[[Tensor, int], Tensor]


def refuse_above(side: int, real: Decompose) -> Decompose:
    def checked(gram: Tensor, rank: int) -> Tensor:
        assert len(gram) <= side
        return real(gram, rank)

    return checked
