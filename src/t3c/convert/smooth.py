"""Inputs of linear layers evened out, so that few outlying channels do not coarsen all of them.

A channel that is large in the inputs and small in the weights is divided by a factor on one side
and multiplied by it on the other: x W^T = (x / s)(W s)^T (SmoothQuant, arXiv 2211.10438). The model
computes what it did; its inputs fit a grid of 8 bits better.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from t3c.errors import DataError, SpecError
from t3c.nn.inputs import call, evaluating, split_batch
from t3c.nn.view import replace_

SMALLEST = 1e-5  # of a channel's largest value: one that is always zero has no size


class Evened(nn.Module):
    """A linear layer whose input (..., n) is multiplied by `inverse` (n,) first."""

    def __init__(self, linear: nn.Linear, inverse: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("inverse", inverse)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        assert isinstance(self.inverse, Tensor)
        output: Tensor = self.linear(input * self.inverse)
        return output


def smooth_(model: nn.Module, batches: Iterable[Any], alpha: float = 0.5) -> dict[str, int]:
    """Even out the inputs of every linear layer in place, before the model is made elastic.

    `alpha` is how much of the unevenness goes from the inputs to the weights. Layers that read one
    tensor share their factors. Layers that were changed, and how many share theirs.

    >>> smooth_(model, loader)  # doctest: +SKIP
    >>> t3c.elasticize_(model, example, calibration=loader)  # doctest: +SKIP
    """
    if not 0 <= alpha <= 1:
        raise SpecError(f"alpha must be in [0, 1], got {alpha:g}")
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and isinstance(module.weight, nn.Parameter)
    }
    largest, read = _observed(model, linears, batches)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    groups: dict[int, list[str]] = {}
    for name in largest:
        if id(linears[name].weight) not in tables:
            groups.setdefault(read[name], []).append(name)
    changed = {}
    for names in groups.values():
        inputs = torch.stack([largest[name] for name in names]).amax(dim=0)
        weights = torch.cat([linears[name].weight.detach() for name in names]).abs().amax(dim=0)
        factor = _factors(inputs, weights, alpha)
        inverse = 1 / factor
        for name in names:
            with torch.no_grad():
                linears[name].weight.mul_(factor)
            replace_(model, name, Evened(linears[name], inverse))
            changed[name] = len(names)
    return changed


def _factors(inputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """What each channel (n,) is divided by; 1 in the mean of logarithms."""
    sizes = [v.clamp_min(SMALLEST * float(v.max().clamp_min(SMALLEST))) for v in (inputs, weights)]
    logs = alpha * sizes[0].log() - (1 - alpha) * sizes[1].log()
    return (logs - logs.mean()).exp()


def _observed(
    model: nn.Module, linears: dict[str, nn.Linear], batches: Iterable[Any]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The largest size (n,) of each input channel by layer, and which tensor the layer reads."""
    largest: dict[str, Tensor] = {}
    read: dict[str, int] = {}
    alive: list[Tensor] = []  # while a batch runs, so that no two tensors have one identity

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            alive.append(x)
            read[name] = id(x)
            seen = x.detach().abs().reshape(-1, x.shape[-1]).amax(dim=0)
            largest[name] = torch.maximum(largest[name], seen) if name in largest else seen

        return hook

    with torch.no_grad(), evaluating(model), _hooked(linears, watch):
        for batch in batches:
            alive.clear()
            call(model, split_batch(batch)[0])
    if not largest:
        raise DataError("no linear layer ran on the data: there is nothing to even out")
    broken = [name for name, seen in largest.items() if not bool(seen.isfinite().all())]
    if broken:
        raise DataError(f"{broken[0]}: its inputs are not finite")
    return largest, read


@contextmanager
def _hooked(linears: dict[str, nn.Linear], watch: Any) -> Iterator[None]:
    handles = [
        module.register_forward_pre_hook(watch(name), with_kwargs=True)
        for name, module in linears.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
