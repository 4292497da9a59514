"""Test whether channels come in units that do not touch one another on the way to their reader."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor, nn

from t3c.nn.replay import Replay

SAMPLES = 4  # channels of a layer that are changed alone
SUBSETS = 6  # random halves of the units that are changed together
COVERED = 0.5  # of the units whose change a reader has to see: a ReLU may hide some
SEED = 1


@dataclass(frozen=True)
class Feed:
    """A layer and the layers and vectors that it alone reads, each with its reader: the consumer
    itself, or a depthwise convolution on the way to it. `others` it reads beside other layers."""

    consumer: str
    layers: Mapping[str, str]
    vectors: Mapping[str, str]
    others: tuple[str, ...]

    @property
    def readers(self) -> set[str]:
        return {*self.layers.values(), self.consumer}


class Found(NamedTuple):
    """How many units there are, and the vectors that have values for each."""

    units: int
    vectors: tuple[str, ...]


class Trial(NamedTuple):
    """Values for one replay, and what readers should read then if it is not what they did."""

    values: dict[str, Tensor]
    wanted: dict[str, Tensor] | None = None


Changed = dict[str, Tensor]  # channels of what layers read, by layer
Tests = Generator[Trial, Changed | None, Found | str]


def depthwise(layer: nn.Module) -> bool:
    """Return whether a layer is a convolution of each channel alone."""
    if not isinstance(layer, nn.Conv1d | nn.Conv2d):
        return False
    return layer.groups == layer.in_channels == layer.out_channels > 1


def spread(units: Tensor, size: int) -> Tensor:
    """Return the channels of units, `size` each, unit by unit.

    >>> spread(torch.tensor([2, 0]), 2).tolist()
    [4, 5, 0, 1]
    """
    return (units[:, None] * size + torch.arange(size)).flatten()


def noise(
    replay: Replay, name: str, generator: torch.Generator, channels: Tensor | None = None
) -> Tensor:
    """Return what a layer made, or a vector, with noise on some channels or all.

    Vectors only grow: a variance stays positive.
    """
    value, axis = replay.value(name), replay.axis(name)
    if name in replay.vectors:
        added = torch.rand(value.shape, generator=generator) * (0.1 + float(value.abs().mean()))
    else:
        size = float(value.std()) if value.numel() > 1 else 0.0
        added = torch.randn(value.shape, generator=generator) * (size or 1.0)
    if channels is not None:
        mask = torch.zeros(value.shape[axis])
        mask[channels] = 1
        added = (added.movedim(axis, -1) * mask).movedim(-1, axis)
    return value + added.to(value)


def examined(replay: Replay, feeds: Iterable[Feed]) -> list[tuple[Feed, Found | str]]:
    """Return for each feed its units, or why there are none.

    Feeds have no source and no reader in common, so a replay serves one trial of each.
    """
    results: list[tuple[Feed, Found | str]] = []
    running = [(feed, _units_of(replay, feed)) for feed in feeds]
    answers: dict[str, Changed | None] = dict.fromkeys((feed.consumer for feed, _ in running))
    while running:
        trials: dict[str, Trial] = {}
        going = []
        for feed, tests in running:
            try:
                trials[feed.consumer] = tests.send(answers[feed.consumer])
                going.append((feed, tests))
            except StopIteration as stop:
                results.append((feed, stop.value))
        running = going
        answers = _tried(replay, trials)
    return results


def _tried(replay: Replay, trials: Mapping[str, Trial]) -> dict[str, Changed | None]:
    """Return what each trial changes, of all in one replay, or one by one if that cannot run."""
    if not trials:
        return {}
    values = {name: v for trial in trials.values() for name, v in trial.values.items()}
    wanted = {name: v for trial in trials.values() for name, v in (trial.wanted or {}).items()}
    seen = replay.run(values, wanted)
    if seen is not None:
        return dict.fromkeys(trials, seen.inputs)
    alone = {name: replay.run(*trial) for name, trial in trials.items()}
    return {name: None if one is None else one.inputs for name, one in alone.items()}


def _units_of(replay: Replay, feed: Feed) -> Tests:
    """Find the most units that hold on their own what single channels reach, and test them."""
    generator = torch.Generator().manual_seed(SEED)
    reached: list[tuple[str, int, Tensor]] = []
    for name, reader in feed.layers.items():
        size = replay.size(name)
        between = torch.randint(size, (SAMPLES - 2,), generator=generator).tolist()
        for channel in dict.fromkeys((0, size - 1, *between)):
            value = noise(replay, name, generator, torch.tensor([channel]))
            changed = yield Trial({name: value})
            if changed is None:
                return "the model does not run with other values of one of its channels"
            if reader in changed:
                reached.append((name, channel, changed[reader].nonzero().flatten()))
    sizes = [replay.size(n) for n in feed.layers] + [replay.width(n) for n in feed.readers]
    reason = f"its channels mix, or change places, on the way to {feed.consumer}"
    for units in _divisors(gcd(*sizes)):
        if not all(_inside(replay, feed, units, *one) for one in reached):
            continue
        vectors: list[str] = []
        for name in feed.vectors:
            if replay.size(name) % units == 0 and (
                yield from _apart(replay, feed, units, (name,), generator, 1, 1 / units)
            ):
                vectors.append(name)
        names = (*feed.layers, *vectors)
        if not (yield from _apart(replay, feed, units, names, generator, SUBSETS, COVERED)):
            continue
        if (yield from _alike(replay, feed.readers, units, names, generator)):
            return Found(units, tuple(vectors))
        also = feed.others[0] if feed.others else "something else"
        reason = f"{feed.consumer} reads {also} too, which is not in the same order"
    return reason


def _inside(
    replay: Replay, feed: Feed, units: int, name: str, channel: int, reached: Tensor
) -> bool:
    """Return whether a channel reaches the channels of its own unit alone."""
    rows = replay.size(name) // units
    columns = replay.width(feed.layers[name]) // units
    return bool((reached // columns == channel // rows).all())


def _apart(
    replay: Replay, feed: Feed, units: int, names: Iterable[str], generator: torch.Generator,
    rounds: int, share: float,
) -> Generator[Trial, Changed | None, bool]:  # fmt: skip
    """Change sources in random halves of the units: no reader may see it in the others.

    Each reader has to see it in at least a `share` of all units, over the rounds.
    """
    readers = {r for n, r in (*feed.layers.items(), *feed.vectors.items()) if n in names}
    met = {reader: torch.zeros(units, dtype=torch.bool) for reader in readers}
    for _ in range(rounds):
        half = torch.randperm(units, generator=generator)[: (units + 1) // 2]
        values = {}
        for name in names:
            channels = spread(half, replay.size(name) // units)
            values[name] = noise(replay, name, generator, channels)
        changed = yield Trial(values)
        if changed is None:
            return False
        for reader in readers & changed.keys():
            met[reader] |= changed[reader].view(units, -1).any(dim=1)
            outside = torch.ones(units, dtype=torch.bool)
            outside[half] = False
            if bool((changed[reader].view(units, -1).any(dim=1) & outside).any()):
                return False
    return all(int(seen.sum()) >= share * units for seen in met.values())


def _alike(
    replay: Replay, readers: set[str], units: int, names: Iterable[str], generator: torch.Generator
) -> Generator[Trial, Changed | None, bool]:
    """Permute the units of all sources: what the readers read has to be permuted likewise.

    A turn of all and an exchange of two make up every permutation; one more is at random.
    """
    turned = torch.arange(units).roll(1)
    exchanged = torch.arange(units)
    exchanged[:2] = torch.tensor([1, 0])
    for order in (turned, exchanged, torch.randperm(units, generator=generator)):
        values = {name: _permuted(replay, name, replay.value(name), order) for name in names}
        wanted = {name: _permuted(replay, name, replay.reads[name][0], order) for name in readers}
        changed = yield Trial(values, wanted)
        if changed is None or changed.keys() & readers:
            return False
    return True


def _permuted(replay: Replay, name: str, value: Tensor, order: Tensor) -> Tensor:
    """Return what a layer reads or makes, or a vector, with its units in another order."""
    axis = replay.axis(name)
    channels = spread(order, value.shape[axis] // len(order))
    return value.index_select(axis, channels.to(value.device))


def _divisors(number: int) -> list[int]:
    """Return the divisors over 1, the largest first."""
    return [n for n in range(number, 1, -1) if number % n == 0]
