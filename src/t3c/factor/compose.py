"""From stages back to one weight."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def compose(stages: Sequence[Tensor]) -> Tensor:
    """The weight that the stages, executed one after the other, amount to.

    Linear: reduce (k, n), expand (m, k) -> (m, n). Convolution: of the stages (out, in, *kernel) at
    most one is wider than a point; a stage with one input to each of its channels is depthwise.
    """
    weight = stages[0]
    for stage in stages[1:]:
        if stage.shape[1] != weight.shape[0]:
            assert stage.shape[:2] == (weight.shape[0], 1)
            weight = stage * weight
        elif prod(stage.shape[2:]) == 1:
            weight = torch.einsum("ma,a...->m...", stage.flatten(1), weight)
        else:
            weight = torch.einsum("ma...,an->mn...", stage, weight.flatten(1))
    return weight


def prefix(stages: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The leading channels of each stage, as `LayerSpec.stage_shapes` names them."""
    return [stage[: shape[0], : shape[1]] for stage, shape in zip(stages, shapes, strict=True)]
