"""What changes over a run, and which profile each step trains."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from t3c.convert import elasticize_, state_of
from t3c.errors import SpecError
from t3c.exporter import ExportConfig
from t3c.spec import Goal, LayerPoint, Profile
from t3c.train import Objective, TrainConfig
from t3c.train.config import CONTROLLER_WEIGHTS, TERMS, CertificateTerm
from t3c.train.sampling import draw, sample_profile
from t3c.train.schedules import (
    broad_share,
    coefficient,
    draws,
    learning_rate_share,
    noise,
    relaxation,
    temperature,
)
from t3c.train.targets import Targets, find_targets
from t3c.zoo.digits import Digits

LONG = TrainConfig(steps=300)


@pytest.fixture(scope="module")
def elastic(trained: nn.Module, digits: Digits) -> nn.Module:
    net = copy.deepcopy(trained)
    elasticize_(net, digits.train[0][:2], calibration=digits.loader(64))
    return net


@pytest.fixture(scope="module")
def targets(elastic: nn.Module, digits: Digits) -> Targets:
    return find_targets(elastic, digits.train[0][:8], LONG.goal)


def drawn(model: nn.Module, targets: Targets, config: TrainConfig) -> list[Profile]:
    plans = state_of(model).plan.layers
    return [draw(step, plans, targets.profiles, config) for step in range(config.steps)]


def levels(model: nn.Module, profile: Profile) -> float:
    """The mean rank of a profile's layers as a share of the way from the least to the top."""
    plans = [p for p in state_of(model).plan.layers if len(p.ranks) > 1]
    return float(
        np.mean(
            [p.ranks.index(profile.points[p.spec.name].rank) / (len(p.ranks) - 1) for p in plans]
        )
    )


def test_the_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    shares = [learning_rate_share(step, LONG) for step in range(300)]
    assert shares[:30] == pytest.approx([(step + 1) / 30 for step in range(30)])
    assert shares[30] == 1.0
    assert shares[165] == pytest.approx(0.5)
    assert 0 < shares[-1] < 1e-4
    assert shares[30:] == sorted(shares[30:], reverse=True)
    assert learning_rate_share(0, replace(LONG, warmup=0.0)) == 1.0
    assert learning_rate_share(0, TrainConfig(steps=1)) == 1.0


def test_terms_that_ramp() -> None:
    config = replace(LONG, objective=Objective(certificate=2.0, tail=0.3))
    for step, share in ((0, 0.0), (15, 1 / 3), (45, 1.0), (299, 1.0)):
        assert coefficient("distill", step, config) == pytest.approx(share)
        assert coefficient("augment", step, config) == pytest.approx(0.25 * share)
    for step, share in ((0, 0.0), (50, 0.5), (100, 1.0), (299, 1.0)):
        assert coefficient("certificate", step, config) == pytest.approx(2 * share)
    for step, share in ((0, 1.0), (150, 0.5)):
        assert coefficient("entropy", step, config) == pytest.approx(0.01 * share)
    weights = config.objective.weights | CONTROLLER_WEIGHTS
    for name in sorted(set(TERMS) - {"distill", "augment", "certificate", "entropy"}):
        constant = {coefficient(name, step, config) for step in range(300)}
        assert constant == {weights[name]}, name


def test_temperature_falls_by_half_in_each_third() -> None:
    assert [temperature(step, LONG) for step in (0, 100, 200)] == pytest.approx([2, 1, 0.5])
    assert temperature(299, LONG) == pytest.approx(0.3)  # held there
    assert relaxation(0, LONG) is None
    relaxed = relaxation(100, replace(LONG, masks=True))
    assert relaxed is not None
    assert relaxed.temperature == pytest.approx(1)


def test_gamma_falls_to_the_broad_share(elastic: nn.Module, targets: Targets) -> None:
    gammas = [broad_share(step, LONG) for step in range(300)]
    assert gammas[0] == 1.0
    assert gammas[50] == pytest.approx(0.5)
    assert gammas[75:] == pytest.approx([0.25] * 225)
    broad = [p.name == "sampled" for p in drawn(elastic, targets, LONG)]
    assert np.mean(broad[:30]) > 0.7
    assert np.mean(broad[100:]) == pytest.approx(0.25, abs=0.08)
    aimed = replace(LONG, curriculum="aimed")
    names = {p.name for p in drawn(elastic, targets, aimed)}
    assert names == {p.name for p in targets.profiles}


def test_curricula(elastic: nn.Module, targets: Targets) -> None:
    beta = drawn(elastic, targets, replace(LONG, curriculum="beta"))
    assert {p.name for p in beta} == {"sampled"}
    falling = drawn(elastic, targets, replace(LONG, curriculum="falling"))
    assert {p.name for p in falling} == {"sampled"}
    ranks = [levels(elastic, p) for p in falling]
    assert ranks[0] > 0.8
    assert np.mean(ranks[:20]) > np.mean(ranks[50:70]) > np.mean(ranks[100:])
    assert min(ranks[:10]) > 0.4
    assert min(ranks[100:]) < 0.2
    assert np.mean(ranks[100:]) == pytest.approx(
        np.mean([levels(elastic, p) for p in beta]), abs=0.08
    )


