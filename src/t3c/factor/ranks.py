"""Which axes of which stages a factorization's ranks are, and how strong each rank is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from t3c.spec import WIDTHS, Factorization

Axes = tuple[tuple[int, int], ...]  # (stage, axis) pairs that carry the same ranks

# Tucker-2 has ranks of outputs, then of inputs.
RANK_AXES: dict[Factorization, tuple[Axes, ...]] = {
    Factorization.NONE: (),
    Factorization.SVD: (((0, 0), (1, 1)),),
    Factorization.TUCKER1: (((0, 0), (1, 1)),),
    Factorization.TUCKER2: (((1, 0), (2, 1)), ((0, 0), (1, 1))),
    Factorization.CP: (((0, 0), (1, 0), (2, 1)),),
    **dict.fromkeys(WIDTHS, ()),
}


def strengths(stages: Sequence[Tensor], axes: Axes) -> Tensor:
    """The strength (k,) of each rank: the product of the norms of what it is made of.

    For an SVD these are the singular values; whatever scale the stages share among them, the
    product stays.
    """
    norms = [stages[stage].movedim(axis, 0).flatten(1).norm(dim=1) for stage, axis in axes]
    return torch.stack(norms).prod(dim=0)


def scaled(stages: Sequence[Tensor], axes: Axes, factor: Tensor) -> list[Tensor]:
    """The stages with each rank multiplied by a factor (k,)."""
    stage, axis = axes[-1]
    target = stages[stage]
    shape = [-1 if index == axis else 1 for index in range(target.dim())]
    return [*stages[:stage], target * factor.reshape(shape), *stages[stage + 1 :]]
