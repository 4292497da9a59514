"""Own norms: a gain and a shift for every channel that a layer puts out, for one profile alone.

Compressed weights put out other means and spreads than the original's, which the layers behind
them were made for, and the difference grows from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from t3c.nn.hooks import hooked
from t3c.nn.inputs import Inputs, call, evaluating
from t3c.nn.layers import output_rows
from t3c.nn.view import at, elastic_layers
from t3c.spec import LayerSpec, Profile

LEAST_VALUES = 1024  # of a channel, for its spread to be known well enough
LARGEST_GAIN = 2.0


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation (out,) of each channel of a layer's output."""

    mean: Tensor
    spread: Tensor
    values: int  # of each channel


@dataclass(frozen=True)
class Norm:
    """A gain and a shift (out,) of a layer's output."""

    gain: Tensor
    shift: Tensor

    def __call__(self, spec: LayerSpec, out: Tensor) -> Tensor:
        gain, shift = (along_outputs(spec, v.to(out.device)) for v in (self.gain, self.shift))
        return gain * out + shift


Norms = Mapping[str, Norm]  # by the names of layers


def along_outputs(spec: LayerSpec, value: Tensor) -> Tensor:
    """Return a value (out,) of each channel in the shape that a layer's output broadcasts with."""
    return value.reshape(-1, *([1] * len(spec.kernel))) if spec.convolution else value


def moments_of(spec: LayerSpec, out: Tensor) -> Moments:
    """Return the moments of a layer's output over samples and positions."""
    rows = output_rows(spec, out).float()
    return Moments(rows.mean(0), rows.std(0, unbiased=False), len(rows))


@torch.no_grad()
def output_moments(
    model: nn.Module, specs: Mapping[str, LayerSpec], inputs: Inputs
) -> dict[str, Moments]:
    """Return the moments of what layers put out, by their names in `specs`, for one batch."""
    found: dict[str, Moments] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
            found[name] = moments_of(specs[name], out)

        return hook

    with evaluating(model), hooked([(model.get_submodule(n), watch(n)) for n in specs]):
        call(model, inputs)
    return found


@torch.no_grad()
def match_norms(
    model: nn.Module, profile: Profile, inputs: Inputs, wanted: Mapping[str, Moments]
) -> dict[str, Norm]:
    """Return norms that give each layer's output at a profile the moments `wanted`, for one batch.

    Layer after layer, each on what those before it put out once they are matched.
    """
    norms: dict[str, Norm] = {}

    def match(name: str, spec: LayerSpec, out: Tensor) -> Tensor:
        norms[name] = _matching(moments_of(spec, out), wanted[name])
        return norms[name](spec, out)

    with evaluating(model), at(model, profile), _changed(model, wanted, match):
        call(model, inputs)
    return norms


@contextmanager
def normed(model: nn.Module, norms: Norms) -> Iterator[nn.Module]:
    """Run layers with norms of their own for the length of a `with`."""
    with _changed(model, norms, lambda name, spec, out: norms[name](spec, out)):
        yield model


@contextmanager
def _changed(
    model: nn.Module, names: Collection[str], change: Callable[[str, LayerSpec, Tensor], Tensor]
) -> Iterator[None]:
    """Put `change(name, spec, out)` in the place of what the named layers put out."""

    def hook_of(name: str) -> Any:
        spec = layers[name].elastic.spec

        def hook(_: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
            return change(name, spec, out)

        return hook

    layers = elastic_layers(model)
    with hooked([(layers[name], hook_of(name)) for name in names]):
        yield


def _matching(mine: Moments, wanted: Moments) -> Norm:
    """Return the norm that takes some moments to others; of few values the mean alone."""
    gain = torch.ones_like(mine.mean)
    if mine.values >= LEAST_VALUES:
        gain = wanted.spread / mine.spread.clamp_min(1e-12)
        gain = gain.clamp(1 / LARGEST_GAIN, LARGEST_GAIN)
    return Norm(gain, wanted.mean - gain * mine.mean)
