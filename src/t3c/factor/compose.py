"""From stages back to one weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def compose(stages: Sequence[Tensor]) -> Tensor:
    """The weight that the stages, executed one after the other, amount to.

    Linear: reduce (k, n), expand (m, k) -> (m, n). Convolution: of the stages (out, in, h, w) at
    most one is wider than 1x1; -> (m, n, h, w).
    """
    assert all(a.shape[0] == b.shape[1] for a, b in pairwise(stages))
    weight = stages[0]
    for stage in stages[1:]:
        if weight.dim() == 2:
            weight = stage @ weight
        elif stage.shape[2:] == (1, 1):
            weight = torch.einsum("ma,anhw->mnhw", stage[:, :, 0, 0], weight)
        else:
            weight = torch.einsum("mahw,an->mnhw", stage, weight[:, :, 0, 0])
    return weight


def prefix(stages: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The leading channels of each stage, as `LayerSpec.stage_shapes` names them."""
    return [stage[: shape[0], : shape[1]] for stage, shape in zip(stages, shapes, strict=True)]
