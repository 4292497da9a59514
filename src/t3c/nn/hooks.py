"""Watch layers while a model runs, and take the adjoints of what they put out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Taken(NamedTuple):
    """One run of a layer: its name, what is kept of its input, zeros added to its output."""

    name: str
    kept: Tensor
    offset: Tensor


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Any]], *, before: bool = False) -> Iterator[None]:
    """Run hooks(module, args, kwargs, out) after their modules, or `before` them, without `out`."""
    handles = [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        if before
        else module.register_forward_hook(hook, with_kwargs=True)
        for module, hook in hooks
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def read_by(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Return what a layer reads, from the arguments of its hook."""
    tensor: Tensor = args[0] if args else kwargs["input"]
    return tensor


@contextmanager
def taking(
    layers: Mapping[str, nn.Module],
    keep: Callable[[str, Tensor], Tensor] = lambda name, read: read.detach(),
) -> Iterator[list[Taken]]:
    """Yield a list that gets an entry for each run of these layers, with what to `keep` of inputs.

    The gradient at the zeros of a run is the adjoint of its output. At the output itself it is not
    to be had: frozen weights give it no gradient, and an activation may work on it in place.
    """
    runs: list[Taken] = []

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any], out: Tensor) -> Tensor:
            offset = torch.zeros_like(out, requires_grad=True)
            runs.append(Taken(name, keep(name, read_by(args, kwargs)), offset))
            return out + offset

        return hook

    with hooked([(layer, watch(name)) for name, layer in layers.items()]):
        yield runs
