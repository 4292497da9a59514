"""Run what a network does between its layers, while the layers give what they once gave."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from t3c.errors import ConvertError
from t3c.nn.hooks import read_by
from t3c.nn.inputs import Inputs
from t3c.nn.layers import elastic_type
from t3c.nn.observe import run_example
from t3c.spec import Kind

SAME = 1e-6  # of a channel's largest value: what rounding leaves of an unchanged input
MOVED = 1e-4  # the same where values have moved: kernels round by where a value lies in memory
FLOOR = 1e-3  # how much of these tolerances is of the largest channel's value
KINDS = (Kind.LINEAR, Kind.CONV1D, Kind.CONV2D)
Forward = Callable[..., Tensor]


class Seen(NamedTuple):
    """Hold what a replay changed: channels (in,) of what layers read, by layer, and the output."""

    inputs: dict[str, Tensor]
    output: bool


class Replay:
    """A network with the inputs and outputs of its linear and convolution layers on an example.

    `reads` and `makes` hold one tensor for each run of a layer; layers are in order of execution.
    `vectors` are the parameters and buffers of other modules with a single axis of more than one.
    """

    def __init__(self, model: nn.Module, example: Inputs) -> None:
        self.model, self.example = model, example
        self.reads: dict[str, list[Tensor]] = {}
        self.makes: dict[str, list[Tensor]] = {}
        self.layers = {n: m for n, m in model.named_modules() if is_layer(m)}
        self.vectors = _vectors(model, {id(m) for m in self.layers.values()})
        with _forwards(self.layers, self._record):
            self.output = run_example(model, example).clone()

    def value(self, name: str) -> Tensor:
        """Return what a layer made in its only run, or a vector."""
        return self.vectors[name] if name in self.vectors else self.makes[name][0]

    def axis(self, name: str) -> int:
        """Return the axis of channels of a layer's tensors, or of a vector."""
        if name in self.vectors:
            shape = self.vectors[name].shape
            return shape.index(max(shape))
        return channel_axis(self.layers[name])

    def size(self, name: str) -> int:
        """Return how many channels a layer makes, or values a vector has."""
        return self.value(name).shape[self.axis(name)]

    def width(self, name: str) -> int:
        """Return how many channels a layer reads."""
        return self.reads[name][0].shape[self.axis(name)]

    def run(
        self, values: Mapping[str, Tensor], wanted: Mapping[str, Tensor] | None = None
    ) -> Seen | None:
        """Run with other values of layers' outputs and of vectors, and say what that changed.

        What a layer reads is compared with `wanted` of it, or else with what it has read. None if
        the model does not run with these values.
        """
        wanted = wanted or {}
        changed: dict[str, Tensor] = {}
        runs = dict.fromkeys(self.layers, 0)

        def replayed(name: str, _: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Tensor:
                x, run = read_by(args, kwargs), runs[name]
                runs[name] += 1
                tolerance = MOVED if name in wanted else SAME
                before = wanted.get(name, self.reads[name][run])
                mask = _differing(x, before, self.axis(name), tolerance)
                if mask is not None:
                    changed[name] = changed[name] | mask if name in changed else mask
                # A copy: what follows may work on it in place.
                return values.get(name, self.makes[name][run]).clone()

            return forward

        vectors = {name: self.vectors[name] for name in values if name in self.vectors}
        kept = {name: vector.clone() for name, vector in vectors.items()}
        try:
            for name, vector in vectors.items():
                vector.copy_(values[name])
            with _forwards(self.layers, replayed):
                output = run_example(self.model, self.example)
        except ConvertError:
            return None
        finally:
            for name, vector in vectors.items():
                vector.copy_(kept[name])
        flat, before = output.reshape(1, -1), self.output.reshape(1, -1)
        return Seen(changed, _differing(flat, before, 0, SAME) is not None)

    def _record(self, name: str, plain: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            # Copies: what follows may work on either in place.
            self.reads.setdefault(name, []).append(read_by(args, kwargs).clone())
            out = plain(*args, **kwargs)
            self.makes.setdefault(name, []).append(out.clone())
            return out

        return forward


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a plain linear or convolution layer."""
    elastic = elastic_type(module)
    return elastic is not None and elastic.kind in KINDS


def channel_axis(module: nn.Module) -> int:
    """Return the axis of channels in what a layer reads and makes."""
    kernel = module.kernel_size if isinstance(module, nn.Conv1d | nn.Conv2d) else ()
    return -1 - len(kernel)


def _vectors(model: nn.Module, layers: set[int]) -> dict[str, Tensor]:
    """Return vectors by name in order of modules, those of `layers` (ids) left out."""
    found: dict[str, Tensor] = {}
    known = {id(p) for m in model.modules() if id(m) in layers for p in m.parameters()}
    for path, module in model.named_modules():
        mine = (module.named_parameters(path, False), module.named_buffers(path, False))
        for name, value in itertools.chain(*mine):
            if id(value) not in known and _is_vector(value):
                found[name] = value
            known.add(id(value))
    return found


def _is_vector(value: Tensor) -> bool:
    single = value.dim() > 0 and value.numel() == max(value.shape) > 1
    return single and value.is_floating_point() and value.is_contiguous()


@contextmanager
def _forwards(
    layers: Mapping[str, nn.Module], made: Callable[[str, Forward], Forward]
) -> Iterator[None]:
    """Give layers the forwards made of (name, own forward), for the length of a `with`."""
    before = {name: layer.__dict__.get("forward") for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.__dict__["forward"] = made(name, layer.forward)
        yield
    finally:
        for name, layer in layers.items():
            layer.__dict__.pop("forward", None)
            if before[name] is not None:
                layer.__dict__["forward"] = before[name]


def _differing(x: Tensor, before: Tensor, axis: int, tolerance: float) -> Tensor | None:
    """Return which channels of x differ by more than rounding; None if none does."""
    if x.shape != before.shape:
        return torch.ones(before.shape[axis], dtype=torch.bool)
    if torch.equal(x, before):
        return None
    gap, size = (
        value.abs().movedim(axis, 0).flatten(1).amax(dim=1) if value.numel() else value.new_zeros(1)
        for value in (x - before, before)
    )
    # Not of `gap > ...`: of what is not a number no size is known.
    differs = ~(gap <= tolerance * (size + FLOOR * size.max()))
    return differs.cpu() if bool(differs.any()) else None
