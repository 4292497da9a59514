"""Mixed precision by sensitivity, then training with the rounding (the idea of HAWQ).

HAWQ (Dong et al., arXiv 1911.03852) takes sensitivities from the Hessian; here they are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from lab.baselines.baseline import Baseline, Task, precision, quantized
from lab.baselines.finetune import (
    Layer,
    copied,
    finetune_,
    reparametrize_,
    settle_,
    to_openvino,
    weighted,
)
from lab.baselines.pack import Format, packed_bytes
from lab.quant.uniform import Grid, fit_uniform, uniform_quantize
from t3c.control.knapsack import allocations
from t3c.control.menu import Option
from t3c.errors import SpecError
from t3c.nn.inputs import Inputs, call, evaluating, select
from t3c.spec import Level

BITS = (4, 6, 8)
CLIPPED = tuple(1 - 0.05 * step for step in range(13))  # shares of the largest magnitude, to 0.4


def mpqat(
    task: Task, *, bits: float = 5.0, learning_rate: float = 1e-4, probes: int = 32
) -> Baseline:
    """Give every layer 4, 6 or 8 bits, `bits` on average, and train with weights so rounded.

    Sensitivities are measured on the first `probes` samples. It runs in 8 bits, as OpenVINO has it.
    """
    if not min(BITS) <= bits <= max(BITS):
        raise SpecError(f"bits must be {min(BITS)} to {max(BITS)} on average, got {bits:g}")
    training = task.trained("mpqat")
    model = copied(training.model)
    layers = weighted(model)
    drifts = sensitivities(model, layers, select(task.samples, slice(0, probes)))
    sizes = {name: sharing[0].weight.numel() for name, sharing in layers.items()}
    chosen = allocate(sizes, drifts, bits)
    rounded = {name: Rounded(layers[name][0].weight, chosen[name]) for name in layers}
    for name, sharing in layers.items():
        reparametrize_(sharing, rounded[name])
    done = finetune_(model, training, learning_rate=learning_rate, watch=task.watch)
    settle_(layers)
    graph = quantized(to_openvino(model, task.example), task)
    size = packed_bytes(model, {f"{n}.weight": rounded[n].form() for n in layers}, graph)
    average = sum(chosen[name] * sizes[name] for name in layers) / sum(sizes.values())
    method = f"mixed precision of {average:.2f} bits on average, trained, run in {precision(task)}"
    return Baseline("mpqat", method, graph, size, done.steps, done.seconds)


class Rounded(nn.Module):
    """A weight (rows, ...) on a grid of its own per row, whose scale is trained along."""

    zero: Tensor

    def __init__(self, weight: Tensor, bits: int) -> None:
        super().__init__()
        self.grid = Grid(bits)
        self.log_scale = nn.Parameter(clipped_scale(weight, self.grid))
        self.register_buffer("zero", torch.zeros_like(self.log_scale))

    def forward(self, weight: Tensor) -> Tensor:
        return uniform_quantize(weight, self.log_scale, self.zero, self.grid)

    def form(self) -> Format:
        """How the weight is written, once it holds what was rounded."""
        return Format(self.grid.bits, scale=self.log_scale.detach().exp()[:, 0])


@torch.no_grad()
def clipped_scale(weight: Tensor, grid: Grid) -> Tensor:
    """Log scales (rows, 1) of a weight (rows, ...), each the one of least squared error."""
    largest, zero = fit_uniform(weight, grid)
    scales = [largest + float(np.log(share)) for share in CLIPPED]
    errors = [
        (uniform_quantize(weight, scale, zero, grid) - weight).flatten(1).square().sum(1)
        for scale in scales
    ]
    best = torch.stack(errors).argmin(0)
    return torch.stack(scales)[best, torch.arange(len(weight))]


@torch.no_grad()
def sensitivities(
    model: nn.Module, layers: Mapping[str, tuple[Layer, ...]], samples: Inputs
) -> dict[str, dict[int, float]]:
    """Squared relative drift of the outputs when one layer's weight alone has so many bits."""
    found: dict[str, dict[int, float]] = {}
    with evaluating(model):
        wanted = call(model, samples)
        for name, (layer, *_) in layers.items():
            kept, found[name] = layer.weight.clone(), {}
            for bits in BITS:
                grid = Grid(bits)
                scale = clipped_scale(kept, grid)
                layer.weight.copy_(uniform_quantize(kept, scale, torch.zeros_like(scale), grid))
                drift = (call(model, samples) - wanted).square().sum() / wanted.square().sum()
                found[name][bits] = float(drift)
            layer.weight.copy_(kept)
    return found


def allocate(
    sizes: Mapping[str, int], drifts: Mapping[str, Mapping[int, float]], average: float
) -> dict[str, int]:
    """Bits of every layer, at most `average` over all weights, for the least summed drift.

    The best on the layers' convex hulls, then what else fits, best first.
    """
    chains = {
        name: [Option(Level(1, bits), bits * sizes[name], drifts[name][bits]) for bits in BITS]
        for name in sizes
    }
    allowed = average * sum(sizes.values())
    best = [path for path in allocations(chains) if path.cost <= allowed][-1]
    chosen = {name: point.bits for name, point in best.points.items()}
    while True:
        left = allowed - sum(chosen[name] * size for name, size in sizes.items())
        fitting = [
            ((drifts[name][now] - drifts[name][more]) / sizes[name], name, more)
            for name in sizes
            for now, more in pairwise(BITS)
            if chosen[name] == now and (more - now) * sizes[name] <= left
        ]
        if not fitting:
            return chosen
        _, name, more = max(fitting)
        chosen[name] = more
