"""Inputs and outputs of any model: a tensor, a tuple or a dict goes in, one tensor comes out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from t3c.errors import DataError

LABELS = ("labels", "label")  # what a batch's target is called where batches are mappings
Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    """The model's output tensor; of an output object its `logits`, else its first element.

    Inputs are taken to the model's device, and the output stays there.
    """
    inputs = moved(inputs, device_of(model))
    if isinstance(inputs, Tensor):
        output = model(inputs)
    elif isinstance(inputs, Mapping):
        output = model(**inputs)
    else:
        output = model(*inputs)
    output = getattr(output, "logits", output)
    if isinstance(output, Mapping) and output:
        output = output.get("logits", next(iter(output.values())))
    while isinstance(output, (tuple, list)):
        output = output[0]
    if not isinstance(output, Tensor):
        raise DataError(f"the model returned {type(output).__name__}, not a tensor")
    return output


def device_of(model: nn.Module) -> torch.device:
    """The device a model is on, by its first parameter or buffer; the CPU if it has none."""
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def moved(inputs: Inputs, device: torch.device) -> Inputs:
    """The inputs on a device; themselves if they are there."""
    if all(value.device == device for value in tensors(inputs)):
        return inputs
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    if isinstance(inputs, Mapping):
        return {name: value.to(device) for name, value in inputs.items()}
    return tuple(value.to(device) for value in inputs)


def tensors(inputs: Inputs) -> list[Tensor]:
    """The input tensors in order."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)


def select(inputs: Inputs, index: Any) -> Inputs:
    """The samples `index` (a slice or an index tensor) of every input."""
    if isinstance(inputs, Tensor):
        return inputs[index]
    if isinstance(inputs, Mapping):
        return {name: value[index] for name, value in inputs.items()}
    return tuple(value[index] for value in inputs)


def join(parts: Sequence[Inputs]) -> Inputs:
    """The samples of several inputs of one form, one after the other."""
    first = parts[0]
    columns = [torch.cat(column) for column in zip(*map(tensors, parts), strict=True)]
    if isinstance(first, Tensor):
        return columns[0]
    return dict(zip(first, columns, strict=True)) if isinstance(first, Mapping) else tuple(columns)


def split_batch(batch: Any) -> tuple[Inputs, Tensor | None]:
    """Return (inputs, target) of a loader's batch.

    A batch is `inputs`, a pair `(inputs, target)`, or a mapping of inputs with the target under
    `labels` or `label`, as Hugging Face's loaders yield them.
    """
    if isinstance(batch, Mapping) and (name := next((n for n in LABELS if n in batch), None)):
        return {key: value for key, value in batch.items() if key != name}, batch[name]
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return _as_inputs(batch[0]), None
    if isinstance(batch, (tuple, list)):
        if len(batch) != 2:
            raise DataError(
                f"a batch is inputs or (inputs, target), got {len(batch)} elements: "
                "nest several inputs in a tuple or a dict"
            )
        return _as_inputs(batch[0]), batch[1]
    return _as_inputs(batch), None


def unlabelled(inputs: Any) -> Any:
    """Return inputs without the target that a mapping may have in it."""
    return split_batch(inputs)[0] if isinstance(inputs, Mapping) else inputs


@torch.no_grad()
def gather(batches: Iterable[Any]) -> Inputs:
    """All inputs of a loader, concatenated along the batch."""
    if isinstance(batches, Tensor | Mapping):
        raise DataError("data is an iterable of batches: give a loader, or [inputs]")
    parts = [split_batch(batch)[0] for batch in batches]
    if not parts or tensors(parts[0])[0].shape[0] == 0:
        raise DataError("the calibration data is empty")
    first = parts[0]
    for part in parts[1:]:
        check_like(part, first, "a batch")
    return join(parts)


def check_like(inputs: Inputs, example: Inputs, what: str, *, texts: bool = False) -> None:
    """Refuse inputs that differ from the example in more than the number of samples.

    Where they may be `texts`, whole numbers (n, tokens) may have another length too.
    """

    def kind(value: Tensor) -> tuple[tuple[object, ...], torch.dtype]:
        text = texts and value.dim() == 2 and not value.is_floating_point()
        return ("tokens",) if text else tuple(value.shape[1:]), value.dtype

    mine, wanted = ([kind(v) for v in tensors(i)] for i in (inputs, example))
    if mine != wanted:
        shown = [", ".join(f"{d} {(*('n',), *s)}" for s, d in side) for side in (mine, wanted)]
        raise DataError(f"{what} has inputs of {shown[0]}, the example's are {shown[1]}")


def batches_of(inputs: Inputs, size: int) -> Iterator[Inputs]:
    """The samples again, in batches of at most `size`."""
    for start in range(0, tensors(inputs)[0].shape[0], size):
        yield select(inputs, slice(start, start + size))


def check_finite(inputs: Inputs, what: str) -> None:
    """Refuse inputs that hold NaN or infinity."""
    for value in tensors(inputs):
        known = value.is_floating_point() and not value.is_meta
        if known and not bool(torch.isfinite(value).all()):
            raise DataError(f"{what} holds NaN or infinite values")


def _as_inputs(value: Any) -> Inputs:
    if isinstance(value, Tensor | Mapping):
        return value
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, Tensor) for v in value):
        return tuple(value)
    raise DataError(
        f"inputs are a tensor, a tuple or a dict of tensors, got {type(value).__name__}"
    )


def check_inputs(inputs: Any, what: str) -> None:
    """Refuse what is no tensor, tuple or dict of tensors with samples, or not finite."""
    try:
        values = tensors(_as_inputs(inputs))
    except DataError as error:
        raise DataError(f"{what}: {error}") from error
    if not values or not all(isinstance(value, Tensor) for value in values):
        raise DataError(f"{what} holds something that is no tensor")
    if any(value.dim() == 0 or value.shape[0] == 0 for value in values):
        raise DataError(f"{what} has no samples")
    check_finite(inputs, what)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def first_samples(batches: Iterable[Inputs], count: int) -> Iterator[Inputs]:
    """Yield batches up to so many samples."""
    for batch in batches:
        if count <= 0:
            return
        yield select(batch, slice(count))
        count -= len(tensors(batch)[0])
