"""Templates of real plans: places, wishes, and what snapping makes of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lab.allocation.snap import snap
from lab.allocation.templates import ladder, places, template, template_wishes
from t3c.control.menu import Option, chain
from t3c.convert import ElasticConfig, Unit, plan_conversion, units
from t3c.quant.policy import RankTiedBits
from t3c.spec import Level


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        out: Tensor = self.o(torch.softmax(q @ k.mT, dim=-1) @ v)
        return out


def convolutional() -> list[Unit]:
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, 2, 1),
        nn.Conv2d(64, 64, 5, padding=2, groups=64), nn.Conv2d(64, 128, 1),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 96),
    )  # fmt: skip
    return units(plan_conversion(model, torch.randn(2, 3, 16, 16)).layers)


def transformer(config: ElasticConfig | None = None) -> list[Unit]:
    model = nn.Sequential(
        nn.Embedding(50, 64), Attention(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64),
        Attention(64), nn.Linear(64, 64),
    )  # fmt: skip
    return units(plan_conversion(model, torch.randint(0, 50, (2, 7)), config).layers)


def test_places() -> None:
    found = [(p.name, str(p.role), p.depth, p.last) for p in places(convolutional())]
    assert found == [
        ("layer 0", "convolution", 0.0, False),
        ("layer 1", "convolution", 0.2, False),
        ("layer 2", "depthwise", 0.4, False),
        ("layer 3", "convolution", 0.6, False),
        ("layer 6", "linear", 0.8, False),
        ("layer 8", "linear", 1.0, True),
    ]
    found = [(p.name, str(p.role), p.depth, p.last) for p in places(transformer())]
    assert found == [
        ("layer 0", "embedding", 0.0, False),
        ("block 1", "projection", 0.2, False),
        ("layer 2", "linear", 0.4, False),
        ("layer 4", "linear", 0.6, False),
        ("block 5", "projection", 0.8, False),
        ("layer 6", "linear", 1.0, True),
    ]


def test_a_last_unit_that_is_no_classifier() -> None:
    assert not any(place.last for place in places(transformer()[:-1]))
    assert not any(place.last for place in places(convolutional()[:4]))
    (only,) = places(convolutional()[-1:])
    assert (only.depth, only.last) == (0.0, True)


def test_a_block_of_convolutions_is_a_projection() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 3))
    layers = plan_conversion(model, torch.randn(1, 64, 8, 8)).layers
    found = units([replace(layers[0], block="0"), replace(layers[1], block="1"), layers[2]])
    roles = {p.name: str(p.role) for p in places(found)}
    assert roles == {"block 0": "projection", "block 1": "projection", "layer 2": "convolution"}


TIED = ElasticConfig(rank_tied_bits=RankTiedBits(0.8, 1.5))


@pytest.mark.parametrize(
    "found", [convolutional(), transformer(), transformer(TIED)], ids=["cnn", "transformer", "tied"]
)
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_wishes_rise_to_the_top_of_every_unit(found: list[Unit], count: int) -> None:
    wishes = template_wishes(found, count)
    assert len(wishes) == count
    for unit in found:
        points = unit.points()
        mine = [wish[unit.name] for wish in wishes]
        assert (mine[-1].level, mine[-1].bits) == (len(unit.levels), 8)
        for wish in mine:
            assert 1 <= wish.level <= len(unit.levels)
            assert min(p.bits for p in points) <= wish.bits <= 8
        for below, above in itertools.pairwise(mine):
            assert below.level <= above.level
            assert below.bits <= above.bits
            free = len({p.bits for p in points}) > 1
            assert not free or below.bits < above.bits


def test_a_rank_stands_for_the_share_of_its_level() -> None:
    found = transformer(ElasticConfig(store_ratio=1.0))
    for share, wish in zip(ladder(5), template_wishes(found, 5), strict=True):
        wanted = template(places(found), share)
        for unit in found:
            below = int(wish[unit.name].level)
            part = wish[unit.name].level - below
            levels = (*unit.levels, 1.0)
            means = (1 - part) * levels[below - 1] + part * levels[below]
            assert means == pytest.approx(max(wanted[unit.name], unit.levels[0]))
    smallest = template_wishes(found, 5)[0]
    # Attention is asked at 1/8 and 4 bits, the MLP for more.
    assert (smallest["block 1"].level, smallest["block 1"].bits) == (1, 4)
    assert smallest["layer 2"].level > 1
    assert smallest["layer 2"].bits > 4


@pytest.mark.parametrize("found", [convolutional(), transformer()], ids=["cnn", "transformer"])
def test_snapped_wishes_are_nested_profiles(found: list[Unit]) -> None:
    def option(unit: Unit, point: Level) -> Option:
        work = unit.levels[point.level - 1] * point.bits
        return Option(point, work + 0.01 * point.bits, 1 / work)

    chains = {unit.name: chain([option(unit, p) for p in unit.points()]) for unit in found}
    snapped = snap(template_wishes(found, 5), chains)
    assert not snapped.notes
    assert snapped.allocations[-1].points == {n: c[-1].point for n, c in chains.items()}
    costs = [allocation.cost for allocation in snapped.allocations]
    assert costs == sorted(set(costs))
