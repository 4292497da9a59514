"""What a model shows when it runs: sizes of its layers' inputs and outputs, moments of inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from t3c.errors import ConvertError
from t3c.nn.inputs import Inputs, call, check_finite, split_batch, tensors
from t3c.spec import Kind, LayerSpec

Sizes = tuple[tuple[int, int], tuple[int, int]]
KINDS: dict[type[nn.Module], Kind] = {nn.Linear: Kind.LINEAR, nn.Conv2d: Kind.CONV2D}


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of layer a module is, if it is one that can be elastic."""
    return KINDS.get(type(module))


@torch.no_grad()
def observe_sizes(model: nn.Module, example: Inputs) -> dict[str, list[Sizes]]:
    """(input, output) size a sample of each layer, for every time the example reaches it."""
    seen: dict[str, list[Sizes]] = {}
    batch = tensors(example)[0].shape[0]

    def watch(name: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            if isinstance(module, nn.Conv2d):
                sizes = ((x.shape[2], x.shape[3]) for x in (args[0], out))
            else:
                sizes = ((max(1, x.numel() // x.shape[-1] // batch), 1) for x in (args[0], out))
            into, outof = sizes
            seen.setdefault(name, []).append((into, outof))

        return module.register_forward_hook(hook)

    hooks = [watch(n, m) for n, m in model.named_modules() if kind_of(m) is not None]
    training = model.training
    try:
        call(model.eval(), example)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ConvertError(f"the model does not take the example: {error}") from error
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return seen


@torch.no_grad()
def observe_moments(
    model: nn.Module, specs: Sequence[LayerSpec], batches: Iterable[Any]
) -> dict[str, Tensor]:
    """E[a a^T] (in, in) over the input channels of each layer."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(spec: LayerSpec) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].movedim(1, -1) if spec.kind is Kind.CONV2D else args[0]
            rows = x.reshape(-1, spec.in_channels).double()
            sums[spec.name] = sums.get(spec.name, torch.zeros(())) + rows.T @ rows
            counts[spec.name] = counts.get(spec.name, 0) + len(rows)

        return model.get_submodule(spec.name).register_forward_pre_hook(hook)

    hooks = [watch(spec) for spec in specs]
    seen = False
    try:
        for batch in batches:
            inputs, _ = split_batch(batch)
            check_finite(inputs, "the calibration data")
            call(model, inputs)
            seen = True
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        raise ConvertError("the calibration data is empty")
    return {name: total / counts[name] for name, total in sums.items()}
