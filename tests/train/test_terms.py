"""Each term of the objective moves what it is for, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from conftest import low
from t3c.convert import elasticize_, state_of
from t3c.errors import SpecError
from t3c.nn import at, elastic_weights
from t3c.nn.inputs import Inputs, evaluating
from t3c.spec import Goal, LayerPoint, Profile
from t3c.train import Keep, Objective, TrainConfig, fit, objective, terms
from t3c.train.augment import Augmentation
from t3c.train.config import CONTROLLER_WEIGHTS, FULL_TERMS, NETWORK_TERMS, TERMS
from t3c.train.losses import loss_of
from t3c.train.processes import Processes
from t3c.train.run import Run, moving
from t3c.train.terms import NetworkTerms
from t3c.zoo.digits import IMAGE, Digits

EVERY = TrainConfig(
    steps=6, full="trained", augmentations=("shift",), goal=Goal(worst_drift=5.0),
    objective=Objective(1, 1, 1, 1, 1, 1, 1, 1),
)  # fmt: skip


@pytest.fixture(autouse=True)
def every(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the certificate at every step."""
    monkeypatch.setattr(terms, "CERTIFICATE_EVERY", 1)


@pytest.fixture
def model(elastic: nn.Module) -> nn.Module:
    return copy.deepcopy(elastic)


def shaken(module: nn.Module) -> nn.Module:
    """Parameters a little off, so that no term is at its least already."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            size = parameter.abs().mean() if parameter.any() else 1.0
            noise = torch.randn(parameter.shape, generator=random, dtype=parameter.dtype)
            parameter.add_(0.1 * size * noise)
    return module


def moved(term: Tensor, module: nn.Module) -> set[str]:
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if not term.requires_grad:
        return set()
    slopes = torch.autograd.grad(term, list(named.values()), retain_graph=True, allow_unused=True)
    return {n for n, g in zip(named, slopes, strict=True) if g is not None and bool(g.any())}


def network_terms(model: nn.Module, config: TrainConfig, digits: Digits) -> dict[str, Tensor]:
    x, y = (t[:8] for t in digits.train)
    network = NetworkTerms(
        model, loss_of("classification"), config, Augmentation(config.augmentations, IMAGE),
        Processes(), {},
    )  # fmt: skip
    return network(0, x, y, low(model))


class Parts:
    """The parameters of a model by what they are for, at the profile `low`."""

    def __init__(self, model: nn.Module) -> None:
        names = {n for n, _ in model.named_parameters()}
        profile = low(model)
        weights = elastic_weights(model)
        whole = {n for n, w in weights.items() if w.spec.stored_dense(profile.points[n])}
        self.dense = {n for n in names if n.endswith(".dense")}
        self.rest = {n for n in names if ".elastic." not in n}  # biases and norms
        self.stages = {n for n in names if ".stages." in n}
        self.used_stages = {n for n in self.stages if n.partition(".elastic")[0] not in whole}
        gains = {n for n in names if ".dense_gains" in n or ".stage_gains" in n}
        assert names == self.dense | self.rest | self.stages | gains
        self.stored = self.used_stages | {f"{n}.elastic.dense" for n in whole}
        self.gains = gains
        assert self.used_stages
        assert whole


@pytest.mark.parametrize("full", ["trained", "kept"])
def test_each_term_moves_what_it_should(
    model: nn.Module, digits: Digits, full: Literal["trained", "kept"]
) -> None:
    parts, config = Parts(model), replace(EVERY, full=full)
    shaken(model)
    with evaluating(model), moving(model, config):
        found = network_terms(model, config, digits)
        reach = {name: moved(term, model) for name, term in found.items()}
    free = parts.dense | parts.rest if full == "trained" else set()
    assert set(found) == set(NETWORK_TERMS) - (set(FULL_TERMS) if full == "kept" else set())
    for name in FULL_TERMS:
        assert reach.get(name, free) == free
    for name in ("distill", "augment", "certificate"):
        assert reach[name] - parts.gains == (parts.stored | parts.rest) & (parts.stages | free), (
            name
        )
        assert reach[name] & parts.gains, name
    assert reach["tail"] == parts.used_stages
    for name in ("spectral", "gap"):
        assert reach[name], name
        assert reach[name] <= parts.stages, name
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("method", ["gumbel", "reinforce"])
def test_controller_and_network_are_moved_apart(
    model: nn.Module, digits: Digits, method: Literal["gumbel", "reinforce"]
) -> None:
    config = replace(EVERY, controller=method)
    run = Run(model, digits.loader(8), config, None)
    assert run.policy is not None
    shaken(model)
    shaken(run.policy.module)
    profile = run.policy.profile(4)
    found = run.policy.terms(4, profile, 0.3)
    assert set(found) == set(CONTROLLER_WEIGHTS)
    for name, term in found.items():
        assert moved(term, model) == set(), name
        mine = moved(term, run.policy.module)
        assert any(n.startswith("policy.") for n in mine), name
        judged = method == "reinforce" and name == "drift"
        assert any(n.startswith("value.") for n in mine) == judged, name
    for name, term in network_terms(model, config, digits).items():
        assert moved(term, run.policy.module) == set(), name


def test_reinforce_learns_from_its_own_draws_alone(model: nn.Module, digits: Digits) -> None:
    run = Run(model, digits.loader(8), replace(EVERY, controller="reinforce"), None)
    assert run.policy is not None
    near, far = (run.policy.terms(4, run.policy.profile(4), d)["drift"] for d in (0.1, 0.9))
    assert float(near.detach()) != float(far.detach())
    assert "drift" not in run.policy.terms(4, low(model), 0.3)
    for wrong in (
        {"objective": Objective(distill=0)},
        {"curriculum": "beta"},
        {"curriculum": "falling"},
    ):
        with pytest.raises(SpecError, match="reinforce learns from distill at profiles"):
            replace(EVERY, controller="reinforce", **wrong)


@pytest.mark.parametrize("method", ["gumbel", "reinforce"])
def test_every_term_is_in_the_record(
    model: nn.Module, digits: Digits, tmp_path: Path, method: Literal["gumbel", "reinforce"]
) -> None:
    config = replace(EVERY, steps=4, controller=method, curriculum="aimed")
    shaken(model)
    history = fit(model, digits.loader(8), config, keep=Keep(tmp_path))
    assert set(history.terms) == set(TERMS)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for name in TERMS:
        assert [line["values"][name] for line in lines] == list(history.terms[name])
        assert any(history.terms[name]) or name == "budget", name


def test_what_is_kept_is_kept_bit_for_bit(model: nn.Module, digits: Digits) -> None:
    before = {n: t.clone() for n, t in model.state_dict().items()}
    x = digits.test[0][:16]
    config = replace(EVERY, full="kept", steps=4, controller="gumbel", learning_rate=1e-2)
    history = fit(model, digits.loader(16), config)
    assert set(history.terms["task"]) == set(history.terms["anchor"]) == {0.0}
    parts = Parts(model)
    buffers = {n for n, _ in model.named_buffers()}
    after = model.state_dict()
    for name in parts.dense | parts.rest | buffers:
        assert torch.equal(before[name], after[name]), name
    assert any(not torch.equal(before[n], after[n]) for n in parts.stages)
    assert any(not torch.equal(before[n], after[n]) for n in parts.gains)
    named = dict(model.named_parameters())
    assert all(named[n].grad is None and named[n].requires_grad for n in parts.dense | parts.rest)
    with torch.no_grad(), evaluating(model), at(model, None):
        assert torch.equal(model(x), state_of(model).original(x))


def test_a_frozen_parameter_stays(model: nn.Module, digits: Digits) -> None:
    model.get_parameter("head.bias").requires_grad_(False)
    before = model.get_parameter("head.bias").clone()
    for full in ("kept", "trained"):
        fit(model, digits.loader(8), replace(EVERY, steps=2, full=full))
        assert torch.equal(model.get_parameter("head.bias"), before)
        assert not model.get_parameter("head.bias").requires_grad


def test_terms_on_outputs_are_not_computed_for_nothing(model: nn.Module, digits: Digits) -> None:
    calls: list[int] = []
    hook = state_of(model).original.register_forward_hook(lambda *_: calls.append(1))
    config = TrainConfig(steps=3, objective=Objective(distill=0, tail=1))
    with evaluating(model):
        assert set(network_terms(model, config, digits)) == {"tail"}
    hook.remove()  # copies of the model share its original
    assert not calls
    with pytest.raises(SpecError, match="no term that is computed"):  # nothing is augmented
        TrainConfig(objective=Objective(distill=0, augment=1, tail=0))


def test_one_sample_cannot_be_halved(model: nn.Module, digits: Digits) -> None:
    x, y = (t[:1] for t in digits.train)
    alone = Objective(distill=0, augment=1, tail=0)
    config = TrainConfig(steps=2, objective=alone, augmentations=("shift",))
    assert set(fit(model, [(x, y)], config).terms["augment"]) == {0.0}


class Pair(nn.Module):
    """Takes two tensors, positionally or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 48)
        self.out = nn.Linear(48, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(a + b).relu())
        return out


