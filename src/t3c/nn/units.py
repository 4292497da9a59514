"""Find units of channels that can be left out of a network, by how it behaves, and reorder them.

A layer's channels can go where a single other layer reads them and nothing in between mixes units:
the neurons of an FFN, the inner channels of a bottleneck, the heads of an attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from t3c.errors import SpecError
from t3c.nn.inputs import Inputs, check_inputs, evaluating, select, unlabelled
from t3c.nn.observe import run_example
from t3c.nn.replay import Replay, Seen
from t3c.nn.separate import Feed, Found, depthwise, examined, noise, spread

BATCH = 2  # samples of the example that are run
SAME = 1e-4  # how far the output may be off, relative, once units have changed places
NAMED = 3  # layers that a reason names
SEED = 0
UNREAD = "no layer reads it"


@dataclass(frozen=True)
class Member:
    """Name a layer and its channels of a unit u: it makes outputs u*rows .. (u+1)*rows, and reads
    inputs u*columns .. (u+1)*columns; 0 where the layer has no such side."""

    layer: str
    rows: int = 0
    columns: int = 0


@dataclass(frozen=True)
class UnitGroup:
    """Channels between layers that can be left out together.

    The name is that of the layer that reads them, the last of the members, which are in order of
    execution. A depthwise convolution in between has rows and columns. `vectors` are parameters and
    buffers of other modules with the same number of values for each unit, in order.
    """

    name: str
    units: int
    members: tuple[Member, ...]
    vectors: tuple[str, ...] = ()


@torch.no_grad()
def find_units(
    model: nn.Module, example: Inputs
) -> tuple[tuple[UnitGroup, ...], tuple[tuple[str, str], ...]]:
    """Return the groups of a model, and (layer, reason) of layers whose outputs are in none.

    The model is in canonical form; it is as it was afterwards. The example has to show what layers
    do: more than one token, images of more than one pixel.
    """
    check_inputs(unlabelled(example), "the example")
    example = select(unlabelled(example), slice(0, BATCH))
    with evaluating(model):
        replay = Replay(model, example)
        reasons = refusals(replay)
        feeds = _feeds(replay, reasons)
        found = examined(replay, feeds)
        groups = [_group(replay, feed, one) for feed, one in found if isinstance(one, Found)]
        failed = {feed.consumer: one for feed, one in found if isinstance(one, str)}
        moved = _moved(replay, groups)
        failed |= {g.name: "a permutation of its channels changes the output" for g in moved}
    for feed in feeds:
        if feed.consumer in failed:
            reasons |= dict.fromkeys(feed.layers, failed[feed.consumer])
    order = {name: place for place, name in enumerate(replay.makes)}
    kept = sorted((g for g in groups if g not in moved), key=lambda group: order[group.name])
    return tuple(kept), tuple((n, reasons[n]) for n in _in_order(replay) if n in reasons)


@torch.no_grad()
def permute_(model: nn.Module, group: UnitGroup, order: Tensor) -> None:
    """Reorder units in place: unit `order[i]` of before is unit i afterwards.

    >>> permute_(model, group, importance.argsort(descending=True))  # doctest: +SKIP
    """
    if not torch.equal(order.cpu().sort().values, torch.arange(group.units)):
        raise SpecError(f"group {group.name!r}: the order has to hold each of 0..{group.units - 1}")
    for member in group.members:
        layer = model.get_submodule(member.layer)
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        if member.rows:
            rows = spread(order, member.rows).to(weight.device)
            weight.copy_(weight[rows])
            if isinstance(bias, Tensor):
                bias.copy_(bias[rows])
        if member.columns and not depthwise(layer):
            weight.copy_(weight[:, spread(order, member.columns).to(weight.device)])
    for name in group.vectors:
        owner, _, leaf = name.rpartition(".")
        flat = getattr(model.get_submodule(owner), leaf).view(-1)
        flat.copy_(flat[spread(order, flat.numel() // group.units).to(flat.device)])


def refusals(replay: Replay) -> dict[str, str]:
    """Return why layers cannot be members of a group, by their names."""
    owners: dict[int, set[str]] = {}
    for path, module in replay.model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(path or "the model itself")
    again = replay.run({})
    reasons: dict[str, str] = {}
    for name, layer in replay.layers.items():
        own, runs = set(layer._parameters), len(replay.makes.get(name, ()))
        others = {o for p in layer.parameters() for o in owners[id(p)]} - {name}
        if not runs:
            reasons[name] = "the example does not reach it"
        elif runs > 1:
            reasons[name] = f"it runs {runs} times"
        elif "weight" not in own or ("bias" not in own and layer.bias is not None):
            reasons[name] = "its weight or bias is computed from others"
        elif own - {"weight", "bias"} or any(True for _ in layer.children()):
            reasons[name] = f"{type(layer).__name__} has more than a weight and a bias"
        elif others:
            reasons[name] = f"its weight or bias is also that of {_list(sorted(others))}"
        elif layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__:
            reasons[name] = "it has hooks of its own"
        elif again is None or name in again.inputs:
            reasons[name] = "what it reads differs from run to run"
        elif isinstance(layer, nn.Conv1d | nn.Conv2d) and layer.groups > 1 and not depthwise(layer):
            reasons[name] = f"it is a convolution in {layer.groups} groups"
    return reasons


def _feeds(replay: Replay, reasons: dict[str, str]) -> list[Feed]:
    """Return the layers that are the only readers of others, with these; add to the reasons."""
    generator, refused = torch.Generator().manual_seed(SEED), dict(reasons)
    only: dict[str, str] = {}  # the reader of each source that has a single one
    others: dict[str, list[str]] = {}  # by reader, the layers that others read too
    layers_alone = [(name,) for name in _in_order(replay) if name not in refused]
    for names in (*layers_alone, *_together(replay)):
        seen = replay.run({name: noise(replay, name, generator) for name in names})
        readers = [] if seen is None else [n for n in _in_order(replay) if n in seen.inputs]
        reason = _no_reader(seen, readers, refused)
        if not reason:
            only |= dict.fromkeys(names, readers[0])
        elif names[0] in replay.layers:
            reasons[names[0]] = reason
            for reader in readers:
                others.setdefault(reader, []).append(names[0])
    feeds = []
    for consumer in _in_order(replay):
        if consumer in only.values() and not depthwise(replay.layers[consumer]):
            layers = _upstream(replay, only, consumer)
            within = dict.fromkeys((*layers.values(), consumer))
            vectors = {n: r for n, r in only.items() if n in replay.vectors and r in within}
            also = [n for r in within for n in others.get(r, ())]
            feeds.append(Feed(consumer, layers, vectors, tuple(also)))
    fed = {name for feed in feeds for name in feed.layers}
    for name in only.keys() & replay.layers.keys() - fed:
        ends = depthwise(replay.layers[only[name]])
        reasons[name] = (
            f"{only[name]} reads it, whose own channels cannot be left out"
            if ends
            else "it is depthwise, and what it reads is not of a layer that it alone reads"
        )
    for feed in feeds:
        idle = _idle_beside(replay, feed, reasons)
        if idle:
            reason = f"{idle} runs beside it and has no effect: give an example with more positions"
            reasons |= dict.fromkeys(feed.layers, reason)
    return [feed for feed in feeds if feed.layers and not feed.layers.keys() & reasons.keys()]


def _idle_beside(replay: Replay, feed: Feed, reasons: Mapping[str, str]) -> str:
    """Return a layer without effect that runs with those of a feed: queries and keys of a single
    token have none, and values then look like units of their own. Empty if there is none."""
    before = list(replay.makes)[: list(replay.makes).index(feed.consumer)]
    for name in reversed(before):
        if reasons.get(name) == UNREAD:
            return name
        if name not in feed.layers:
            break
    return ""


def _together(replay: Replay) -> list[tuple[str, ...]]:
    """Return the vectors that are changed together: those of a norm and the like stand in one
    place, those of modules with others inside may stand anywhere."""
    together: dict[str, list[str]] = {}
    for name in replay.vectors:
        owner = name.rpartition(".")[0]
        leaf = not any(True for _ in replay.model.get_submodule(owner).children())
        together.setdefault(owner if leaf else name, []).append(name)
    return [tuple(names) for names in together.values()]


def _no_reader(seen: Seen | None, readers: list[str], refused: Mapping[str, str]) -> str:
    """Return why what was changed has no single layer that can read it; empty if it has one."""
    if seen is None:
        return "the model does not run with other values of its output"
    if seen.output:
        return "the model's output depends on it directly"
    if not readers:
        return UNREAD
    if len(readers) > 1:
        return f"several layers read it: {_list(readers)}"
    blocked = refused.get(readers[0], "")
    return f"{readers[0]} reads it: {blocked}" if blocked else ""


def _upstream(replay: Replay, only: Mapping[str, str], reader: str) -> dict[str, str]:
    """Return the layers that feed a reader with their readers, through depthwise convolutions."""
    layers: dict[str, str] = {}
    for name in _in_order(replay):
        if only.get(name) != reader:
            continue
        before = _upstream(replay, only, name) if depthwise(replay.layers[name]) else {}
        if before or not depthwise(replay.layers[name]):
            layers |= before | {name: reader}
    return layers


def _group(replay: Replay, feed: Feed, found: Found) -> UnitGroup:
    names = {*feed.layers, feed.consumer}
    members = (
        Member(
            name,
            replay.size(name) // found.units if name in feed.layers else 0,
            replay.width(name) // found.units if name in feed.readers else 0,
        )
        for name in _in_order(replay)
        if name in names
    )
    return UnitGroup(feed.consumer, found.units, tuple(members), found.vectors)


def _moved(replay: Replay, groups: list[UnitGroup]) -> list[UnitGroup]:
    """Return the groups whose permutation changes the model's output: tried together, then each."""
    if not groups or _keeps(replay, groups):
        return []
    return [group for group in groups if not _keeps(replay, [group])]


def _keeps(replay: Replay, groups: list[UnitGroup]) -> bool:
    generator = torch.Generator().manual_seed(SEED)
    orders = [torch.randperm(group.units, generator=generator) for group in groups]
    for group, order in zip(groups, orders, strict=True):
        permute_(replay.model, group, order)
    try:
        output = run_example(replay.model, replay.example)
    finally:
        for group, order in zip(groups, orders, strict=True):
            permute_(replay.model, group, order.argsort())
    return bool((output - replay.output).norm() <= SAME * replay.output.norm())


def _in_order(replay: Replay) -> Iterator[str]:
    """Yield the layers in order of execution, then those that did not run."""
    yield from replay.makes
    yield from (name for name in replay.layers if name not in replay.makes)


def _list(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
