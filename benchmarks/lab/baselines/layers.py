"""The linear layers and convolutions of a torch model, and the second moments of their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.baselines.baseline import Task
from lab.baselines.finetune import copied, looked_up
from t3c.errors import DataError
from t3c.nn.inputs import Inputs, batches_of, call, tensors

Layer = nn.Linear | nn.Conv2d
BATCH = 8  # samples that run at once
ROWS = 8192  # of each layer's inputs, of which a moment is made


def torch_model(task: Task, name: str) -> nn.Module:
    """A copy of the original in torch; an error that names the method where there is none."""
    if task.training is None:
        raise DataError(f"{name} needs the original in torch, which ONNX alone does not have")
    return copied(task.training.model).requires_grad_(False)


def weight_layers(model: nn.Module) -> dict[str, Layer]:
    """Linear layers and convolutions by name, as the model lists them; of tied ones the first.

    Those tied to a table of vectors are not among them.
    """
    found: dict[str, Layer] = {}
    seen = set(looked_up(model))
    for name, module in model.named_modules():
        if isinstance(module, Layer) and isinstance(module.weight, nn.Parameter):
            if id(module.weight) not in seen:
                found[name] = module
            seen.add(id(module.weight))
    return found


def embeddings(model: nn.Module) -> dict[str, nn.Embedding]:
    """Tables of vectors by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding)}


def as_matrix(layer: Layer) -> Tensor:
    """The weight as what its inputs are multiplied by: (groups, out / groups, n)."""
    groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
    return layer.weight.detach().reshape(groups, len(layer.weight) // groups, -1)


@torch.no_grad()
def input_moments(
    model: nn.Module, samples: Inputs, *, rows: int = ROWS, seed: int = 0
) -> dict[str, Tensor]:
    """E[a a^T] (groups, n, n) of each layer's inputs, in the order the layers run.

    What a convolution is multiplied by are patches, of which at most about `rows` are drawn, as of
    the tokens of a linear layer. Layers that do not run are not there.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    each = max(1, rows // len(tensors(samples)[0]))
    draw = torch.Generator().manual_seed(seed)

    def watch(name: str, layer: Layer) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            parts = input_rows(layer, args[0] if args else kwargs["input"], each, draw)
            moment = parts.transpose(1, 2) @ parts
            sums[name] = sums[name].add_(moment) if name in sums else moment
            counts[name] = counts.get(name, 0) + parts.shape[1]

        return hook

    layers = weight_layers(model)
    with _hooked({layer: watch(name, layer) for name, layer in layers.items()}):
        for batch in batches_of(samples, BATCH):
            call(model, batch)
    broken = [name for name, total in sums.items() if not bool(torch.isfinite(total).all())]
    if broken:
        raise DataError(f"{broken[0]}: its inputs on the samples are not finite")
    return {name: total / counts[name] for name, total in sums.items()}


def input_rows(layer: Layer, x: Tensor, each: int, draw: torch.Generator) -> Tensor:
    """What the rows of the weight meet, at most `each` positions of a sample: (groups, rows, n)."""
    if isinstance(layer, nn.Linear):
        tokens = x.reshape(len(x), -1, x.shape[-1])
        return _drawn(tokens, 1, each, draw).reshape(1, -1, x.shape[-1])
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    around = layer._reversed_padding_repeated_twice  # of "same" padding too
    columns = F.unfold(
        F.pad(x, around, mode=mode),
        layer.kernel_size,
        layer.dilation,
        0,
        layer.stride,
    )
    columns = _drawn(columns, 2, each, draw)
    parts = columns.reshape(len(x), layer.groups, -1, columns.shape[-1])
    return parts.permute(1, 0, 3, 2).reshape(layer.groups, -1, parts.shape[2])


def _drawn(x: Tensor, dim: int, most: int, draw: torch.Generator) -> Tensor:
    if x.shape[dim] <= most:
        return x
    return x.index_select(dim, torch.randperm(x.shape[dim], generator=draw)[:most])


@contextmanager
def _hooked(hooks: Mapping[Layer, Any]) -> Iterator[None]:
    handles = [m.register_forward_pre_hook(h, with_kwargs=True) for m, h in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
