"""Operator norms of layers: upper bounds that worst cases may rest on, and estimates from below.

A name that ends in `bound` is never under the true norm; one that ends in `norm` may be, and is
close to it. No bound comes from a power iteration, and an estimate is not used where a bound is
asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from t3c.errors import DataError
from t3c.factor.compose import compose
from t3c.spec import Kind, LayerSpec

SLACK = 1 + 1e-9  # over the rounding of float64 that no other term accounts for
MEMORY = 256 * 2**20  # bytes that the frequencies at work may take
EPS = torch.finfo(torch.float64).eps
SETTLED = 1e-4  # relative move of an estimate that ends a power iteration


# Upper bounds


def matrix_bound(weight: Tensor) -> float:
    """The largest singular value of a matrix (m, n), from above."""
    if weight.ndim != 2:
        raise DataError(f"a matrix has two axes, got a weight of shape {tuple(weight.shape)}")
    weight, scale = _scaled(weight)
    wide = weight if weight.shape[0] <= weight.shape[1] else weight.T
    return scale * math.sqrt(_largest_square(wide[None])) * SLACK


def convolution_bound(
    kernel: Tensor,
    in_size: tuple[int, ...],
    *,
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> float:
    """The norm of a zero-padded convolution by (out, in / groups, *kernel), from above.

    It is that of the circular convolution on the torus of `_torus`, of which the zero-padded one is
    a restriction to some inputs and some outputs. A stride drops more outputs, so the bound holds
    whatever the stride. A circular convolution is block diagonal in frequency, one (out, in) block
    of each group a frequency.
    """
    out, into, *taps = kernel.shape if kernel.ndim > 1 else (0, 0)
    if not len(taps) == len(in_size) == len(padding) == len(dilation) or out % groups:
        raise DataError(
            f"a kernel of shape {tuple(kernel.shape)} does not fit an input of size {in_size}, "
            f"padding {tuple(padding)}, dilation {tuple(dilation)} and {groups} groups"
        )
    kernel, scale = _scaled(kernel)
    blocks = kernel.reshape(groups, out // groups, into, -1)
    if blocks.shape[1] > blocks.shape[2]:
        blocks = blocks.transpose(1, 2)  # the transposed blocks have the same singular values
    torus = _torus(taps, in_size, padding, dilation)
    reads = _grid(taps) * torch.tensor(tuple(dilation))
    return scale * math.sqrt(_largest_over_frequencies(blocks, reads, torus)) * SLACK


def layer_bound(spec: LayerSpec, stages: Sequence[Tensor]) -> float:
    """The norm of a layer's executed stages, one after the other, from above.

    Stages are those of `LayerSpec.stage_shapes`, or the dense weight alone. The norm is that of the
    composite and not the product of the stages' norms. An embedding's is its largest row norm,
    since an id picks one row.
    """
    _check_stages(spec, stages)
    if spec.kind is Kind.EMBEDDING:
        return _largest_row(compose([stage.detach().double() for stage in stages]))
    if len(stages) == 1:
        return _weight_bound(spec, stages[0])
    exact = [stage.detach().double() for stage in stages]
    # QR and the products round relative to the stages' sizes, which the composite may be far under.
    sides = sum(len(stage) + stage[0].numel() for stage in exact)
    rounding = sides * EPS * math.prod(float(stage.norm()) for stage in exact)
    if spec.groups == 1:
        exact = [_right_factor(exact[0]), *exact[1:-1], _left_factor(exact[-1])]
    return _weight_bound(spec, compose(exact)) + rounding


def _weight_bound(spec: LayerSpec, weight: Tensor) -> float:
    """The bound of one dense weight, or of what stands for it between orthonormal factors."""
    if not spec.convolution:
        return matrix_bound(weight)
    return convolution_bound(
        weight, spec.in_size, padding=spec.padding, dilation=spec.dilation, groups=spec.groups
    )


def _left_factor(expand: Tensor) -> Tensor:
    """R (min(m, k), k) of a pointwise stage (m, k) = Q R: Q keeps the norm of what it is given."""
    if math.prod(expand.shape[2:]) > 1:
        return expand
    small: Tensor = torch.linalg.qr(expand.flatten(1)).R
    return small.reshape(*small.shape, *expand.shape[2:])


def _right_factor(reduce: Tensor) -> Tensor:
    """R^T (k, min(n, k)) of a pointwise stage (k, n) = R^T Q^T.

    Q^T maps the unit ball onto the unit ball, and zeros to zeros, so padding may follow it.
    """
    return _left_factor(reduce.transpose(0, 1)).transpose(0, 1)


def _torus(
    taps: Sequence[int], in_size: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """The sides n + min(p, reach) of a torus that holds a padded convolution, reach = d (k - 1).

    An output at u reads u, u + d, ..., u + reach. If u < -reach or u > n - 1 it reads no input and
    is zero, so padding beyond the reach does not matter: let p be at most the reach. Then all that
    is read lies in -p .. n - 1 + p. On a torus of n + p places the p left of the input are the p
    right of it, all zero, so that nothing wraps onto the input, and the n + 2p - reach <= n + p
    outputs are distinct places. Along an axis of one tap all frequencies agree: one place will do.
    """
    reach = [d * (k - 1) for d, k in zip(dilation, taps, strict=True)]
    sides = zip(in_size, padding, reach, strict=True)
    return [n + min(p, r) if r else 1 for n, p, r in sides]


def _grid(sides: Sequence[int]) -> Tensor:
    """All places (prod(sides), axes) of a grid, the last axis fastest."""
    return torch.cartesian_prod(*(torch.arange(side) for side in sides)).reshape(-1, len(sides))


def _half_frequencies(torus: Sequence[int]) -> Tensor:
    """Frequencies (f, axes) of a torus, one of each pair w, -w: a real kernel's are conjugate."""
    sides = torch.tensor(tuple(torus))
    waves = _grid(torus)
    place = torch.tensor([math.prod(torus[axis + 1 :]) for axis in range(len(torus))])
    mirrored = (-waves % sides * place).sum(1)
    return waves[torch.arange(len(waves)) <= mirrored]


