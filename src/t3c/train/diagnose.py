"""Which layer made a run stop being finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from t3c.nn.inputs import Inputs, call, tensors
from t3c.nn.view import at
from t3c.spec import Profile


def culprit(model: nn.Module, profile: Profile | None, inputs: Inputs) -> str:
    """Where the first value that is not finite comes from: data, a parameter, or a layer."""
    for value in tensors(inputs):
        if value.is_floating_point() and not bool(value.isfinite().all()):
            return "the batch holds NaN or infinite values"
    for name, parameter in model.named_parameters():
        if not bool(parameter.detach().isfinite().all()):
            return f"parameter {name!r} is not finite"
    for view, where in ((None, "the full view"), (profile, "the sampled profile")):
        layer = _first_layer(model, view, inputs)
        if layer is not None:
            return f"the output of layer {layer!r} is not finite in {where}"
    return "every layer's output is finite: the loss itself is not"


def bad_gradient(model: nn.Module) -> str:
    """The first parameter whose gradient is not finite."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    return "none"


@torch.no_grad()
def _first_layer(model: nn.Module, profile: Profile | None, inputs: Inputs) -> str | None:
    """The first module to finish with an output that is not finite."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(output.isfinite().all()):
                found.append(name)

        return hook

    named = [(n, m) for n, m in model.named_modules() if n]
    handles = [module.register_forward_hook(watch(name)) for name, module in named]
    try:
        with at(model, profile):
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
