from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from t3c.certify import norms
from t3c.certify.norms import (
    convolution_bound,
    layer_bound,
    matrix_bound,
    operator_norm,
    residual_norm,
)
from t3c.errors import DataError
from t3c.factor.compose import compose
from t3c.spec import Factorization, Kind, LayerSpec

seeds = st.integers(0, 10_000)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small lose time to threads, much of it where others use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def true_norm(apply: Callable[[Tensor], Tensor], *shape: int) -> float:
    """The norm of a linear map of batches (b, *shape), from its dense matrix."""
    unit = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    return float(torch.linalg.svdvals(apply(unit).flatten(1))[0])


def run(spec: LayerSpec, weight: Tensor, x: Tensor, *, strided: bool, groups: int) -> Tensor:
    """One stage as an engine runs it: the strided one has the geometry, others are pointwise."""
    convolve = F.conv1d if spec.kind is Kind.CONV1D else F.conv2d
    if strided:
        return convolve(x, weight, None, spec.stride, spec.padding, spec.dilation, groups)
    return convolve(x, weight, groups=groups)


def dense_norm(spec: LayerSpec, weight: Tensor) -> float:
    def convolve(x: Tensor) -> Tensor:
        return run(spec, weight, x, strided=True, groups=spec.groups)

    return true_norm(convolve, spec.in_channels, *spec.in_size)


def bound(spec: LayerSpec, weight: Tensor) -> float:
    return convolution_bound(
        weight, spec.in_size, padding=spec.padding, dilation=spec.dilation, groups=spec.groups
    )