def _largest_over_frequencies(blocks: Tensor, reads: Tensor, torus: Sequence[int]) -> float:
    """The largest squared singular value of the blocks sum_j K_j exp(-2 pi i w.r_j / N).

    `blocks` (groups, a, b, taps) with a <= b, `reads` (taps, axes) where each tap reads. The sums
    are taken directly, a few frequencies at a time: taps are few, and a kernel that reaches around
    the torus needs no folding.
    """
    groups, a, b, taps = blocks.shape
    flat = blocks.reshape(-1, taps).T.to(torch.complex128)
    held = 16 * (groups * (2 * a * b + 5 * a * a) + 3 * taps)
    sides = torch.tensor(tuple(torus))
    largest = 0.0
    for waves in torch.split(_half_frequencies(torus), max(1, MEMORY // held)):
        # Whole numbers until the last division, so that an angle is exact to a rounding.
        angles = -2 * math.pi * (waves[:, None] * reads % sides / sides.double()).sum(2)
        phases = torch.polar(torch.ones_like(angles), angles)
        largest = _largest_square((phases @ flat).reshape(-1, a, b), largest)
    # A Cholesky factorization that succeeds is exact for a matrix within (a + 1) eps of the trace.
    return largest * (1 + 4 * a * (a + 1) * EPS)


def _largest_square(matrices: Tensor, known: float = 0.0) -> float:
    """The largest squared singular value of matrices (count, a, b) or `known`, a <= b, from above.

    Eigenvalues are found only of those Gram matrices G that a Cholesky factorization of top I - G
    does not show to be under the largest so far, up to its own rounding: it costs far less than
    they do, and few G remain.
    """
    a, b = matrices.shape[1:]
    trace = matrices.abs().square().sum((1, 2))
    # A computed Gram matrix is off by about (a + b) eps of its trace, its eigenvalues likewise.
    rounding = 4 * (a + b) * EPS * trace
    if a == 1:
        return max(known, float((trace + rounding).max()))
    grams = matrices @ matrices.mH
    rest = torch.linalg.vector_norm(grams, dim=(1, 2)).argsort(descending=True)
    top, count = known, 1
    while len(rest):
        if top:
            gaps = top * torch.eye(a, dtype=grams.dtype) - grams[rest]
            rest = rest[torch.linalg.cholesky_ex(gaps).info > 0]
        head, rest = rest[:count], rest[count:]
        if len(head):
            found = torch.linalg.eigvalsh(grams[head])[:, -1] + rounding[head]
            top = max(top, float(found.max()))
        count *= 2  # so that an unlucky order costs no more than a logarithm of passes
    return top


def _largest_row(table: Tensor) -> float:
    table, scale = _scaled(table)
    return scale * float(table.norm(dim=1).max()) * SLACK


def _scaled(weight: Tensor) -> tuple[Tensor, float]:
    """The weight in float64 over its largest entry, and that entry: no square underflows."""
    if not weight.numel() or not torch.isfinite(weight).all():
        raise DataError(f"a weight of shape {tuple(weight.shape)} is empty or not finite")
    weight = weight.detach().cpu().double()
    scale = float(weight.abs().max())
    return (weight / scale if scale else weight), scale


def _check_stages(spec: LayerSpec, stages: Sequence[Tensor]) -> None:
    shapes = [tuple(stage.shape) for stage in stages]
    if len(shapes) == 1:
        fit = shapes[0] == spec.dense_shape
    else:
        ends = (spec.out_channels, spec.in_channels // spec.groups)
        fit = bool(shapes) and (shapes[-1][0], shapes[0][1]) == ends
    if not fit:
        raise DataError(f"{spec.name}: stages {shapes} are no weight of {spec.dense_shape}")
    if not all(bool(torch.isfinite(stage).all()) for stage in stages):
        raise DataError(f"{spec.name}: a stage is not finite")


# Estimates from below


def operator_norm(
    apply: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    *,
    steps: int = 20,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> float:
    """The norm of a linear map of tensors of `shape`, from below, by power iteration.

    `operator_norm(lambda x: w @ x, (n,))`. The adjoint is autograd's, so the map has to be
    differentiable; `steps` bounds the applications of both.
    """
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    estimate = 0.0
    for _ in range(steps):
        x = (x / x.norm()).requires_grad_()
        with torch.enable_grad():
            y = apply(x)
        size = float(y.detach().norm())
        if not math.isfinite(size):
            raise DataError(f"the map of {tuple(shape)} gives values that are not finite")
        if size == 0:
            break
        if not y.requires_grad:
            raise DataError(f"the map of {tuple(shape)} is cut off from its input: no adjoint")
        (x,) = torch.autograd.grad(y, x, y.detach() / size)
        # ||A^T u|| of the unit u = A x / ||A x||: over ||A x||, and never over ||A||.
        before, estimate = estimate, float(x.norm())
        if abs(estimate - before) <= SETTLED * estimate:
            break
    return estimate


def residual_norm(spec: LayerSpec, change: Tensor, *, steps: int = 20, seed: int = 0) -> float:
    """The norm of a change (dense_shape) of a layer's weight, at the layer's real input size.

    Exact for matrices, tables and kernels of one tap, whatever their stride: it only picks the
    positions. Otherwise from below, by power iteration on the convolution itself; the norm of the
    reshaped kernel is another number.
    """
    if math.prod(spec.kernel) == 1:
        return layer_bound(spec, [change])
    _check_stages(spec, [change])
    weight, scale = _scaled(change)
    weight = weight.float()
    run = F.conv1d if spec.kind is Kind.CONV1D else F.conv2d

    def convolve(x: Tensor) -> Tensor:
        return run(x, weight, None, spec.stride, spec.padding, spec.dilation, spec.groups)

    shape = (1, spec.in_channels, *spec.in_size)
    return scale * operator_norm(convolve, shape, steps=steps, seed=seed)
