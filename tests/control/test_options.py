"""Costs, drifts and shares of units against sums by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from t3c.control.menu import chain
from t3c.control.options import chain_shares, layer_profile, unit_options, unit_shares
from t3c.convert import ElasticConfig, plan_conversion, units
from t3c.quant.policy import RankTiedBits
from t3c.spec import LayerPoint


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, n) for n in (64, 32, 32, 64))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (8, 8)).transpose(1, 2)
        k, v = (
            f(x).unflatten(-1, (4, 8)).repeat_interleave(2, dim=2).transpose(1, 2)
            for f in (self.k, self.v)
        )
        mixed = torch.softmax(q @ k.mT, dim=-1) @ v
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


MODEL = nn.Sequential(Attention(), nn.Linear(64, 64), Attention(), nn.Linear(64, 16))
CONFIG = ElasticConfig(store_ratio=1.0)
PLANS = plan_conversion(MODEL, torch.randn(2, 5, 64), CONFIG).layers
UNITS = {unit.name: unit for unit in units(PLANS)}
# No two sums of different layers or points are alike.
WEIGHT = {plan.spec.name: 1.37**i for i, plan in enumerate(PLANS)}


def shares(name: str, point: LayerPoint) -> tuple[float, float, float]:
    weight = WEIGHT[name]
    return weight * point.rank, weight**2 * point.rank * point.bits, math.nan


def test_a_block_costs_what_its_layers_cost_at_the_points_they_share() -> None:
    asked: list[tuple[str, LayerPoint]] = []

    def squared(name: str, point: LayerPoint) -> float:
        asked.append((name, point))
        return WEIGHT[name] / (point.rank * point.bits)

    found = unit_options(UNITS, shares, squared, 0.25)
    assert list(found) == ["block 0", "layer 1", "block 2", "layer 3"]
    block = UNITS["block 0"]
    assert [plan.spec.name for plan in block.layers] == ["0.q", "0.k", "0.v", "0.o"]
    assert [option.point for option in found["block 0"]] == block.points()
    for option in found["block 0"]:
        share, bits = block.levels[option.point.level - 1], option.point.bits
        cost = drift = 0.0
        for plan in block.layers:
            rank = min(k for k, s in zip(plan.ranks, plan.shares, strict=True) if s >= share)
            weight = WEIGHT[plan.spec.name]
            cost += 0.75 * weight * rank + 0.25 * weight**2 * rank * bits
            drift += weight / (rank * bits)
        assert option.cost == pytest.approx(cost, rel=1e-12)
        assert option.squared_drift == pytest.approx(drift, rel=1e-12)
    assert len(asked) == len(set(asked))  # drift is dear: once for each layer point
    assert {name for name, _ in asked} == set(WEIGHT)


def test_shares_run_along_the_chain() -> None:
    offered = unit_options(UNITS, shares, lambda n, p: 1 / (p.rank * p.bits), 0.5)
    chains = {name: chain(options) for name, options in offered.items()}
    along = chain_shares(UNITS, chains, shares)
    assert list(along) == list(chains)
    for name, options in chains.items():
        assert along[name].shape == (3, len(options))
        assert np.isnan(along[name][2]).all()
        for index, option in enumerate(options):
            own = UNITS[name].layer_points(option.point)
            assert along[name][0, index] == pytest.approx(
                sum(WEIGHT[layer] * p.rank for layer, p in own.items())
            )
            assert along[name][1, index] == pytest.approx(
                sum(WEIGHT[layer] ** 2 * p.rank * p.bits for layer, p in own.items())
            )
            mine = unit_shares(UNITS[name], option.point, shares)
            assert mine[:2] == tuple(along[name][:2, index])
            assert math.isnan(mine[2])


@pytest.mark.parametrize("tied", [None, RankTiedBits(0.8, 1.5)])
def test_points_of_units_are_a_profile_of_their_layers(tied: RankTiedBits | None) -> None:
    plans = plan_conversion(
        MODEL, torch.randn(2, 5, 64), replace(CONFIG, rank_tied_bits=tied)
    ).layers
    shared = {unit.name: unit for unit in units(plans)}
    chosen = {
        name: unit.points()[index % len(unit.points())]
        for index, (name, unit) in enumerate(shared.items())
    }
    profile = layer_profile(shared, chosen, "mine")
    assert profile.name == "mine"
    assert list(profile.points) == [plan.spec.name for plan in plans]
    for name, unit in shared.items():
        share = unit.levels[chosen[name].level - 1]
        for plan in unit.layers:
            point = profile.points[plan.spec.name]
            assert point == plan.point_at(share, chosen[name].bits)
            assert point.rank in plan.ranks
            below = [s for s in plan.shares if s < plan.shares[plan.ranks.index(point.rank)]]
            assert all(s < share for s in below)