@st.composite
def convolutions(
    draw: st.DrawFn, strides: Sequence[int] = (1, 2), factorization: str = "none"
) -> LayerSpec:
    axes = draw(st.sampled_from([1, 2]))

    def sides(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    groups = draw(st.sampled_from([1, 1, 2, 3])) if factorization == "none" else 1
    kernel, dilation, padding = sides(1, 3), sides(1, 2), sides(0, 2)
    least = [
        max(1, d * (k - 1) + 1 - 2 * p)
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]  # fmt: skip
    return LayerSpec(
        name="conv", kind=Kind.CONV1D if axes == 1 else Kind.CONV2D,
        factorization=Factorization(factorization),
        out_channels=groups * draw(st.integers(1, 4)), in_channels=groups * draw(st.integers(1, 4)),
        kernel=kernel, dilation=dilation, padding=padding, groups=groups, tile=2,
        stride=tuple(draw(st.sampled_from(strides)) for _ in range(axes)),
        in_size=tuple(side + draw(st.integers(0, 3)) for side in least), out_size=(1,) * axes,
    )  # fmt: skip


@given(st.integers(1, 30), st.integers(1, 30), seeds, st.sampled_from([1e-200, 1.0, 1e200]))
def test_a_matrix_has_its_largest_singular_value(m: int, n: int, seed: int, size: float) -> None:
    weight = noise(m, n, seed=seed)
    true = float(torch.linalg.svdvals(weight)[0])
    assert true <= matrix_bound(weight) <= true * (1 + 1e-6)
    assert matrix_bound(weight.float()) == pytest.approx(true, rel=1e-6)
    assert matrix_bound(weight * size) / size == pytest.approx(true, rel=1e-6)
    ones = torch.outer(weight[:, 0], weight[0])  # one singular value alone, nothing to hide under
    assert matrix_bound(ones) >= float(weight[:, 0].norm() * weight[0].norm())


@given(convolutions(), seeds)
@settings(max_examples=150)
def test_a_convolution_is_never_under_its_bound(spec: LayerSpec, seed: int) -> None:
    weight = noise(*spec.dense_shape, seed=seed)
    limit = bound(spec, weight)
    assert dense_norm(spec, weight) <= limit
    assert residual_norm(spec, weight) <= limit * (1 + 1e-6)  # an estimate in float32


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_the_bound_is_close_without_a_stride(
    axes: int, dilation: int, groups: int, padding: int
) -> None:
    spec = LayerSpec(
        name="conv", kind=Kind.CONV1D if axes == 1 else Kind.CONV2D,
        factorization=Factorization.NONE, out_channels=4, in_channels=6, kernel=(3,) * axes,
        stride=(1,) * axes, padding=(padding,) * axes, dilation=(dilation,) * axes, groups=groups,
        in_size=(9,) * axes, out_size=(9,) * axes,
    )  # fmt: skip
    for seed in range(3):
        weight = noise(*spec.dense_shape, seed=seed)
        assert 1 <= bound(spec, weight) / dense_norm(spec, weight) <= 1.35


@given(convolutions(), seeds)
def test_the_bound_is_the_norm_on_the_torus(spec: LayerSpec, seed: int) -> None:
    weight = noise(*spec.dense_shape, seed=seed)
    reach = [d * (k - 1) for d, k in zip(spec.dilation, spec.kernel, strict=True)]
    sides = zip(spec.in_size, spec.padding, reach, strict=True)
    torus = [n + min(p, r) for n, p, r in sides]
    folded = torch.zeros(*weight.shape[:2], *torus, dtype=torch.float64)
    for tap in torch.cartesian_prod(*map(torch.arange, spec.kernel)).reshape(-1, len(torus)):
        place = tuple((tap * torch.tensor(spec.dilation) % torch.tensor(torus)).tolist())
        folded[(..., *place)] += weight[(..., *tap.tolist())]
    symbols = torch.fft.fftn(folded, dim=tuple(range(2, folded.ndim))).flatten(2).movedim(2, 0)
    true = torch.linalg.svdvals(torch.stack(symbols.chunk(spec.groups, dim=1))).max()
    assert bound(spec, weight) == pytest.approx(float(true), rel=1e-8)


def test_memory_does_not_change_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = noise(6, 5, 3, 3)
    geometry = {"padding": (1, 1), "dilation": (1, 1), "groups": 1}
    whole = convolution_bound(weight, (9, 7), **geometry)  # type: ignore[arg-type]
    monkeypatch.setattr(norms, "MEMORY", 1)
    single = convolution_bound(weight, (9, 7), **geometry)  # type: ignore[arg-type]
    assert single == pytest.approx(whole, rel=1e-9)


def test_a_reshaped_kernel_has_another_norm() -> None:
    spec = LayerSpec(
        "blur", Kind.CONV2D, Factorization.NONE, 1, 1, kernel=(3, 3), padding=(1, 1), in_size=(9, 9)
    )
    blur = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    true = dense_norm(spec, blur)
    assert matrix_bound(blur.flatten(1)) == pytest.approx(3)
    assert 8 < true <= bound(spec, blur) <= 9 * (1 + 1e-6)
    assert 0.99 * true <= residual_norm(spec, blur) <= true * (1 + 1e-6)


def executed_norm(spec: LayerSpec, stages: Sequence[Tensor], groups: Sequence[int]) -> float:
    def execute(x: Tensor) -> Tensor:
        for index, stage in enumerate(stages):
            strided = index == spec.strided_stage()
            x = run(spec, stage, x, strided=strided, groups=groups[index])
        return x

    return true_norm(execute, spec.in_channels, *spec.in_size)


@pytest.mark.parametrize("factorization", ["svd", "tucker1", "tucker2", "cp"])
@given(data=st.data(), seed=seeds)
@settings(max_examples=60)
def test_stages_stay_under_their_bound_and_it_under_the_product(
    factorization: str, data: st.DataObject, seed: int
) -> None:
    spec = data.draw(convolutions(factorization=factorization))
    rank = data.draw(st.integers(1, spec.full_rank))
    shapes, groups = spec.stage_shapes(rank), spec.stage_groups(rank)
    stages = [noise(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    limit = layer_bound(spec, stages)
    assert executed_norm(spec, stages, groups) <= limit
    assert limit == pytest.approx(layer_bound(spec, [compose(stages)]), rel=1e-6)
    product = 1.0
    for index, stage in enumerate(stages):
        zeros, ones = (0,) * len(spec.kernel), (1,) * len(spec.kernel)
        strided = index == spec.strided_stage()
        product *= convolution_bound(
            stage, spec.in_size, padding=spec.padding if strided else zeros,
            dilation=spec.dilation if strided else ones, groups=groups[index],
        )  # fmt: skip
    assert limit <= product * (1 + 1e-6)


@given(st.integers(1, 20), st.integers(1, 20), st.data(), seeds)
def test_linear_stages_have_the_norm_of_their_product(
    m: int, n: int, data: st.DataObject, seed: int
) -> None:
    spec = LayerSpec("linear", Kind.LINEAR, Factorization.SVD, m, n, in_size=(7, 1))
    rank = data.draw(st.integers(1, spec.full_rank))
    reduce, expand = noise(rank, n, seed=seed), noise(m, rank, seed=seed + 1)
    limit = layer_bound(spec, [reduce, expand])
    true = float(torch.linalg.svdvals(expand @ reduce)[0])
    assert limit >= true * (1 - 1e-14)
    assert limit == pytest.approx(matrix_bound(expand @ reduce), rel=1e-6)
    assert limit <= matrix_bound(reduce) * matrix_bound(expand) * (1 + 1e-6)
    assert layer_bound(spec, [expand @ reduce]) == matrix_bound(expand @ reduce)


@given(seeds)
def test_stages_that_nearly_cancel_stay_under_their_bound(seed: int) -> None:
    spec = LayerSpec("linear", Kind.LINEAR, Factorization.SVD, 6, 5)
    large, small = (noise(5, seed=seed) * 1e12).round(), (noise(5, seed=seed + 1) * 9).round() + 10
    column = (noise(6, seed=seed + 2) * 9).round() + 10
    # Whole numbers, so that the product, column x small, is known without rounding.
    stages = [torch.stack([large + small, large]), torch.stack([column, -column], dim=1)]
    assert layer_bound(spec, stages) >= float(column.norm() * small.norm())


def test_grouped_stages_are_bounded_as_the_weight_they_compose() -> None:
    spec = LayerSpec(
        "grouped", Kind.CONV2D, Factorization.SVD, 6, 6, kernel=(3, 3), padding=(1, 1), groups=3,
        in_size=(5, 5),
    )  # fmt: skip
    stages = [noise(*shape) for shape in spec.stage_shapes(4)]
    weight = compose(stages)
    assert dense_norm(spec, weight) <= layer_bound(spec, stages)
    assert layer_bound(spec, stages) == pytest.approx(bound(spec, weight), rel=1e-6)


def test_a_table_is_bounded_by_its_largest_row() -> None:
    spec = LayerSpec("table", Kind.EMBEDDING, Factorization.NONE, 30, 8)
    table = noise(30, 8)
    largest = float(table.norm(dim=1).max())
    assert largest <= layer_bound(spec, [table]) <= largest * (1 + 1e-8)
    assert residual_norm(spec, table) == layer_bound(spec, [table])
    assert largest < matrix_bound(table)


@given(st.integers(4, 40), st.integers(4, 40), seeds)
def test_power_iteration_is_close_from_below(m: int, n: int, seed: int) -> None:
    u, _, v = torch.linalg.svd(noise(m, n, seed=seed), full_matrices=False)
    falling = 3 * torch.linspace(0.7, 0.1, min(m, n), dtype=torch.float64)
    falling[0] = 3.0
    weight = u * falling @ v
    found = operator_norm(lambda x: weight @ x, (n,), seed=seed, dtype=torch.float64)
    assert 0.99 * 3 <= found <= 3 * (1 + 1e-12)
    single = weight.float()
    assert operator_norm(lambda x: single @ x, (n,), seed=seed) == pytest.approx(found, rel=1e-3)


def test_power_iteration_stops_when_it_has_settled() -> None:
    seen: list[Tensor] = []

    def double(x: Tensor) -> Tensor:
        seen.append(x)
        return 2 * x

    with torch.no_grad():
        assert operator_norm(double, (3, 4)) == pytest.approx(2, rel=1e-6)
    assert len(seen) == 2
    assert operator_norm(torch.zeros_like, (3,)) == 0
    with pytest.raises(DataError, match="no adjoint"):
        operator_norm(lambda x: x.detach(), (3,))


@given(convolutions(), seeds)
@settings(max_examples=60)
def test_a_residual_is_estimated_at_the_real_size(spec: LayerSpec, seed: int) -> None:
    change = 1e-30 * noise(*spec.dense_shape, seed=seed)
    true = dense_norm(spec, change * 1e30)
    estimate = residual_norm(spec, change, steps=40, seed=seed) * 1e30
    if math.prod(spec.kernel) > 1:
        assert 0.9 * true <= estimate <= true * (1 + 1e-6)
        return
    largest = max(matrix_bound(group) for group in change.flatten(1).chunk(spec.groups)) * 1e30
    assert true <= estimate == pytest.approx(largest, rel=1e-8)
    if not any(spec.padding):  # else a stride may pick from the padding alone
        assert estimate == pytest.approx(true, rel=1e-8)


def test_what_is_not_finite_or_does_not_fit_is_refused() -> None:
    spec = LayerSpec("conv", Kind.CONV2D, Factorization.NONE, 2, 2, kernel=(3, 3), in_size=(5, 5))
    for bad in (float("nan"), float("inf")):
        weight = torch.full((2, 2, 3, 3), bad)
        for refused in (lambda w: bound(spec, w), lambda w: layer_bound(spec, [w])):
            with pytest.raises(DataError, match="not finite"):
                refused(weight)
        with pytest.raises(DataError, match="not finite"):
            residual_norm(spec, weight)
        with pytest.raises(DataError, match="not finite"):
            matrix_bound(weight.flatten(1))
        with pytest.raises(DataError, match="not finite"):
            operator_norm(lambda x, bad=bad: x * bad, (3,))  # type: ignore[misc]
    with pytest.raises(DataError, match="empty"):
        matrix_bound(torch.zeros(0, 3))
    with pytest.raises(DataError, match="two axes"):
        matrix_bound(torch.zeros(3))
    with pytest.raises(DataError, match="does not fit"):
        convolution_bound(torch.zeros(2, 2, 3), (5, 5), padding=(1,), dilation=(1,), groups=1)
    with pytest.raises(DataError, match="conv: stages"):
        layer_bound(spec, [torch.zeros(2, 1, 3, 3)])
    with pytest.raises(DataError, match="conv: stages"):
        layer_bound(replace(spec, factorization=Factorization.SVD), [])
