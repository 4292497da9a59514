from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oracles import first_order_drift
from t3c.convert import elasticize_, state_of
from t3c.errors import ConvertError, DataError, SpecError, TrainError
from t3c.nn import at, elastic_weights
from t3c.nn.inputs import Inputs
from t3c.spec import LayerPoint, Profile
from t3c.train import TrainConfig, fit, losses, objective
from t3c.train.sampling import sample_profile
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
    task = moved(losses.classification(model(x), y))
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
    cost = moved(objective.tail(weights, profile.points))
    assert cost == mine


def test_the_budget_term_falls_with_rank(model: nn.Module) -> None:
    weights, plans = elastic_weights(model), state_of(model).plan.layers

    @torch.no_grad()
    def term(index: int) -> float:
        ranks = {p.spec.name: p.ranks[min(index, len(p.ranks) - 1)] for p in plans}
        points = {name: LayerPoint(rank, 8) for name, rank in ranks.items()}
        return float(objective.tail(weights, points))

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


class Flat:
    """A penalty whose value is the number of times it was asked, with slope 1 in one parameter."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def __call__(
        self, model: nn.Module, original: nn.Module, profile: Profile, inputs: Inputs
    ) -> Tensor:
        assert isinstance(inputs, Tensor)
        self.samples.append(len(inputs))
        slope = next(model.parameters()).flatten()[0]
        return slope - slope.detach() + len(self.samples)


@pytest.mark.parametrize("every", [1, 3])
def test_the_certificate_is_asked_now_and_then_and_pulls_as_much(
    model: nn.Module, digits: Digits, every: int
) -> None:
    flat, x = Flat(), digits.train[0][:8]
    term = objective.Certificate(flat, every, 5)
    values, pull = [], 0.0
    for step in range(6):
        value = term(step, model, state_of(model).original, low(model), x)
        values.append(float(value.detach()))
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value, [next(model.parameters())])
            pull += float(gradient.sum())
    assert values == [1 + step // every for step in range(6)]
    assert pull == pytest.approx(6)
    assert flat.samples == [5] * (6 // every)


@pytest.mark.parametrize("kind", ["first_order", "spectral"])
def test_a_run_with_the_certificate(
    model: nn.Module, digits: Digits, kind: Literal["first_order", "spectral"]
) -> None:
    seen: list[Mapping[str, float]] = []
    config = TrainConfig(steps=8, certificate=0.1, certificate_every=3, certificate_kind=kind)
    other = copy.deepcopy(model)
    history = fit(model, digits.loader(32), config, on_step=lambda _, v: seen.append(v))
    values = history.terms["certificate"]
    assert [v["certificate"] for v in seen] == list(values)
    assert values[0] == values[1] == values[2] != values[3] == values[4] == values[5] != values[6]
    assert min(values) > 0
    assert history == fit(other, digits.loader(32), config)


def test_the_certificate_alone_lowers_the_drift_it_predicts(
    model: nn.Module, digits: Digits
) -> None:
    x, original = digits.test[0][:32], state_of(model).original
    before = first_order_drift(model, original, low(model), x).mean()
    config = TrainConfig(
        steps=40, learning_rate=3e-4, task=0, anchor=0, distill=0, budget=0, certificate=1,
        certificate_every=2,
    )  # fmt: skip
    fit(model, digits.loader(32), config)
    assert first_order_drift(model, original, low(model), x).mean() < 0.8 * before


def test_a_certificate_that_weighs_nothing_leaves_a_run_as_it_was(
    model: nn.Module, digits: Digits
) -> None:
    other = copy.deepcopy(model)
    a = fit(model, digits.loader(32), TrainConfig(steps=3, masks=True))
    after = torch.get_rng_state()
    b = fit(
        other, digits.loader(32),
        TrainConfig(steps=3, masks=True, certificate_kind="spectral", certificate_every=1),
    )  # fmt: skip
    assert a == b
    assert set(a.terms["certificate"]) == {0.0}
    assert torch.equal(after, torch.get_rng_state())
    same = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in same)


def test_the_certificate_goes_with_masks(model: nn.Module, digits: Digits) -> None:
    config = TrainConfig(steps=2, masks=True, certificate=0.1, certificate_every=1)
    assert min(fit(model, digits.loader(32), config).terms["certificate"]) > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"certificate": -0.1}, "terms weigh at least 0"),
        ({"certificate": float("nan")}, "terms weigh at least 0"),
        ({"certificate": float("inf")}, "terms weigh at least 0"),
        ({"certificate_kind": "exact"}, "one of first_order, spectral, got 'exact'"),
        ({"certificate_every": 0}, "certificate_every must be at least 1, got 0"),
        ({"certificate_samples": 0}, "certificate_samples must be at least 1, got 0"),
    ],
)
def test_certificates_that_cannot_be(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TrainConfig(**wrong)  # type: ignore[arg-type]


def test_a_certificate_that_is_no_number_stops_the_run(model: nn.Module, digits: Digits) -> None:
    x, y = (t[:4].clone() for t in digits.train)
    x[0] = float("nan")
    config = TrainConfig(steps=2, task=0, anchor=0, distill=0, budget=0, certificate=1)
    with pytest.raises(TrainError, match="step 0: the loss is not finite"):
        fit(model, [(x, y)], config)
