"""The door decides which layers are narrowed, and what it decided is kept."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from t3c.artifact.devices import LayerTiming
from t3c.compression import widths
from t3c.compression.widths import choose_widths, kept_units, known_units
from t3c.convert.width import find_orders, reorder_
from t3c.device.measured import Watch
from t3c.engines import Engine, open_engine
from t3c.spec import Form, LayerSpec


class Packed(nn.Module):
    """A transformer block as torch has it: three projections in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(x).mean(1))
        return out


def times(narrow: float, factored: float) -> object:
    """Return a stand-in for timing: what a form takes at half of full rank, of dense."""

    def timed(
        engine: Engine, layers: list[tuple[LayerSpec, tuple[int, ...]]], **_: Watch
    ) -> tuple[LayerTiming, ...]:
        found = []
        for spec, ranks in layers:
            for rank in ranks:
                share = rank / spec.full_rank
                ms = {Form.DENSE: 1.0}
                if share < 1:
                    form = Form.NARROW if spec.narrows else Form.FACTORED
                    ms[form] = min(1.0, share * 2 * (narrow if spec.narrows else factored))
                found.append(LayerTiming(layer=spec.name, rank=rank, ms=ms))
        return tuple(found)

    return timed


def test_what_takes_less_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a packed attention, whose projections have no modules of their own."""
    torch.manual_seed(0)
    model, x = Packed().eval(), torch.randn(64, 6, 64)
    wanted, batches = model(x), [x[:32], x[32:]]
    units = find_orders(model, x[:2], batches)
    reorder_(model, units)
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)
    assert {group.name for group in units.groups} >= {"block.self_attn.out_proj", "block.linear2"}
    engine = open_engine("torch", 1)
    monkeypatch.setattr(widths, "time_layers", times(0.3, 0.95))
    taken, choice = choose_widths(model, x[:2], batches, units.groups, {}, engine)
    assert {group.name for group in taken} == {group.name for group in units.groups}
    assert choice is not None
    assert choice.tried["width"] < choice.tried["rank"]
    monkeypatch.setattr(widths, "time_layers", times(0.5, 0.01))
    assert choose_widths(model, x[:2], batches, units.groups, {}, engine)[0] == ()
    assert choose_widths(model, x[:2], batches, (), {}, engine) == ((), None)


def test_units_are_kept_as_they_are() -> None:
    torch.manual_seed(0)
    model, x = Packed().eval(), torch.randn(32, 6, 64)
    units = find_orders(model, x[:2], [x])
    known = known_units(json.loads(json.dumps(kept_units(units))))
    assert known.groups == units.groups
    assert known.refused == units.refused
    assert units.refused
    assert all(torch.equal(known.orders[name], order) for name, order in units.orders.items())
