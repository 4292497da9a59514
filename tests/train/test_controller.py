"""The controller: starts as the knapsack, is never judged worse, and deploys as it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from t3c.control.knapsack import allocations
from t3c.control.menu import Option
from t3c.control.token import Token
from t3c.errors import SpecError
from t3c.spec import Level
from t3c.train import policy_gradient as pg
from t3c.train.controller import (
    Controller,
    ControllerConfig,
    Course,
    Inputs,
    Terrain,
    objective,
    train_controller,
    warm_start_,
)
from t3c.train.terrain import Ground

SMALL = ControllerConfig(hidden=8, steps=60, batch=32)


def make_terrain(
    seed: int, *, units: int = 6, known: tuple[bool, ...] = (True, True, True), points: int = 0
) -> Terrain:
    """Random chains; `points` seeds their lengths, which devices share."""
    lengths = np.random.default_rng(points).integers(1, 8, units)
    rng = np.random.default_rng([seed, points])
    chains, taken = {}, {}
    for unit, length in enumerate(lengths):
        cost = rng.uniform(0.2, 2, (3, length)).cumsum(axis=1)
        drift = (rng.uniform(0.01, 1, length) ** 3).cumsum()[::-1]
        chains[f"unit{unit}"] = [
            Option(Level(4 * (i + 1), min(8, 4 + i // 2)), float(cost[0, i]), float(drift[i]))
            for i in range(length)
        ]
        taken[f"unit{unit}"] = cost
    total = sum(cost[:, -1:] for cost in taken.values())
    seen = np.array(known)[:, None]
    return Terrain(chains, {u: np.where(seen, c / total, np.nan) for u, c in taken.items()})


def fresh(terrains: Mapping[str, Terrain], config: ControllerConfig, **more: Any) -> Controller:
    chains = next(iter(terrains.values())).chains
    units = {unit: [o.point for o in options] for unit, options in chains.items()}
    return Controller(units, tuple(terrains), config, **more)


def judged(
    controller: Controller, terrains: Mapping[str, Terrain], inputs: Inputs | None = None
) -> float:
    noise = torch.Generator()
    grounds = tuple(Ground.of(terrain) for terrain in terrains.values())
    value = pg.Value(len(grounds), noise)
    return objective(Course(controller, grounds, SMALL, noise, value, inputs=inputs))


def took(terrain: Terrain, points: Mapping[str, Level]) -> np.ndarray:
    index = {u: [o.point for o in terrain.chains[u]].index(p) for u, p in points.items()}
    return np.sum([terrain.shares[u][:, i] for u, i in index.items()], axis=0)


def compare(
    terrains: Mapping[str, Terrain], limited: tuple[bool, ...], count: int = 60
) -> tuple[float, float]:
    """The share of units decided as by the knapsack, and the most a limit is overrun by."""
    controller = fresh(terrains, ControllerConfig())
    warm_start_(controller, terrains)
    policy = controller.to_policy()
    rng = np.random.default_rng(0)
    same, worst = [], 0.0
    for device, terrain in terrains.items():
        path = [allocation.points for allocation in allocations(terrain.chains)]
        costs = np.nan_to_num(np.array([took(terrain, points) for points in path]))
        for _ in range(count):
            limits = np.where(limited, rng.uniform(costs[0], 1), 1.0)
            (fits,) = np.nonzero((costs <= limits + 1e-9).all(axis=1))
            found = policy.points(Token(*limits), device)
            same += [found[unit] == point for unit, point in path[fits[-1]].items()]
            worst = max(worst, float(np.nanmax(took(terrain, found) - limits)))
    return float(np.mean(same)), worst


@pytest.mark.parametrize("seed", range(4))
def test_the_warm_start_decides_as_the_knapsack(seed: int) -> None:
    terrain = {"here": make_terrain(seed, points=seed)}
    same, over = compare(terrain, (True, False, False))
    assert same > 0.999  # the reach is the share of the first resource itself
    assert over < 1e-5
    for limited in ((False, True, False), (True, True, True)):
        same, over = compare(terrain, limited)
        assert same >= 0.95
        assert over <= 1 / 32
    no_latency = {"here": make_terrain(seed, known=(False, True, False))}
    same, over = compare(no_latency, (False, True, False))
    assert same > 0.999
    assert over < 1e-5


def test_the_warm_start_knows_devices_apart() -> None:
    terrains = {name: make_terrain(seed, units=8) for seed, name in enumerate("abc")}
    same, over = compare(terrains, (True, False, False))
    assert same > 0.999
    assert over < 1e-5
    assert compare(terrains, (True, True, True))[1] <= 1 / 32
    with pytest.raises(SpecError, match="hidden"):
        warm_start_(fresh(terrains, replace(SMALL, hidden=2)), terrains)


def test_a_limit_that_an_allocation_just_meets_is_met() -> None:
    terrain = make_terrain(1)
    controller = fresh({"here": terrain}, SMALL)
    warm_start_(controller, {"here": terrain})
    policy = controller.to_policy()
    for allocation in allocations(terrain.chains):
        share = float(took(terrain, allocation.points)[0])
        assert policy.points(Token(latency=share), "here") == allocation.points


@pytest.mark.parametrize("token", ["tuple", "scalar"])
def test_torch_and_numpy_agree(token: Any) -> None:
    terrains = {"a": make_terrain(0), "b": make_terrain(1)}
    config = replace(SMALL, token=token, summary_units=("unit1", "unit3"))
    rng = np.random.default_rng(0)
    controller = fresh(terrains, config, summaries=rng.normal(2, 3, (20, 4)))
    with torch.no_grad():
        for parameter in controller.parameters():
            parameter += torch.from_numpy(rng.normal(size=parameter.shape))
    policy = controller.to_policy()
    limits, summaries = rng.random((10, 3)), rng.normal(2, 9, (10, 4))
    for place, device in enumerate(terrains):
        tensors = torch.from_numpy(limits), place
        logits = controller(*tensors, torch.from_numpy(summaries)).detach().numpy()
        wishes = controller.proposals(*tensors).detach().numpy()
        for row, (limit, summary) in enumerate(zip(limits, summaries, strict=True)):
            scores = policy.scores(Token(*limit), device, summary)
            proposed = policy.proposals(Token(*limit), device)
            for u, (unit, points) in enumerate(policy.about.units.items()):
                expected = logits[row, u, 1 : len(points)]
                found = np.cumsum(scores[policy.about.rows[unit]])
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
                wish = [
                    proposed[unit].level / points[-1].level,
                    proposed[unit].bits / points[-1].bits,
                ]
                np.testing.assert_allclose(wish, wishes[row, u], atol=1e-5)


def test_training_is_never_judged_worse_and_helps_where_the_knapsack_is_blind() -> None:
    gains = []
    for seed in range(2):
        terrains = {"here": make_terrain(seed)}
        warm = fresh(terrains, SMALL)
        warm_start_(warm, terrains)
        trained = train_controller(terrains, replace(SMALL, learning_rate=0.01))
        gains.append(judged(warm, terrains) - judged(trained, terrains))
    assert min(gains) >= 0
    assert max(gains) > 1e-3  # several limits at once are not what its one path is for


@pytest.mark.parametrize("method", ["gumbel", "reinforce"])
def test_a_bad_policy_learns(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("t3c.train.controller.ENTROPY", 0.05)
    terrains = {"here": make_terrain(2, units=3)}
    config = replace(SMALL, method=method, steps=150, learning_rate=0.03)
    start = fresh(terrains, config)
    with torch.no_grad():
        start.place -= 1.0  # takes the top whatever the budget
    before = {n: p.clone() for n, p in start.state_dict().items()}
    history: list[Mapping[str, float]] = []
    trained = train_controller(
        terrains, config, start=start, on_step=lambda _, v: history.append(v)
    )
    assert all(torch.equal(before[n], p) for n, p in start.state_dict().items())
    assert judged(trained, terrains) < judged(start, terrains) - 0.5
    early, late = (np.mean([v["overrun"] for v in some]) for some in (history[:5], history[-5:]))
    assert late < 0.2 * early  # though the budgets of the first stage are the loose ones
    assert len(history) == config.steps


def test_two_runs_agree() -> None:
    terrains = {"a": make_terrain(3), "b": make_terrain(4)}
    config = replace(SMALL, steps=12, proposals=True)
    torch.manual_seed(1)
    first = train_controller(terrains, config)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = train_controller(terrains, config)
    assert torch.equal(state, torch.get_rng_state())
    same = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in same)


def test_a_reward_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one unit is worth its cost, which no drift says."""
    monkeypatch.setattr("t3c.train.controller.ENTROPY", 0.05)
    terrain = make_terrain(5, units=3, points=3)
    worthy = max(terrain.chains, key=lambda unit: len(terrain.chains[unit]))
    calls = []

    def reward(points: Mapping[str, Level]) -> float:
        calls.append(tuple(points.values()))
        return points[worthy].level / terrain.chains[worthy][-1].point.level

    config = replace(SMALL, method="reinforce", steps=150, learning_rate=0.03)
    start = fresh({"here": terrain}, config)
    with torch.no_grad():
        start.place += 1.0  # takes the bottom whatever the budget
    trained = train_controller({"here": terrain}, config, reward=reward, start=start)
    assert len(calls) == len(set(calls))  # a network is not run twice for the same points

    ground = Ground.of(terrain)
    limits = torch.tensor([[share, 1.0, 1.0] for share in np.linspace(0.5, 1, 20)]).double()
    choice = trained.decide(limits, 0)
    place = list(terrain.chains).index(worthy)
    ranks = (choice * ground.sizes[0]).sum(dim=2).mean(dim=0)
    assert float(ranks[place]) > float(ground.sizes[0, place, 0]) + 0.3
    assert float(ground.overrun(choice, limits).mean()) < 0.01


