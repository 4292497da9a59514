"""Views of an elastic model: at a profile for a while, or as a plain dense copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from t3c.errors import SpecError
from t3c.nn.layers import ElasticLayer
from t3c.spec import Kind, Profile


def elastic_layers(model: nn.Module) -> dict[str, ElasticLayer]:
    """The elastic layers of a model by name, in order."""
    return {n: m for n, m in model.named_modules() if isinstance(m, ElasticLayer)}


@contextmanager
def at(model: nn.Module, profile: Profile | None) -> Iterator[nn.Module]:
    """The model at a profile, for the length of a `with`; None is full rank in float.

    >>> with at(model, profile):  # doctest: +SKIP
    ...     z = model(x)
    """
    layers = elastic_layers(model)
    if profile is not None and profile.points.keys() != layers.keys():
        odd = sorted(profile.points.keys() ^ layers.keys())
        raise SpecError(f"profile {profile.name!r} does not fit the model: {', '.join(odd)}")
    before = {name: layer.point for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.point = None if profile is None else profile.points[name]
        yield model
    finally:
        for name, layer in layers.items():
            layer.point = before[name]


@torch.no_grad()
def dense_copy(model: nn.Module, profile: Profile | None = None) -> nn.Module:
    """A plain copy without elastic layers, weights composed at the profile (None: full float)."""
    plain = copy.deepcopy(model)
    for name, layer in elastic_layers(plain).items():
        weight = layer.weight_at(None if profile is None else profile.points[name])
        replace_(plain, name, _dense_module(layer, weight))
    return plain


def replace_(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the submodule `name`."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _dense_module(layer: ElasticLayer, weight: torch.Tensor) -> nn.Module:
    s, bias = layer.spec, layer.bias is not None
    module: nn.Linear | nn.Conv2d
    if s.kind is Kind.LINEAR:
        module = nn.Linear(s.in_channels, s.out_channels, bias, device="meta")
    else:
        module = nn.Conv2d(
            s.in_channels, s.out_channels, s.kernel, s.stride, s.padding, s.dilation, s.groups,
            bias, device="meta",
        )  # fmt: skip
    # Strides that are not the usual ones would be traced as if they could vary.
    module.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    module.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
    return module.train(layer.training)
