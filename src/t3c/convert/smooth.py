"""Inputs of linear layers evened out, so that few outlying channels do not coarsen all of them.

A channel that is large in the inputs and small in the weights is divided by a factor on one side
and multiplied by it on the other: x W^T = (x / s)(W s)^T (SmoothQuant, arXiv 2211.10438). The model
computes what it did; its inputs fit a grid of 8 bits better.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from t3c.errors import DataError, SpecError
from t3c.nn.hooks import hooked, read_by
from t3c.nn.inputs import call, evaluating, split_batch
from t3c.nn.view import replace_

SMALLEST = 1e-5  # of a channel's largest value: one that is always zero has no size
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
WORTH = 0.98  # of the error as it is: less of a gain is not worth one more product
ROWS, AT_ONCE = 1024, 128  # inputs that errors are taken on, and those of one batch


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


@dataclass(frozen=True)
class Smoothed:
    """How a layer's input was smoothed: the share moved to its weights, and the error of 8 bits on
    both sides after it, relative to before."""

    alpha: float
    error: float


@dataclass
class Read:
    """What a linear layer was seen to read: the tensor's identity, the largest size of each channel
    (n,), and some of its rows (r, n)."""

    source: int
    largest: Tensor
    rows: list[Tensor]


def smooth_(
    model: nn.Module, batches: Iterable[Any], alpha: float | None = None
) -> dict[str, Smoothed]:
    """Even out the inputs of every linear layer in place, before the model is made elastic.

    `alpha` is how much of the unevenness goes from the inputs to the weights; without it each
    tensor has the one of a few, or none at all, that leaves the least error in 8 bits on both
    sides. Layers that read one tensor share their factors. Returns the layers changed.

    >>> smooth_(model, loader)  # doctest: +SKIP
    >>> t3c.elasticize_(model, example, calibration=loader)  # doctest: +SKIP
    """
    if alpha is not None and not 0 <= alpha <= 1:
        raise SpecError(f"alpha must be in [0, 1], got {alpha:g}")
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and isinstance(module.weight, nn.Parameter)
        and id(module.weight) not in tables
    }
    seen = _observed(model, linears, batches)
    groups: dict[int, list[str]] = {}
    for name, read in seen.items():
        groups.setdefault(read.source, []).append(name)
    changed = {}
    for names in groups.values():
        weights = [linears[name].weight.detach() for name in names]
        read = seen[names[0]]
        errors = _errors(read, torch.cat(weights), ALPHAS if alpha is None else (alpha,))
        chosen = min(errors, key=errors.__getitem__)
        if alpha is None and not errors[chosen] < WORTH:
            continue
        factor = _factors(read.largest, torch.cat(weights).abs().amax(dim=0), chosen)
        inverse = 1 / factor
        for name in names:
            with torch.no_grad():
                linears[name].weight.mul_(factor)
            replace_(model, name, Evened(linears[name], inverse))
            changed[name] = Smoothed(chosen, errors[chosen])
    return changed


@torch.no_grad()
def unsmooth_(model: nn.Module) -> None:
    """Undo `smooth_` in place: the layers read their inputs as they come."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Evened):
            assert isinstance(module.inverse, Tensor)
            module.linear.weight.mul_(module.inverse)
            replace_(model, name, module.linear)


def _errors(read: Read, weight: Tensor, alphas: Iterable[float]) -> dict[float, float]:
    """Return what each alpha leaves of the error of 8 bits; 1 where there is none to begin with."""
    rows, sizes = torch.cat(read.rows), weight.abs().amax(dim=0)
    plain = _error(rows, read.largest, weight, torch.ones_like(sizes))
    return {
        alpha: _error(rows, read.largest, weight, _factors(read.largest, sizes, alpha)) / plain
        if plain
        else 1.0
        for alpha in alphas
    }


def _error(rows: Tensor, largest: Tensor, weight: Tensor, factor: Tensor) -> float:
    """How far products of inputs (r, n) by a weight (m, n) are off when both sides have 8 bits."""
    step = (largest / factor).max().clamp_min(1e-12) / 127
    even = weight * factor
    scale = even.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    rounded = (rows / factor / step).round() * step @ ((even / scale).round() * scale).T
    return float((rounded - rows @ weight.T).norm())


def _factors(inputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """What each channel (n,) is divided by; 1 in the mean of logarithms."""
    sizes = [v.clamp_min(SMALLEST * float(v.max().clamp_min(SMALLEST))) for v in (inputs, weights)]
    logs = alpha * sizes[0].log() - (1 - alpha) * sizes[1].log()
    return (logs - logs.mean()).exp()


def _observed(
    model: nn.Module, linears: dict[str, nn.Linear], batches: Iterable[Any]
) -> dict[str, Read]:
    """What each layer that ran has read, by its name."""
    found: dict[str, Read] = {}
    alive: list[Tensor] = []  # while a batch runs, so that no two tensors have one identity

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            x = read_by(args, kwargs)
            alive.append(x)
            rows = x.detach().reshape(-1, x.shape[-1])
            size = rows.abs().amax(dim=0)
            read = found.setdefault(name, Read(id(x), size, []))
            read.source, read.largest = id(x), torch.maximum(read.largest, size)
            if sum(map(len, read.rows)) < ROWS:
                read.rows.append(rows[:: max(1, len(rows) // AT_ONCE)][:AT_ONCE].clone())

        return hook

    hooks = [(module, watch(name)) for name, module in linears.items()]
    with torch.no_grad(), evaluating(model), hooked(hooks, before=True):
        for batch in batches:
            alive.clear()
            call(model, split_batch(batch)[0])
    if not found and linears:
        raise DataError("no linear layer ran on the data: there is nothing to even out")
    broken = [name for name, read in found.items() if not bool(read.largest.isfinite().all())]
    if broken:
        raise DataError(f"{broken[0]}: its inputs are not finite")
    return found