def test_targets_follow_what_points_take_on_a_device(elastic: nn.Module, digits: Digits) -> None:
    """A layer that takes all the time is given few ranks; where ranks save nothing, all of them."""
    names = [p.spec.name for p in state_of(elastic).plan.layers if len(p.ranks) > 2]
    dear = names[-1]
    goal = Goal(worst_drift=9.0, size_weight=0.0)

    def shares(name: str, point: LayerPoint) -> tuple[float, float, float]:
        time = point.rank / 100 if name == dear else 1e-6
        return time + 1e-9 * point.bits, 0.0, float("nan")

    found = find_targets(elastic, digits.train[0][:8], goal, shares).profiles
    counted = find_targets(elastic, digits.train[0][:8], goal).profiles
    ranks = {p.spec.name: p.ranks for p in state_of(elastic).plan.layers}
    tiny = found["tiny"].points
    assert tiny[dear].rank == ranks[dear][0]
    assert all(tiny[name].rank == ranks[name][-1] for name in names if name != dear)
    assert any(
        counted["tiny"].points[name].rank < ranks[name][-1] for name in names if name != dear
    )


def test_where_bytes_count_little_targets_save_ranks_before_bits(
    elastic: nn.Module, digits: Digits
) -> None:
    def means(weight: float) -> tuple[float, float]:
        goal = Goal(worst_drift=5.0, size_weight=weight)
        found = find_targets(elastic, digits.train[0][:8], goal).profiles
        bits = [point.bits for profile in found for point in profile.points.values()]
        return float(np.mean(bits)), float(np.mean([levels(elastic, p) for p in found]))

    (by_work, ranks), (by_bytes, more_ranks) = means(0.01), means(0.9)
    assert by_work > by_bytes + 0.2
    assert ranks < more_ranks


def test_samples_reach_every_rank_and_bit(elastic: nn.Module) -> None:
    plans = state_of(elastic).plan.layers
    rng = np.random.default_rng(0)
    many = [sample_profile(plans, rng) for _ in range(300)]
    for plan in plans:
        points = {(d.points[plan.spec.name].rank, d.points[plan.spec.name].bits) for d in many}
        assert points == {(k, q) for k in plan.ranks for q in plan.bits}


@given(seed=st.integers(0, 2**40), step=st.integers(0, 10**7))
def test_draws_depend_on_seed_step_and_purpose_alone(seed: int, step: int) -> None:
    def first(seed: int, step: int, what: str) -> tuple[float, float]:
        tensor = torch.rand((), dtype=torch.float64, generator=noise(seed, step, what))
        return draws(seed, step, what).random(), float(tensor)

    once = first(seed, step, "mix")
    np.random.default_rng(0).random()
    torch.rand(3)
    assert first(seed, step, "mix") == once
    others = [first(seed + 1, step, "mix"), first(seed, step + 1, "mix"), first(seed, step, "mask")]
    for other in others:
        assert other[0] != once[0]
        assert other[1] != once[1]


def test_a_step_draws_the_same_profile_whatever_ran_before(
    elastic: nn.Module, targets: Targets
) -> None:
    plans = state_of(elastic).plan.layers
    forward = [draw(step, plans, targets.profiles, LONG) for step in range(20)]
    backward = [draw(step, plans, targets.profiles, LONG) for step in reversed(range(20))]
    assert forward == backward[::-1]
    other = [draw(s, plans, targets.profiles, replace(LONG, seed=1)) for s in range(20)]
    assert forward != other


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 2.5}, "steps must be at least 1, got 2.5"),
        ({"learning_rate": -1.0}, "learning_rate must be positive, got -1"),
        ({"warmup": 1.0}, r"warmup must be in \[0, 1\), got 1"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"curriculum": "easy"}, "curriculum is one of profiles, aimed, beta, falling, got 'easy'"),
        ({"augmentations": "shift"}, "augmentations is a list of names, got 'shift'"),
        ({"objective": Objective(distill=0, tail=0)}, "the objective has no term that is computed"),
    ],
)
def test_configurations_that_cannot_be(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        TrainConfig(**wrong)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_weights_that_cannot_be(weight: float) -> None:
    with pytest.raises(SpecError, match=f"certificate must be at least 0, got {weight}"):
        Objective(certificate=weight)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"tolerance": -1.0}, "tolerance must be at least 0, got -1"),
    ],
)
def test_certificate_terms_that_cannot_be(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        CertificateTerm(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"profiles": 0}, "profiles must be at least 1, got 0"),
        ({"worst_drift": 0.0}, "worst_drift must be positive, got 0"),
        ({"worst_drift": float("inf")}, "worst_drift must be positive, got inf"),
        ({"size_weight": 1.0}, r"size_weight must be in \[0, 1\), got 1"),
    ],
)
def test_goals_that_cannot_be(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Goal(**wrong)  # type: ignore[arg-type]


def test_training_and_export_aim_at_the_same_profiles() -> None:
    assert TrainConfig().goal == ExportConfig().goal == Goal(5, 0.15, 0.5)
