"""Convolutions: W (o, i, *kernel) by CP over (o, i, kernel), every prefix usable."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

STARTS, TRIAL, SWEEPS = 4, 10, 100  # of the power iteration of one component


class Term(NamedTuple):
    """sigma * a x b x c with unit a (o,), b (i,) and c (p,)."""

    sigma: float
    a: Tensor
    b: Tensor
    c: Tensor


def cp_stages(
    weight: Tensor, rank: int, root: Tensor | None = None, inverse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Stages reduce (rank, i, 1[, 1]), spatial (rank, 1, *kernel) and expand (o, rank, 1[, 1]).

    `spatial` runs depthwise. Component j is the best rank-one term found of what the earlier ones
    leave, so its sigma takes exactly sigma^2 off the squared residual, whatever the prefix. The
    order is that of deflation, in which sigma need not fall. `root` and `inverse` (i, i), the
    C^{1/2} and C^{-1/2} of the input channels' second moment, give the metric; None is plain.
    `spatial` and the columns of `expand` have unit norm; sigma sits in `reduce`.
    """
    o, i, *kernel = weight.shape
    rest = weight.detach().double().reshape(o, i, -1)
    if root is not None:
        rest = torch.einsum("oip,ij->ojp", rest, root)
    rest = rest.clone(memory_format=torch.contiguous_format)
    reduce, spatial, expand = (rest.new_zeros(rank, size) for size in (i, rest.shape[2], o))
    negligible = 1e-12 * rest.norm()
    for j in range(rank):
        if rest.norm() <= negligible:
            break
        sigma, a, b, c = _best_term(rest)
        rest.view(o, -1).addr_(a, torch.outer(b, c).flatten(), alpha=-sigma)
        reduce[j], spatial[j], expand[j] = sigma * b, c, a
    if inverse is not None:
        reduce = reduce @ inverse
    ones = [1] * len(kernel)
    return (
        reduce.reshape(rank, i, *ones).to(weight.dtype),
        spatial.reshape(rank, 1, *kernel).to(weight.dtype),
        expand.T.reshape(o, rank, *ones).to(weight.dtype).contiguous(),
    )


def _best_term(rest: Tensor) -> Term:
    """The best rank-one term of a tensor (o, i, p) that a few starts lead to."""
    pixels = rest.flatten(0, 1)
    directions = torch.linalg.eigh(pixels.T @ pixels).eigenvectors.flip(1)
    trials = []
    for c in directions.T[:STARTS]:
        plane = rest @ c
        trials.append(_ascend(rest, plane[plane.square().sum(1).argmax()], c, TRIAL))
    best = max(trials, key=lambda term: term.sigma)
    return _ascend(rest, best.b, best.c, SWEEPS)


def _ascend(rest: Tensor, b: Tensor, c: Tensor, sweeps: int) -> Term:
    """The power iteration from b (i,) and c (p,): what TensorLy's `parafac` does at rank 1.

    Written out because there a sweep copies the whole tensor; here it reads `rest` (o, i, p) twice.
    """
    rows, before = rest.flatten(1), 0.0
    for _ in range(sweeps):
        plane = rest @ c
        # Zero vectors stay zero: a direction that `rest` does not have is a start of sigma 0.
        a = normalize(plane @ b, dim=0, eps=1e-300)
        b = normalize(a @ plane, dim=0, eps=1e-300)
        c = b @ (a @ rows).reshape(rest.shape[1:])
        sigma = float(c.norm())
        c = normalize(c, dim=0, eps=1e-300)
        if sigma - before <= 1e-6 * sigma:
            break
        before = sigma
    return Term(sigma, a, b, c)