@pytest.fixture(scope="module")
def pair() -> nn.Module:
    torch.manual_seed(0)
    net, x = Pair(), (torch.randn(64, 32), torch.randn(64, 32))
    elasticize_(net, (x[0][:2], x[1][:2]), calibration=[(x, torch.zeros(64))])
    return net


def pairs(*, named: bool) -> Iterator[tuple[Inputs, Tensor]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        a, b = (torch.randn(8, 32, generator=random) for _ in range(2))
        yield ({"a": a, "b": b} if named else (a, b)), torch.arange(8) % 4


@pytest.mark.parametrize("named", [True, False])
def test_inputs_of_several_tensors(pair: nn.Module, named: bool) -> None:
    config = TrainConfig(steps=3, full="trained", objective=Objective(certificate=0.1))
    terms = fit(copy.deepcopy(pair), list(pairs(named=named)), config).terms
    assert min(terms["distill"]) > 0
    assert terms == fit(copy.deepcopy(pair), list(pairs(named=not named)), config).terms


def test_the_tail_falls_with_rank(model: nn.Module) -> None:
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


def test_drift_within_the_tolerance_costs_nothing(model: nn.Module, digits: Digits) -> None:
    x = digits.train[0][:8]
    given: tuple[Any, ...] = (0, model, state_of(model).original, low(model), x)
    assert float(objective.Certificate(Flat(), 1, 5, tolerance=0.25)(*given).detach()) == 0.75
    within = objective.Certificate(Flat(), 1, 5, tolerance=2.0)(*given)
    assert float(within.detach()) == 0.0
    assert moved(within, model) == set()


def test_a_run_with_the_certificate(
    model: nn.Module, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "CERTIFICATE_EVERY", 3)
    seen: list[Mapping[str, float]] = []
    config = TrainConfig(steps=7, objective=Objective(certificate=0.1))
    other = copy.deepcopy(model)
    history = fit(model, digits.loader(16), config, on_step=lambda _, v: seen.append(v))
    values = history.terms["certificate"]
    assert [v["certificate"] for v in seen] == list(values)
    assert values[0] == values[1] == values[2] != values[3] == values[4] == values[5] != values[6]
    assert min(values) > 0
    assert history == fit(other, digits.loader(16), config)
