"""Adapters on 4-bit weights: QLoRA (arXiv 2305.14314) with the start of LoftQ (2310.08659)."""

from __future__ import annotations

import copy

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
from lab.baselines.layers import embeddings
from lab.baselines.mpqat import clipped_scale
from lab.baselines.pack import Format, on_grid, packed_bytes
from lab.quant.uniform import Grid
from t3c.errors import SpecError
from t3c.factor.svd import svd_stages

ROUNDS = 3  # of rounding what adapters leave, and adapting to what rounding leaves
CODES, WIDE = 4, 8  # bits of weights; of adapters, and of weights that are too small for one


def loracomp(task: Task, *, rank: int = 8, learning_rate: float = 2e-4) -> Baseline:
    """Weights in 4 bits and fixed, with adapters of a small rank that are trained beside them.

    Biases and norms are trained along. Adapters are merged into the weights when the model is
    loaded, so it runs dense, in 8 bits.
    """
    if rank < 1:
        raise SpecError(f"rank must be at least 1, got {rank}")
    training = task.trained("loracomp")
    model = copied(training.model)
    adapted, formats = adapt_(model, rank)
    done = finetune_(model, training, learning_rate=learning_rate, watch=task.watch)
    for module in model.modules():
        if isinstance(module, Adapter):
            module.round_()
    written = copy.deepcopy(model)
    settle_(adapted)
    graph = quantized(to_openvino(model, task.example), task)
    size = packed_bytes(written, formats, graph)
    method = f"4 bits with trained adapters of rank {rank}, merged, run in {precision(task)}"
    return Baseline("loracomp", method, graph, size, done.steps, done.seconds)


class Adapter(nn.Module):
    """A weight (rows, ...) plus `up` (k, rows) transposed times `down` (k, inner)."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up.T @ self.down).reshape(weight.shape)

    @torch.no_grad()
    def round_(self) -> None:
        """Let the adapter be what is written of it."""
        for factor in (self.up, self.down):
            factor.copy_(on_grid(factor, Format(WIDE)))


@torch.no_grad()
def adapt_(model: nn.Module, rank: int) -> tuple[dict[str, tuple[Layer, ...]], dict[str, Format]]:
    """Fix all weights on their grids and adapt them: the layers with adapters, and all formats.

    Where an adapter would take more than doubling the bits does, these are doubled.
    """
    adapted = {}
    formats = {f"{name}.weight": Format(WIDE) for name in embeddings(model)}
    for name, layers in weighted(model).items():
        weight = layers[0].weight
        weight.requires_grad_(False)
        rows, inner = weight.flatten(1).shape
        if WIDE * rank * (rows + inner) >= (WIDE - CODES) * rows * inner:
            formats[f"{name}.weight"] = Format(WIDE, scale=_scale(weight, WIDE))
            weight.copy_(on_grid(weight, formats[f"{name}.weight"]))
            continue
        codes, form, adapter = started(weight, rank)
        weight.copy_(codes)
        reparametrize_(layers, adapter)
        place = f"{name}.parametrizations.weight"
        formats |= {f"{place}.original": form, f"{place}.0.up": Format(WIDE)}
        formats[f"{place}.0.down"] = Format(WIDE)
        adapted[name] = layers
    return adapted, formats


@torch.no_grad()
def started(weight: Tensor, rank: int) -> tuple[Tensor, Format, Adapter]:
    """A weight (rows, ...) on the 4-bit grid, the grid, and the adapter that it starts with.

    The best of a few rounds; the first is plain rounding and the SVD of what it leaves.
    """
    best, least = None, float("inf")
    rest = weight
    for _ in range(ROUNDS):
        form = Format(CODES, scale=_scale(rest, CODES))
        codes = on_grid(rest, form)
        adapter = Adapter(*_halves((weight - codes).flatten(1), rank))
        lost = float((adapter(codes) - weight).norm())
        if lost < least:
            best, least = (codes, form, adapter), lost
        rest = weight - (adapter(codes) - codes)
    assert best is not None
    return best


def _scale(weight: Tensor, bits: int) -> Tensor:
    return clipped_scale(weight, Grid(bits)).exp()[:, 0]


def _halves(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors (k, rows) and (k, inner) of the best approximation, each component's halves alike."""
    down, up = svd_stages(matrix, rank)
    share = down.norm(dim=1, keepdim=True).clamp_min(1e-12).sqrt()
    return (up.T * share).contiguous(), (down / share).contiguous()
