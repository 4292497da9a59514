"""Codes of a model settled on its data: views drift less, tables and the original stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from t3c.convert import elasticize_, settle_, state_of
from t3c.errors import ConvertError, SpecError
from t3c.nn.view import at, elastic_weights
from t3c.spec import LayerPoint, Profile


class Words(nn.Module):
    """A table, two layers, and a head that is the table again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.up, self.down = nn.Linear(32, 96), nn.Linear(96, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        out: Tensor = self.head(x + self.down(torch.relu(self.up(x))))
        return out


def model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    made, ids = Words().eval(), torch.randint(0, 64, (48, 12))
    elasticize_(made, ids[:2], calibration=[ids])
    return made, ids


def drift(made: nn.Module, ids: Tensor, bits: int) -> float:
    plan = state_of(made).plan
    points = {
        p.spec.name: LayerPoint(p.ranks[-1], 8 if p.spec.name in ("table", "head") else bits)
        for p in plan.layers
    }
    with torch.no_grad(), at(made, Profile("p", points)):
        wanted = state_of(made).original(ids)
        return float((made(ids) - wanted).norm() / wanted.norm())


def test_views_drift_less_and_the_original_stays() -> None:
    made, ids = model()
    before = {bits: drift(made, ids, bits) for bits in (4, 5, 6, 8)}
    kept = {n: p.clone() for n, p in state_of(made).original.named_parameters()}
    tables = {
        n: w.dense.clone() for n, w in elastic_weights(made).items() if n in ("table", "head")
    }
    assert settle_(made, [ids]) == ["up", "down"]
    after = {bits: drift(made, ids, bits) for bits in before}
    assert after[5] < 0.85 * before[5]
    assert after[6] < before[6]
    assert after[8] < after[6] < after[5]
    assert all(torch.equal(p, kept[n]) for n, p in state_of(made).original.named_parameters())
    assert all(torch.equal(elastic_weights(made)[n].dense, w) for n, w in tables.items())


def test_what_cannot_be() -> None:
    made, ids = model()
    with pytest.raises(SpecError, match=r"end there, got \(4, 6\)"):
        settle_(made, [ids], (4, 6))
    with pytest.raises(ConvertError, match="calibration data is empty"):
        settle_(made, [])
    with pytest.raises(ConvertError, match="not elastic"):
        settle_(Words(), [ids])
