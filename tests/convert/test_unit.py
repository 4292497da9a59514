"""Units: what is tied to one point, by block and by stage."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from t3c.convert import ElasticConfig, LayerPlan, plan_conversion, units
from t3c.errors import SpecError
from t3c.quant.policy import RankTiedBits


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        out: Tensor = self.o(torch.softmax(q @ k.mT, dim=-1) @ v)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        y: Tensor = x + self.down(self.up(x))
        return y


def transformer() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), Block(), Block(), Block(), nn.Linear(64, 40))


def layers_of(model: nn.Module, x: Tensor, **config: object) -> tuple[LayerPlan, ...]:
    return plan_conversion(model, x, ElasticConfig(**config)).layers  # type: ignore[arg-type]


TRANSFORMER = layers_of(transformer(), torch.randn(2, 5, 32))


def test_blocks_are_the_default() -> None:
    found = units(TRANSFORMER)
    assert found == units(TRANSFORMER, tie="block")
    each = [[f"block {n}.attention", f"layer {n}.up", f"layer {n}.down"] for n in (1, 2, 3)]
    assert [unit.name for unit in found] == ["layer 0", *itertools.chain(*each), "layer 4"]


def test_a_stage_ties_what_repeats() -> None:
    found = [
        (unit.name, [p.spec.name for p in unit.layers]) for unit in units(TRANSFORMER, "stage")
    ]
    attention = [f"{n}.attention.{w}" for n in (1, 2, 3) for w in "qkvo"]
    assert found == [
        ("layer 0", ["0"]),
        ("stage 1.attention to 3.attention", attention),
        ("stage 1.up to 3.up", ["1.up", "2.up", "3.up"]),
        ("stage 1.down to 3.down", ["1.down", "2.down", "3.down"]),
        ("layer 4", ["4"]),
    ]


@pytest.mark.parametrize("tied", [None, RankTiedBits(0.8, 1.5)])
def test_layers_of_a_stage_take_the_same_points(tied: RankTiedBits | None) -> None:
    layers = layers_of(transformer(), torch.randn(2, 5, 32), rank_tied_bits=tied, store_ratio=1.0)
    alone = {layer.spec.name: unit for unit in units(layers) for layer in unit.layers}
    stages = units(layers, "stage")
    covered = [layer for unit in stages for layer in unit.layers]
    assert sorted(p.spec.name for p in covered) == sorted(alone)
    for unit in stages:
        # Tying takes no point away, and a point means to a layer what it means without.
        assert unit.points() == alone[unit.layers[0].spec.name].points()
        for point in unit.points():
            mine = unit.layer_points(point)
            assert mine.keys() == {layer.spec.name for layer in unit.layers}
            for name, taken in mine.items():
                assert taken == alone[name].layer_points(point)[name]


def test_only_the_same_is_tied() -> None:
    model = nn.Sequential(
        nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1),
        nn.Conv2d(16, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, padding=1),
        nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1),
    )  # fmt: skip
    layers = layers_of(model, torch.randn(1, 16, 8, 8))
    names = [unit.name for unit in units(layers, "stage")]
    # Strides, sizes and channels tell the others apart.
    assert names == ["stage 0 to 1", "layer 2", "layer 3", "layer 4", "layer 5"]
    for change in ("ranks", "bits", "shares"):
        other = replace(layers[1], **{change: getattr(layers[1], change)[1:]})
        assert [u.name for u in units([layers[0], other], "stage")] == ["layer 0", "layer 1"]
    renamed = replace(layers[1], spec=replace(layers[1].spec, name="1.other"))
    assert [u.name for u in units([layers[0], renamed], "stage")] == ["layer 0", "layer 1.other"]
    blocked = replace(layers[1], block="1")
    assert [u.name for u in units([layers[0], blocked], "stage")] == ["layer 0", "block 1"]


def test_names_are_unique_where_numbers_are_all_that_differs() -> None:
    sizes = [64, 64, 64, 32, 32, 32]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    names = [unit.name for unit in units(layers_of(model, torch.randn(2, 64)), "stage")]
    assert names == ["stage 0 to 1", "layer 2", "stage 3 to 4"]


def test_ties_that_cannot_be() -> None:
    with pytest.raises(SpecError, match="'block' or 'stage', got 'all'"):
        units(TRANSFORMER, tie="all")  # type: ignore[arg-type]
