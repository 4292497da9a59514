"""A learned policy against the knapsack, greedy and uniform allocation, at equal cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from lab.allocation.greedy import greedy, uniform
from lab.paths import within
from t3c.control.knapsack import Allocation, allocations
from t3c.control.options import layer_profile
from t3c.control.policy import Policy
from t3c.convert import elasticize_, state_of
from t3c.exporter.allocate import decided
from t3c.spec import Level
from t3c.train import TrainConfig, fit
from t3c.train.controller import train_controller
from t3c.train.losses import classification
from t3c.train.policy_net import ControllerConfig
from t3c.train.targets import Targets, find_targets
from t3c.train.terrain import Terrain
from t3c.zoo.subjects import SUBJECTS, Labelled
from t3c.zoo.views import View, outputs, tested

SEEDS = (3407, 2025, 9157)
BUDGETS = 8
REWARDED = 64  # samples that a reward is taken on
METHODS = ("knapsack", "greedy", "uniform", "gumbel", "reinforce")
Say = Callable[[str], object]


@dataclass(frozen=True)
class Study:
    """A trained network with its chains, samples to reward on, and others nothing was tuned on."""

    model: nn.Module
    targets: Targets
    rewarded: Labelled
    test: Labelled

    @cached_property
    def originals(self) -> dict[str, Tensor]:
        """What the original answers to either part."""
        original = state_of(self.model).original
        return {name: outputs(original, None, getattr(self, name)) for name in ("rewarded", "test")}

    def view(self, points: Mapping[str, Level], part: Literal["rewarded", "test"]) -> View:
        """How the network does at points of units."""
        profile = layer_profile(self.targets.units, points, "studied")
        labelled: Labelled = getattr(self, part)
        answers = outputs(self.model, profile, labelled)
        return tested(answers, self.originals[part], labelled[1], classification)


def study(subject: str, steps: int, batch: int, count: int, seed: int) -> Study:
    """A subject trained for every profile with a seed; chains are of the trained network."""
    found = SUBJECTS[subject]()
    elasticize_(found.model, found.example, calibration=found.statistics)
    config = TrainConfig(steps=steps, seed=seed)
    fit(found.model, found.batches(batch, seed), config, image=found.image)
    rewarded = (found.validation[0][:REWARDED], found.validation[1][:REWARDED])
    targets = find_targets(found.model, rewarded[0], config.goal)
    return Study(found.model, targets, rewarded, (found.test[0][:count], found.test[1][:count]))


def paths(mine: Study, seed: int) -> dict[str, list[Allocation]]:
    """The nested allocations of every method, by increasing cost."""
    chains = mine.targets.chains
    terrain = {"counted": Terrain(chains, mine.targets.shares)}

    def reward(points: Mapping[str, Level]) -> float:
        return -math.log(max(mine.view(points, "rewarded").drift, 1e-9))

    def learned(config: ControllerConfig, **given: Any) -> list[Allocation]:
        policy: Policy = train_controller(terrain, config, **given).to_policy()
        return decided(policy, chains)

    few = ControllerConfig(method="reinforce", steps=80, batch=4, seed=seed)
    return {
        "knapsack": allocations(chains),
        "greedy": greedy(chains),
        "uniform": uniform(chains),
        "gumbel": learned(ControllerConfig(seed=seed)),
        "reinforce": learned(few, reward=reward),
    }


def policy_rows(subject: str, steps: int, batch: int, count: int, say: Say) -> list[dict[str, Any]]:
    """Drift and accuracy of each method at each budget and seed; what it spends beside it."""
    rows = []
    for seed in SEEDS:
        say(f"{subject}, seed {seed}: training for {steps} steps")
        mine = study(subject, steps, batch, count, seed)
        say(f"{subject}, seed {seed}: policies")
        found = paths(mine, seed)
        least = max(path[0].cost for path in found.values())
        for budget in np.geomspace(least * 1.05, 0.95, BUDGETS):
            for method, path in found.items():
                taken = within(path, float(budget))
                view = mine.view(taken.points, "test")
                rows.append(
                    {
                        "model": subject, "method": method, "budget": float(budget), "seed": seed,
                        "spent": taken.cost, "drift": view.drift, "accuracy": view.accuracy,
                        "samples": count,
                    }
                )  # fmt: skip
    return rows


def summary_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means and standard errors over the seeds, budget by budget, and the ratio to the knapsack.

    Budgets of different seeds differ by where their cheapest allocation is; they are compared by
    their place, from the tightest to the loosest.
    """
    table: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        for seed in SEEDS:
            mine = [r for r in rows if r["model"] == model and r["seed"] == seed]
            levels = sorted({r["budget"] for r in mine})
            for row in mine:
                key = (model, row["method"], levels.index(row["budget"]))
                table.setdefault(key, []).append(row)
    found = []
    for (model, method, level), mine in sorted(table.items(), key=lambda item: item[0]):
        base = table[model, "knapsack", level]
        ratios = [r["drift"] / max(b["drift"], 1e-9) for r, b in zip(mine, base, strict=True)]
        found.append(
            {
                "model": model, "method": method, "level": level,
                "budget": _mean(mine, "budget"), "spent": _mean(mine, "spent"),
                "drift": _mean(mine, "drift"), "drift_se": _error([r["drift"] for r in mine]),
                "accuracy": _mean(mine, "accuracy"),
                "accuracy_se": _error([r["accuracy"] for r in mine]),
                "to_knapsack": float(np.mean(ratios)), "to_knapsack_se": _error(ratios),
                "samples": mine[0]["samples"], "seeds": len(mine),
            }
        )  # fmt: skip
    return found


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def _error(values: Sequence[float]) -> float:
    """The standard error of a mean."""
    if len(values) < 2:
        return 0.0
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))