def test_units_that_see_the_input_use_it() -> None:
    """Samples of a large feature drift a hundred times as much at the first unit."""
    terrain = make_terrain(2, units=4, points=1)
    unit = next(u for u, options in terrain.chains.items() if len(options) > 3)
    summaries = np.random.default_rng(0).permutation([[-1.0]] * 8 + [[1.0]] * 8)
    drift = np.array([o.squared_drift for o in terrain.chains[unit]])
    own = drift * 10.0 ** (2 * summaries)
    config = replace(SMALL, steps=240, learning_rate=0.1, summary_units=(unit,))
    trained = train_controller(
        {"here": terrain}, config, summaries=summaries, sample_drift={unit: own}
    )
    ground = Ground.of(terrain)
    each = ground.drift.repeat(16, 1, 1)
    each[:, list(terrain.chains).index(unit), : own.shape[1]] = torch.from_numpy(own)
    inputs = Inputs(torch.from_numpy(summaries), each)
    score = judged(trained, {"here": terrain}, inputs)
    policy = trained.to_policy()
    with torch.no_grad():
        trained.summary.zero_()
    assert score < judged(trained, {"here": terrain}, inputs)
    token = [Token(latency=share) for share in np.linspace(0.4, 1, 20)]
    easy, hard = (
        sum(policy.indices(t, "here", np.array([s]))[unit] for t in token) for s in (-1.0, 1.0)
    )
    assert easy < hard
    with pytest.raises(SpecError, match="summaries"):
        train_controller({"here": terrain}, config)


