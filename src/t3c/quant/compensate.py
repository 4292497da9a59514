"""Layerwise second-order compensation: the error of each column is made up for by those to come.

The weight W' that is looked for makes E||(W - W') a||^2 small. Columns are settled one by one, and
what settling a column costs is taken back by the best change of the columns that are still free
(Optimal Brain Surgeon; GPTQ, arXiv 2210.17323; SparseGPT, arXiv 2301.00774).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from t3c.errors import DataError, SpecError

Settle = Callable[[int, Tensor], Tensor]
"""The final values of a block's column: its index in the block, its values (g, m)."""
Rule = Callable[[Tensor, Tensor], Settle]
"""Made for each block, of its weights (g, m, b) and the free columns' stiffness (g, b)."""

BLOCK = 128


@torch.no_grad()
def compensate(
    weight: Tensor,
    moment: Tensor,
    rule: Rule,
    *,
    ridge: float = 0.01,
    block: int = BLOCK,
    sort: bool = False,
) -> Tensor:
    """The weight (g, m, n) settled by `rule`, for inputs with the moments E[a a^T] (g, n, n).

    `ridge`, in mean eigenvalues, is added to the moments; it is what inputs that were never seen
    count. With `sort` the columns of the largest inputs go first, while most others are free.
    """
    groups, _, size = weight.shape
    if moment.shape != (groups, size, size):
        raise DataError(
            f"a weight of shape {tuple(weight.shape)} has moments of shape {tuple(moment.shape)}"
        )
    if ridge <= 0 or block < 1:
        raise SpecError(f"ridge and block must be positive, got {ridge:g} and {block}")
    moment, free = moment.double(), weight.double().clone()
    order = torch.arange(size, device=weight.device).expand(groups, size)
    if sort:
        order = moment.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
        free = free.gather(2, order[:, None].expand_as(free))
        moment = moment.gather(1, order[:, :, None].expand_as(moment))
        moment = moment.gather(2, order[:, None].expand_as(moment))
    factor = inverse_factor(moment, ridge)
    for start in range(0, size, block):
        here, later = slice(start, start + block), slice(start + block, None)
        errors = _settle_block_(free[:, :, here], factor[:, here, here], rule)
        free[:, :, later] -= errors @ factor[:, here, later]
    settled = torch.empty_like(free).scatter_(2, order[:, None].expand_as(free), free)
    return settled.to(weight.dtype)


def _settle_block_(free: Tensor, factor: Tensor, rule: Rule) -> Tensor:
    """Settle the columns of a block (g, m, b) in place; each one's error by its stiffness."""
    errors = torch.zeros_like(free)
    diagonal = factor.diagonal(dim1=1, dim2=2)
    settle = rule(free.clone(), diagonal.square().reciprocal())
    for index in range(free.shape[2]):
        before = free[:, :, index].clone()
        settled = settle(index, before)
        errors[:, :, index] = (before - settled) / diagonal[:, index, None]
        # The column's own entry of the factor is its diagonal: it becomes what was settled.
        free[:, :, index:] -= errors[:, :, index, None] * factor[:, None, index, index:]
        free[:, :, index] = settled  # exactly
    return errors


def inverse_factor(moment: Tensor, ridge: float) -> Tensor:
    """The upper triangular U (g, n, n) with U^T U = (H + ridge)^-1.

    1 / U_jj^2 is how stiffly column j resists when columns before it are settled and those behind
    it are free. It is made without the inverse: H turned about has the factor that U inverts.
    """
    size = moment.shape[-1]
    mean = moment.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12)
    identity = torch.eye(size, dtype=moment.dtype, device=moment.device)
    turned = (moment + ridge * mean[:, None, None] * identity).flip(1, 2)
    lower = torch.linalg.cholesky(turned)
    inverse: Tensor = torch.linalg.solve_triangular(lower.flip(1, 2), identity, upper=True)
    return inverse
