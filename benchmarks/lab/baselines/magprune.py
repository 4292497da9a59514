"""Gradual pruning by magnitude (Zhu and Gupta, arXiv 1710.01878), over the whole network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from lab.baselines.baseline import Baseline, Task, precision, quantized
from lab.baselines.finetune import copied, finetune_, reparametrize_, settle_, to_openvino, weighted
from lab.baselines.pack import Format, packed_bytes
from t3c.errors import SpecError

CUTTING = 0.5  # the share of a run in which weights are removed; in the rest masks stay
FEW = 1e-3  # layers with a smaller share of the weights stay dense


def magprune(task: Task, *, sparsity: float = 0.5, learning_rate: float = 1e-4) -> Baseline:
    """Remove the smallest weights bit by bit while training, then quantize to 8 bits."""
    return pruned(task, "magprune", sparsity, learning_rate, Masked)


class Masked(nn.Module):
    """A weight with some of its values at 0, which get no gradient."""

    mask: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones_like(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask

    def scored(self, weight: Tensor) -> Tensor:
        """What each value of the weight is worth."""
        return magnitudes(weight)

    def faster(self, reach: float) -> dict[nn.Parameter, float]:
        """What has to learn faster, where a run moves a parameter by `reach` while it cuts."""
        return {}


def pruned(
    task: Task, name: str, sparsity: float, learning_rate: float, masked: type[Masked]
) -> Baseline:
    """Train with masks of what scores highest, ever fewer, then quantize to 8 bits."""
    if not 0 <= sparsity < 1:
        raise SpecError(f"sparsity must be in [0, 1), got {sparsity:g}")
    training = task.trained(name)
    model = copied(training.model)
    every = weighted(model)
    large = prunable({layer: sharing[0].weight for layer, sharing in every.items()})
    layers = {layer: sharing for layer, sharing in every.items() if layer in large}
    weights = [sharing[0].weight for sharing in layers.values()]
    masks = [masked(weight.detach()) for weight in weights]
    for sharing, mask in zip(layers.values(), masks, strict=True):
        reparametrize_(sharing, mask)
    fixed = False

    def cut(share: float) -> None:
        nonlocal fixed
        if not fixed:
            scores = [m.scored(w).detach() for m, w in zip(masks, weights, strict=True)]
            for mask, kept in zip(masks, highest(scores, cubic(share, sparsity)), strict=True):
                mask.mask.copy_(kept)
        fixed = share >= CUTTING

    def faster(steps: int) -> dict[nn.Parameter, float]:
        reach = learning_rate * max(1.0, CUTTING * steps)
        return {p: times for mask in masks for p, times in mask.faster(reach).items()}

    done = finetune_(
        model, training, learning_rate=learning_rate, before_step=cut, faster=faster,
        watch=task.watch,
    )  # fmt: skip
    cut(1.0)  # a run of very few steps has not come to the end of the schedule
    settle_(layers)
    graph = quantized(to_openvino(model, task.example), task)
    formats = {f"{layer}.weight": Format(8, sparse=layer in large) for layer in every}
    size = packed_bytes(model, formats, graph)
    method = f"{100 * sparsity:g}% zeros, fine-tuned, {precision(task)}"
    return Baseline(name, method, graph, size, done.steps, done.seconds)


def prunable(weights: Mapping[str, Tensor]) -> set[str]:
    """The layers that pruning is about: all but those with very few of the weights.

    There is nothing to gain in stems and small heads, and much to lose: what a stem multiplies
    little by, because images have much of it, is what the network lives on.
    """
    total = sum(weight.numel() for weight in weights.values())
    return {name for name, weight in weights.items() if weight.numel() >= FEW * total}


def magnitudes(weight: Tensor) -> Tensor:
    """Magnitudes in units of the layer's own: a norm behind a layer makes its scale arbitrary."""
    size = weight.detach().abs()
    return size / size.square().mean().sqrt().clamp_min(1e-12)


def cubic(share: float, sparsity: float) -> float:
    """The share of zeros when a share of the run is done: fast at first, then ever slower."""
    return sparsity * (1 - (1 - min(1.0, share / CUTTING)) ** 3)


def highest(scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """Masks of the shapes of `scores`, 0 at a share `sparsity` of all: exactly, whatever ties."""
    flat = torch.cat([score.flatten() for score in scores])
    zeros = round(sparsity * len(flat))
    kept = torch.ones_like(flat)
    if zeros:
        kept[torch.from_numpy(np.argpartition(flat.numpy(), zeros - 1)[:zeros])] = 0
    parts = torch.split(kept, [score.numel() for score in scores])
    return [part.reshape(score.shape) for part, score in zip(parts, scores, strict=True)]
