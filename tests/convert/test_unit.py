"""Units: what is tied to one point."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from t3c.convert import plan_conversion, units


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


def test_an_attention_block_is_one_unit() -> None:
    found = units(plan_conversion(transformer(), torch.randn(2, 5, 32)).layers)
    each = [[f"block {n}.attention", f"layer {n}.up", f"layer {n}.down"] for n in (1, 2, 3)]
    assert [unit.name for unit in found] == ["layer 0", *itertools.chain(*each), "layer 4"]
