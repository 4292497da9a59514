from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from t3c.convert import elasticize_, state_of
from t3c.errors import ConvertError, DataError, SpecError, TrainError
from t3c.nn import at, elastic_weights
from t3c.spec import LayerPoint, Profile
from t3c.train import TrainConfig, fit, objective
from t3c.train.loop import sample_profile
from t3c.zoo.digits import Digits


@pytest.fixture
def model(trained: nn.Module, digits: Digits) -> nn.Module:
    net = copy.deepcopy(trained)
    elasticize_(net, digits.train[0][:2], calibration=digits.loader(64))
    return net


def low(model: nn.Module) -> Profile:
    return Profile(
        "low",
        {
            p.spec.name: LayerPoint(p.ranks[min(1, len(p.ranks) - 1)], 6)
            for p in state_of(model).plan.layers
        },
    )


@torch.no_grad()
def drift(model: nn.Module, profile: Profile | None, digits: Digits) -> float:
    x = digits.test[0][:200]
    with at(model, profile):
        z, original = model(x), state_of(model).original(x)
    return float(((z - original).norm(dim=1) / original.norm(dim=1)).mean())


def test_training_brings_compressed_views_closer(model: nn.Module, digits: Digits) -> None:
    before = drift(model, low(model), digits)
    statistics = {n: b.clone() for n, b in model.named_buffers()}
    history = fit(model, digits.loader(32), TrainConfig(steps=40))
    assert history.steps == 40
    assert drift(model, low(model), digits) < 0.8 * before
    assert drift(model, None, digits) < 0.1
    assert all(torch.equal(statistics[n], b) for n, b in model.named_buffers())


def test_two_runs_agree(model: nn.Module, digits: Digits) -> None:
    other = copy.deepcopy(model)
    a = fit(model, digits.loader(32), TrainConfig(steps=4))
    b = fit(other, digits.loader(32), TrainConfig(steps=4))
    assert a == b
    same = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in same)


def test_each_term_moves_what_it_should(model: nn.Module, digits: Digits) -> None:
    x, y = (t[:8] for t in digits.train)
    weights = elastic_weights(model)
    profile = low(model)

    def moved(loss: torch.Tensor) -> set[str]:
        model.zero_grad(set_to_none=True)
        loss.backward()
        return {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}

    gains = {n for n, _ in model.named_parameters() if "gains" in n}
    stages = {n for n, _ in model.named_parameters() if ".stages." in n}
    dense = {n for n, _ in model.named_parameters() if n.endswith(".dense")}
    task = moved(objective.task(model(x), y))
    assert dense <= task
    assert not (gains | stages) & task
    with torch.no_grad():
        teacher = state_of(model).original(x)
    with at(model, profile):
        distilled = moved(objective.distill(model(x), teacher))
    factored = {n for n, w in weights.items() if not w.spec.stored_dense(profile.points[n])}
    mine = {n for n in stages if n.partition(".elastic")[0] in factored}
    assert mine
    assert distilled & stages == mine
    assert distilled & dense == {f"{n}.elastic.dense" for n in weights.keys() - factored}
    assert gains & distilled
    cost = moved(objective.budget(weights, profile.points))
    assert cost == mine


def test_the_budget_term_falls_with_rank(model: nn.Module) -> None:
    weights, plans = elastic_weights(model), state_of(model).plan.layers

    @torch.no_grad()
    def term(index: int) -> float:
        ranks = {p.spec.name: p.ranks[min(index, len(p.ranks) - 1)] for p in plans}
        points = {name: LayerPoint(rank, 8) for name, rank in ranks.items()}
        return float(objective.budget(weights, points))

    values = [term(index) for index in range(4)]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0
    assert term(99) == 0.0


def test_samples_reach_every_rank_and_bit(model: nn.Module) -> None:
    plans = state_of(model).plan.layers
    rng = np.random.default_rng(0)
    drawn = [sample_profile(plans, rng) for _ in range(300)]
    for plan in plans:
        points = {(d.points[plan.spec.name].rank, d.points[plan.spec.name].bits) for d in drawn}
        assert points == {(k, q) for k in plan.ranks for q in plan.bits}


def test_training_that_cannot_go_on(model: nn.Module, digits: Digits) -> None:
    with pytest.raises(DataError, match="training data is empty"):
        fit(model, [], TrainConfig(steps=2))
    with pytest.raises(DataError, match=r"batches of \(inputs, target\)"):
        fit(model, [digits.train[0][:4]], TrainConfig(steps=2))
    bad = digits.train[0][:4].clone()
    bad[0] = float("nan")
    with pytest.raises(TrainError, match="step 0: the loss is not finite"):
        fit(model, [(bad, digits.train[1][:4])], TrainConfig(steps=2))
    with pytest.raises(ConvertError, match="not elastic"):
        fit(nn.Linear(2, 2), [])
    for wrong in ({"steps": 0}, {"learning_rate": -1.0}, {"warmup": 1.0}):
        with pytest.raises(SpecError):
            TrainConfig(**wrong)  # type: ignore[arg-type]
