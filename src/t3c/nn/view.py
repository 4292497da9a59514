"""Views of an elastic model: at a profile for a while, or as a plain dense copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from t3c.errors import SpecError
from t3c.nn.layers import ElasticLayer
from t3c.nn.weight import ElasticWeight, Relaxation
from t3c.spec import Profile


def elastic_weights(model: nn.Module) -> dict[str, ElasticWeight]:
    """The elastic weights of a model by name, in order; one that several layers share is one."""
    return {m.spec.name: m for m in model.modules() if isinstance(m, ElasticWeight)}


def elastic_layers(model: nn.Module) -> dict[str, ElasticLayer]:
    """The layers of a model that run elastic weights, by their own names."""
    return {n: m for n, m in model.named_modules() if isinstance(m, ElasticLayer)}


@contextmanager
def at(
    model: nn.Module, profile: Profile | None, relaxation: Relaxation | None = None
) -> Iterator[nn.Module]:
    """The model at a profile, for the length of a `with`; None is full rank in float.

    With a relaxation, ranks are chosen by soft masks and rounding may be stochastic: for training.

    >>> with at(model, profile):  # doctest: +SKIP
    ...     z = model(x)
    """
    weights = elastic_weights(model)
    if profile is not None and profile.points.keys() != weights.keys():
        odd = sorted(profile.points.keys() ^ weights.keys())
        raise SpecError(f"profile {profile.name!r} does not fit the model: {', '.join(odd)}")
    before = {name: (weight.point, weight.relaxation) for name, weight in weights.items()}
    try:
        for name, weight in weights.items():
            weight.point = None if profile is None else profile.points[name]
            weight.relaxation = relaxation
        yield model
    finally:
        for name, weight in weights.items():
            weight.point, weight.relaxation = before[name]


@torch.no_grad()
def dense_copy(model: nn.Module, profile: Profile | None = None) -> nn.Module:
    """A plain copy without elastic layers, weights composed at the profile.

    With None they are those of full rank in float, which stay the model's own: a large model fits
    in memory once more, but hardly twice.
    """
    shared = [p for layer in elastic_layers(model).values() for p in layer.elastic.parameters()]
    plain = copy.deepcopy(model, {id(parameter): parameter for parameter in shared})
    made: dict[str, nn.Parameter] = {}
    for name, layer in elastic_layers(plain).items():
        owner = layer.elastic.spec.name
        if owner not in made:
            weight = layer.elastic.weight_at(None if profile is None else profile.points[owner])
            # Strides that are not the usual ones would be traced as if they could vary.
            dense = weight.detach().contiguous()
            made[owner] = nn.Parameter(dense)
        module = layer.plain(made[owner]).train(layer.training)
        for alias in _aliases(plain, layer, name):
            replace_(plain, alias, module)
    return plain


def on_cpu(model: nn.Module) -> nn.Module:
    """The model itself if all of it is on the CPU, else a copy that is."""
    held: list[tuple[Tensor, Tensor]] = [
        *((p, nn.Parameter(p.detach().cpu(), p.requires_grad)) for p in model.parameters()),
        *((b, b.detach().cpu()) for b in model.buffers()),
    ]
    if all(there.device.type == "cpu" for there, _ in held):
        return model
    return copy.deepcopy(model, {id(there): here for there, here in held})


def group_(model: nn.Module, grouped: bool) -> int:
    """Give groups of columns grids of their own, or each row one; how many weights that changed.

    Kernels of float activations take scales of groups, those of 8 bits one a row.
    """
    return sum(weight.group_(grouped) for weight in elastic_weights(model).values())


@contextmanager
def grouped(model: nn.Module, grouped: bool) -> Iterator[nn.Module]:
    """The model with grids of groups, or without, for the length of a `with`."""
    weights = elastic_weights(model).values()
    before = [(weight.group, copy.deepcopy(weight.gains)) for weight in weights]
    try:
        group_(model, grouped)
        yield model
    finally:
        with torch.no_grad():
            for weight, (group, gains) in zip(weights, before, strict=True):
                weight.group = group
                for mine, kept in zip(weight.gains, gains, strict=True):
                    mine.copy_(kept)


def sort_(model: nn.Module) -> int:
    """Put every weight's ranks in the order of their strength; how many weights that changed."""
    return sum(weight.sort_() for weight in elastic_weights(model).values())


def replace_(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the submodule `name`."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _aliases(model: nn.Module, module: nn.Module, name: str) -> list[str]:
    """All names a module stands under."""
    return [n for n, m in model.named_modules(remove_duplicate=False) if m is module] or [name]
