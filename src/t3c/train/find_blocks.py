"""The parts of a model that can be trained one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from t3c.nn.layers import ElasticLayer
from t3c.train.calls import runs_of

LARGEST = 1 / 3  # of all elastic layers: what one block may hold, if it can be divided


def find_blocks(model: nn.Module) -> list[str]:
    """The names of what to reconstruct one after the other, in order of execution.

    A block is a member of a list or sequence in which its class repeats, at the outermost such
    level that has no member with more than a third of all elastic layers, unless there is no
    further level of members with several; elastic layers in no such block stand for themselves.
    What is never called, or does not answer with a tensor, is no block, but its parts may be.
    """
    ran = runs_of(model)
    limit = LARGEST * _size(model)
    seen: set[int] = set()  # a module may stand under several names

    def walk(name: str, module: nn.Module) -> Iterator[str]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if isinstance(module, ElasticLayer):
            yield name
            return
        members = _members(module)
        if any(_size(member) > limit and _divisible(member) for member in members):
            members = []
        for leaf, child in module.named_children():
            path = f"{name}.{leaf}" if name else leaf
            if path in ran and any(child is member for member in members):
                seen.update(map(id, child.modules()))
                yield path
            else:
                yield from walk(path, child)

    order = {name: index for index, name in enumerate(ran)}
    return sorted(walk("", model), key=lambda name: order.get(name, len(order)))


def _size(module: nn.Module) -> int:
    """How many elastic layers a module holds."""
    return sum(isinstance(m, ElasticLayer) for m in module.modules())


def _members(module: nn.Module) -> list[nn.Module]:
    """Members of a list or sequence that hold elastic layers and are of a class that repeats."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    counts = Counter(type(child) for child in module)
    return [
        child
        for child in module
        if not isinstance(child, ElasticLayer)
        and _size(child)
        and (counts[type(child)] > 1 or len(module) == 1)
    ]


def _divisible(module: nn.Module) -> bool:
    """Whether there is a further level of repeated members, of more than a layer each."""
    return any(_size(member) > 1 for inner in module.modules() for member in _members(inner))
