"""Own norms: a gain and a shift for every output channel of a layer, kept for one profile.

Compression moves the mean and the spread of what a layer puts out; later layers expect the
original ones, so errors add up with depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from t3c.nn.hooks import hooked
from t3c.nn.inputs import Inputs, call, evaluating
from t3c.nn.layers import output_rows
from t3c.spec import LayerSpec

LEAST_VALUES = 1024  # of a channel, for its spread to be known well enough
LARGEST_GAIN = 2.0
SILENT = 1e-3  # of the layer's largest spread: channels below it say nothing of their gain


@dataclass(frozen=True)
class OutputMoments:
    """Mean and standard deviation (out,) of each channel of a layer's output."""

    mean: Tensor
    spread: Tensor
    values: int  # of each channel


@dataclass(frozen=True)
class Norm:
    """A gain and a shift (out,) of a layer's output, whose channels come before `axes` others."""

    gain: Tensor
    shift: Tensor
    axes: int = 0

    def __call__(self, out: Tensor) -> Tensor:
        shape = (-1, *([1] * self.axes))
        gain, shift = (value.to(out.device).reshape(shape) for value in (self.gain, self.shift))
        return gain * out + shift


OutputNorms = Mapping[str, Norm]  # by the names of layers


def moments_of(spec: LayerSpec, out: Tensor) -> OutputMoments:
    """Return the moments of a layer's output over samples and positions."""
    rows = output_rows(spec, out).float()
    return OutputMoments(rows.mean(0), rows.std(0, unbiased=False), len(rows))


@torch.no_grad()
def output_moments(
    model: nn.Module, specs: Mapping[str, LayerSpec], inputs: Inputs
) -> dict[str, OutputMoments]:
    """Return the moments of what layers put out, by their names in `specs`, for one batch."""
    found: dict[str, OutputMoments] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
            found[name] = moments_of(specs[name], out)

        return hook

    with evaluating(model), hooked([(model.get_submodule(n), watch(n)) for n in specs]):
        call(model, inputs)
    return found


@torch.no_grad()
def match_norms(
    model: nn.Module,
    specs: Mapping[str, LayerSpec],
    inputs: Inputs,
    wanted: Mapping[str, OutputMoments],
) -> dict[str, Norm]:
    """Return norms that give each layer's output the moments `wanted`, for one batch.

    Layer after layer, each on what those before it put out once they are matched. The model is at
    a profile, or a plain copy of one.
    """
    norms: dict[str, Norm] = {}

    def match(name: str, out: Tensor) -> Tensor:
        axes = len(specs[name].kernel) if specs[name].convolution else 0
        norms[name] = _matching(moments_of(specs[name], out), wanted[name], axes)
        return norms[name](out)

    with evaluating(model), _changed(model, wanted, match):
        call(model, inputs)
    return norms


@contextmanager
def normed(model: nn.Module, norms: OutputNorms) -> Iterator[nn.Module]:
    """Run layers with norms of their own for the length of a `with`."""
    with _changed(model, norms, lambda name, out: norms[name](out)):
        yield model


@contextmanager
def _changed(
    model: nn.Module, names: Iterable[str], change: Callable[[str, Tensor], Tensor]
) -> Iterator[None]:
    """Put `change(name, out)` in the place of what the named layers put out."""

    def hook_of(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
            return change(name, out)

        return hook

    with hooked([(model.get_submodule(name), hook_of(name)) for name in names]):
        yield


def _matching(mine: OutputMoments, wanted: OutputMoments, axes: int) -> Norm:
    """Return the norm that takes some moments to others.

    With few values a channel only the mean is matched. Gains are what half precision holds, in
    which an artifact stores them: model and artifact agree.
    """
    mean, spread = (value.to(mine.mean.device) for value in (wanted.mean, wanted.spread))
    gain = torch.ones_like(mean)
    if mine.values >= LEAST_VALUES:
        heard = torch.minimum(mine.spread / mine.spread.max(), spread / spread.max()) > SILENT
        matched = (spread / mine.spread).clamp(1 / LARGEST_GAIN, LARGEST_GAIN)
        gain = torch.where(heard, matched, gain).half().float()
    return Norm(gain, mean - gain * mine.mean, axes)
