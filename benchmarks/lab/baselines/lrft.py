"""Low rank, then fine-tuning (Denton et al., arXiv 1404.0736; Jaderberg et al., 1405.3866)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from lab.baselines.baseline import Baseline, Task, precision, quantized
from lab.baselines.finetune import copied, finetune_, looked_up, to_openvino
from t3c.errors import SpecError
from t3c.evidence.int8 import bytes_on_disk
from t3c.factor.svd import svd_stages
from t3c.factor.tucker import tucker2_stages

L = TypeVar("L", nn.Linear, nn.Conv2d)

SMALLEST = 8  # ranks below leave a layer next to nothing, and kernels compute them no faster


def lrft(task: Task, *, rank: float = 0.5, learning_rate: float = 1e-4) -> Baseline:
    """Factor every layer at one share of the rank at which nothing is saved, train, quantize."""
    training = task.trained("lrft")
    model = copied(training.model)
    ranks = factorize_(model, rank)
    done = finetune_(model, training, learning_rate=learning_rate, watch=task.watch)
    graph = quantized(to_openvino(model, task.example), task)
    method = (
        f"{len(ranks)} layers at {rank:g} of the break-even rank, fine-tuned, {precision(task)}"
    )
    return Baseline("lrft", method, graph, bytes_on_disk(graph), done.steps, done.seconds)


def factorize_(model: nn.Module, share: float) -> dict[str, tuple[int, ...]]:
    """Put factors in the place of layers, whose ranks are returned by name."""
    if not 0 < share < 1:
        raise SpecError(f"rank must be in (0, 1) of the break-even, got {share:g}")
    tables = looked_up(model)
    ranks = {
        name: found
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        and id(module.weight) not in tables
        and (found := ranks_of(module, share))
    }
    factors = {id(model.get_submodule(name)): _factored(model, name, ranks[name]) for name in ranks}
    for parent in list(model.modules()):
        for child, module in parent._modules.items():  # one that is used twice is named once
            if id(module) in factors:
                setattr(parent, child, factors[id(module)])
    return ranks


def ranks_of(layer: nn.Linear | nn.Conv2d, share: float) -> tuple[int, ...]:
    """(rank,) of a matrix, (out, in) of a wider kernel; nothing where factors would not save.

    Both of a kernel's ranks are one share of its channels: with g of them, of the dense layer's
    multiplications per output position, taps * o * i, there are g * i * i * stride^2 before the
    core, g * g * taps * o * i in it and g * o * o behind it.
    """
    out, into = layer.weight.shape[:2]
    taps = layer.weight[0, 0].numel()
    if isinstance(layer, nn.Conv2d) and (layer.groups > 1 or layer.padding_mode != "zeros"):
        return ()
    if taps == 1:
        ranks: tuple[int, ...] = (int(share * out * into / (out + into)),)
    else:
        assert isinstance(layer, nn.Conv2d)
        outer, core = into * into * math.prod(layer.stride) + out * out, taps * out * into
        even = (math.sqrt(outer**2 + 4 * core**2) - outer) / (2 * core)
        ranks = int(share * even * out), int(share * even * into)
    return ranks if min(ranks) >= SMALLEST else ()


def _factored(model: nn.Module, name: str, ranks: Sequence[int]) -> nn.Sequential:
    layer = model.get_submodule(name)
    if isinstance(layer, nn.Linear):
        reduce, expand = svd_stages(layer.weight, ranks[0])
        return nn.Sequential(_linear(reduce), _linear(expand, layer.bias))
    assert isinstance(layer, nn.Conv2d)
    moving: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding}
    if len(ranks) == 1:
        pair = svd_stages(layer.weight.flatten(1), ranks[0])
        reduce, expand = (stage[..., None, None] for stage in pair)
        # Positions that a stride leaves out need not be reduced.
        return nn.Sequential(_conv(reduce, **moving), _conv(expand, layer.bias))
    reduce, core, expand = tucker2_stages(layer.weight, (ranks[0], ranks[1]))
    wide = _conv(core, dilation=layer.dilation, **moving)
    return nn.Sequential(_conv(reduce), wide, _conv(expand, layer.bias))


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    out, into = weight.shape
    return _filled(nn.Linear(into, out, bias is not None, device="meta"), weight, bias)


def _conv(weight: Tensor, bias: Tensor | None = None, **geometry: Any) -> nn.Conv2d:
    out, into, *kernel = weight.shape
    empty = nn.Conv2d(into, out, tuple(kernel), bias=bias is not None, device="meta", **geometry)  # type: ignore[arg-type]
    return _filled(empty, weight, bias)


def _filled(layer: L, weight: Tensor, bias: Tensor | None) -> L:
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer
