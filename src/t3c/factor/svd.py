"""Matrices: W (m, n) as expand (m, k) @ reduce (k, n), every prefix usable."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from t3c.factor.metric import Metric

EXACT_SIDE = 4096  # up to here the smaller Gram matrix is decomposed whole
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of balancing, tried
REACH = 6.0  # of a tensor's largest value in standard deviations: a grid of 8 bits reaches there
WEIGHT_STEPS = 64  # of the second factor's grid: 6 bits, the middle of what profiles have


def svd_stages(
    weight: Tensor,
    rank: int | None = None,
    metric: Metric | None = None,
    outputs: Metric | None = None,
) -> tuple[Tensor, Tensor]:
    """Stages reduce (k, n) and expand (m, k), k = min(m, n, rank), of a matrix (m, n).

    Prefix k is the best rank-k approximation in the metrics C of inputs and G of outputs: it
    minimises tr G (W - W_k) C (W - W_k)^T, which without G is E ||(W - W_k) a||^2 for inputs a
    with E[a a^T] = C. The columns of `expand` are orthonormal in G; the singular values sit in
    `reduce`, each of whose rows has a scale of its own when it is quantized.
    """
    turned = weight.detach().double()
    if outputs is not None:
        turned = outputs.root @ turned
    left = leading_left(
        turned if metric is None else turned @ metric.root, rank or min(turned.shape)
    )
    reduce, expand = left.T @ turned, left if outputs is None else outputs.inverse @ left
    return reduce.to(weight.dtype), expand.to(weight.dtype)


def balanced(
    reduce: Tensor, expand: Tensor, share: float, moment: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same product, with a `share` of each rank's strength moved from `reduce` to `expand`.

    What passes between the stages, for inputs with that moment (n, n), is then of more even size
    over the ranks, so that one grid of 8 bits suits all of it; `expand` becomes less even.
    """
    inner = reduce.double()
    moved = inner if moment is None else inner @ moment.double()
    strength = (moved * inner).sum(dim=1).clamp_min(1e-24).sqrt()
    factor = (strength / strength.mean()).pow(share).to(reduce.dtype)
    return reduce / factor[:, None], expand * factor


def best_balance(reduce: Tensor, expand: Tensor, moment: Tensor) -> tuple[float, float]:
    """Return the share of `balanced` with the least error of rounding, for inputs of that moment,
    and what it leaves of the error.

    Two roundings are reckoned with: of what passes between the stages, in 8 bits on one grid, and
    of `expand`, each of whose rows has a grid of its own. Rows of `reduce` have their own too, and
    no share moves them.
    """

    def error(share: float) -> float:
        small, large = (stage.double() for stage in balanced(reduce, expand, share, moment))
        inner = ((small @ moment.double()) * small).sum(dim=1)
        step = 2 * REACH * inner.max().sqrt() / 255
        rows = 2 * large.abs().amax(dim=1) / WEIGHT_STEPS
        return float(step.square() * large.square().sum() + rows.square().sum() * inner.sum())

    errors = {share: error(share) for share in SHARES}
    share = min(errors, key=errors.__getitem__)
    return share, math.sqrt(errors[share] / max(errors[SHARES[0]], 1e-300))


def leading_left(matrix: Tensor, rank: int) -> Tensor:
    """The leading left singular vectors (m, k) of a matrix (m, n) in float64, largest first.

    They are found from the smaller of the two Gram matrices, or by random projection where that
    is too large: memory stays at a few times the matrix.
    """
    rank = min(rank, *matrix.shape)
    if min(matrix.shape) > EXACT_SIDE and 2 * rank < min(matrix.shape):
        return _projected(matrix, rank)
    if matrix.shape[0] <= matrix.shape[1]:
        return _leading_eigenvectors(matrix @ matrix.T, rank)
    right = _leading_eigenvectors(matrix.T @ matrix, rank)
    # Images of the right vectors; directions next to nothing are replaced by orthonormal ones.
    vectors, upper = torch.linalg.qr(matrix @ right)
    signed: Tensor = vectors * torch.where(upper.diagonal() < 0, -1.0, 1.0).to(vectors.dtype)
    return signed


def _leading_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    return vectors.flip(1)[:, :rank].contiguous()


def _projected(matrix: Tensor, rank: int, oversample: int = 32, passes: int = 4) -> Tensor:
    """Randomized range finder with power iterations (Halko, Martinsson, Tropp 2011)."""
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(
        matrix.shape[1], min(rank + oversample, *matrix.shape), generator=generator,
        dtype=matrix.dtype,
    )  # fmt: skip
    basis: Tensor = torch.linalg.qr(matrix @ probe.to(matrix.device)).Q
    for _ in range(passes):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    small = basis.T @ matrix
    return basis @ _leading_eigenvectors(small @ small.T, rank)