def test_proposals_follow_the_decisions() -> None:
    terrains = {"here": make_terrain(0)}
    config = replace(SMALL, steps=60, learning_rate=0.01, proposals=True)
    plain = train_controller(terrains, replace(config, proposals=False)).to_policy()
    fitted = train_controller(terrains, config).to_policy()
    tokens = [Token(latency=share) for share in np.linspace(0.3, 1, 30)]

    def off(policy: Any) -> float:
        gaps = []
        for token in tokens:
            decided, wishes = policy.points(token), policy.proposals(token)
            gaps += [abs(wishes[u].level - p.level) for u, p in decided.items()]
        return float(np.mean(gaps))

    assert off(fitted) < 0.8 * off(plain)


def test_only_what_is_monotone_by_construction_is_exported() -> None:
    terrains = {"here": make_terrain(1)}
    config = replace(SMALL, monotone=False, isotonic=1.0, steps=6)
    controller = train_controller(terrains, config)
    warm = fresh(terrains, config)
    warm_start_(warm, terrains)
    assert warm.to_policy().points(Token()) == {
        unit: options[-1].point for unit, options in terrains["here"].chains.items()
    }
    with torch.no_grad():
        controller.inward[0, 0] = -0.1
    with pytest.raises(SpecError, match="cannot be exported: inward has negative weights"):
        controller.to_policy()


def test_the_hinge_sees_what_falls() -> None:
    sizes = torch.tensor([[[0.25, 1.0]], [[0.5, 1.0]]], dtype=torch.float64)
    up, down = (torch.tensor([[[0.0, x]]], dtype=torch.float64) for x in (50.0, -50.0))
    assert float(pg.isotonic(down, up, sizes)) == 0
    assert float(pg.isotonic(up, down, sizes)) == pytest.approx(0.75 + 0.5)


def test_draws_follow_the_logits() -> None:
    noise = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64).expand(4000, 1, 3)
    choice, log_prob = pg.draw(logits, noise)
    expected = logits[0, 0].softmax(dim=0)
    torch.testing.assert_close(choice.mean(dim=0)[0], expected, atol=0.03, rtol=0)
    torch.testing.assert_close(log_prob.exp(), (choice[:, 0] * expected).sum(dim=1))
    through = pg.straight_through(logits.clone().requires_grad_(), 1.0, noise)
    assert set(through.detach().round(decimals=9).unique().tolist()) == {0.0, 1.0}


def test_what_is_refused() -> None:
    terrain = make_terrain(0)
    bad = {"hidden": 0, "learning_rate": 0.0, "isotonic": -1.0, "method": "evolve"}
    for name, value in bad.items():
        with pytest.raises(SpecError, match=name):
            replace(SMALL, **{name: value})
    with pytest.raises(SpecError, match="reinforce"):
        train_controller({"here": terrain}, SMALL, reward=lambda _: 0.0)
    with pytest.raises(SpecError, match="at least one device"):
        train_controller({}, SMALL)
    with pytest.raises(SpecError, match="1 at the top"):
        Terrain(terrain.chains, {u: 2 * s for u, s in terrain.shares.items()})
    with pytest.raises(SpecError, match="at least one resource"):
        Terrain(terrain.chains, {u: s * np.nan for u, s in terrain.shares.items()})
    with pytest.raises(SpecError, match="chains of 'other'"):
        train_controller({"here": terrain, "other": make_terrain(0, points=9)}, SMALL)
