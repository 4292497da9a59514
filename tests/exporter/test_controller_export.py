"""Exports whose profiles a controller allocates, beside those of the knapsack."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import t3c
from conftest import LIGHT, quick, supply_times
from t3c.artifact.reader import Artifact
from t3c.certify.sensitivity import layer_sensitivities
from t3c.control.menu import Option
from t3c.control.policy import ARRAYS, Policy
from t3c.control.token import Token
from t3c.convert import elasticize_, state_of, units
from t3c.errors import SpecError
from t3c.exporter import ExportConfig, allocate, content, export
from t3c.exporter.allocate import DEVICE, Allocated, sample_drift
from t3c.spec import Goal
from t3c.train.policy_net import Controller, ControllerConfig

SEEING = "layer 3"
CONTROLLER = ControllerConfig(steps=40, hidden=8, summary_units=(SEEING,))
KINDS = {"controller": CONTROLLER, "knapsack": None}


@pytest.fixture(scope="module")
def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    sizes = torch.linspace(0.3, 2, 80)[torch.randperm(80), None, None]
    samples = torch.randn(80, 2, 32) * sizes
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)
    model = nn.Sequential(nn.Flatten(), *layers).eval()
    elasticize_(model, samples[:2], calibration=[samples])
    return model, samples


@pytest.fixture(scope="module")
def exported(
    network: tuple[nn.Module, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Allocated]]:
    """An artifact of each kind of proposals, and what was written into it."""
    folder, found = tmp_path_factory.mktemp("controlled"), {}
    model, samples = network
    exporter = sys.modules["t3c.exporter.export"]
    write = content.write
    with pytest.MonkeyPatch.context() as patch:
        supply_times(patch)
        patch.setattr(content, "topology", cache(content.topology))
        patch.setattr(exporter, "to_original", cache(exporter.to_original))
        for kind, controller in KINDS.items():
            written: list[Allocated] = []

            def remember(*args: object, mine: list[Allocated] = written, **more: object) -> object:
                mine.append(args[2])  # type: ignore[arg-type]
                return write(*args, **more)  # type: ignore[arg-type]

            patch.setattr(content, "write", remember)
            path = folder / f"{kind}.t3c"
            config = ExportConfig(
                threads=1, goal=Goal(profiles=4, worst_drift=2.0), timing=quick(5),
                certificate=LIGHT, controller=controller,
            )  # fmt: skip
            export(model, path, [samples], config)
            (found[kind],) = [(path, allocated) for allocated in written]
    return found


Exports = dict[str, tuple[Path, Allocated]]


@pytest.mark.parametrize("kind", KINDS)
def test_profiles_are_nested_up_to_the_top(kind: str, exported: Exports) -> None:
    chain = Artifact(exported[kind][0]).manifest.chain
    assert len(chain) >= 3
    for below, above in itertools.pairwise(chain):
        assert below <= above
        assert below.points != above.points
    top = list(chain)[-1]
    specs = Artifact(exported[kind][0]).manifest.specs
    assert all(p.rank == specs[n].full_rank and p.bits == 8 for n, p in top.points.items())
    drifts = [exported[kind][1].drifts[profile.name] for profile in chain]
    assert drifts == sorted(drifts, reverse=True)


def test_without_a_controller_nothing_tells_of_one(exported: Exports) -> None:
    path = exported["knapsack"][0]
    assert "controller" not in json.loads((path / "manifest.json").read_bytes())
    assert not any("controller" in name for name in load_file(path / "dense.safetensors"))
    assert Artifact(path).controller() is None
    assert t3c.load(path, threads=1).controller is None


def test_the_controller_is_read_as_it_was_written(exported: Exports) -> None:
    path, allocated = exported["controller"]
    assert allocated.control is not None
    stored = load_file(path / "dense.safetensors")
    assert {n for n in stored if n.startswith("controller/")} == {f"controller/{n}" for n in ARRAYS}
    assert all(stored[f"controller/{n}"].dtype == np.float32 for n in ARRAYS)
    entry = json.loads((path / "manifest.json").read_bytes())["controller"]
    assert entry["devices"] == [DEVICE]
    assert entry["summarized"] == [SEEING]
    assert entry["token"] == "tuple"
    read = Artifact(path).controller()
    assert read is not None
    for name, array in allocated.control.policy.tensors().items():
        assert np.array_equal(array, read.policy.tensors()[name])
        assert array.size or name not in ("slope", "lift", "summary", "summary_mean")
    assert read.policy.about == allocated.control.policy.about
    assert read.profiles == allocated.control.profiles
    assert list(read.profiles) == [p.name for p in allocated.profiles]
    assert read.shares == allocated.control.shares
    assert [len(row) for row in read.shares.values()] == [3] * len(read.profiles)
    top = list(read.shares.values())[-1]
    assert top == (pytest.approx(1), pytest.approx(1), None)


def test_an_open_budget_reaches_the_top_and_a_small_one_the_bottom(exported: Exports) -> None:
    runtime = t3c.load(exported["controller"][0], threads=1)
    assert runtime.controller is not None
    names = [profile.name for profile in runtime.chain]
    assert runtime.controller.propose((1e9, 1e9, 1e9), _taken(runtime)) == names[-1]
    assert runtime.controller.propose((1e-9, 1e-9, 1e-9), _taken(runtime)) == names[0]
    sizes = np.linspace(0, runtime.candidates[-1].size_mb, 100)
    seen = [runtime.controller.propose((None, size, None), _taken(runtime)) for size in sizes]
    assert list(dict.fromkeys(seen)) == names  # each once, in order


def _taken(runtime: t3c.Runtime) -> list[tuple[float | None, float, float | None]]:
    return [(c.latency_ms(), c.size_mb, c.energy_mj) for c in runtime.candidates]


def test_an_unknown_unit_cannot_see_the_input(network: tuple[nn.Module, torch.Tensor]) -> None:
    model, samples = network
    plans = state_of(model).plan.layers
    shared = {unit.name: unit for unit in units(plans)}
    config = ControllerConfig(summary_units=("head",))
    with pytest.raises(SpecError, match=r"^no unit is called 'head', only 'layer 1', .*'layer 5'"):
        allocate.trained_policy(None, shared, samples, {}, config)  # type: ignore[arg-type]


def test_drifts_of_samples_are_what_their_mean_is_of(
    network: tuple[nn.Module, torch.Tensor],
) -> None:
    model, samples = network
    unit = next(u for u in units(state_of(model).plan.layers) if u.name == SEEING)
    found = layer_sensitivities(model, samples[:5])
    options = [Option(point, 0.0, 0.0) for point in unit.points()]
    drift = sample_drift(unit, options, found)
    assert drift.shape == (5, len(options))
    for column, option in zip(drift.T, options, strict=True):
        points = unit.layer_points(option.point)
        wanted = sum(found[name].squared_drift(point) for name, point in points.items())
        assert column.mean() == pytest.approx(wanted, rel=1e-6, abs=1e-12)
    one = layer_sensitivities(model, samples[2:3])
    alone = [one["3"].squared_drift(unit.layer_points(o.point)["3"]) for o in options]
    assert drift[2] == pytest.approx(alone, rel=1e-4, abs=1e-9)
    assert drift[:, 0].std() > 0


def test_what_a_policy_leaves_out_at_the_top_is_shipped_anyway() -> None:
    """A policy that never leaves the bottom still has the whole network beside it."""
    policy, chains = _policy(lambda arrays: arrays | {"threshold": arrays["threshold"] + 1e6})
    path = allocate.decided(policy, chains)
    assert [a.points["a"].level for a in path] == [1, 3]
    policy, chains = _policy(lambda arrays: arrays)
    ranks = [a.points["a"].level for a in allocate.decided(policy, chains)]
    assert ranks == sorted(set(ranks))
    assert ranks[-1] == 3
    assert policy.points(Token())["a"].level == 3


Arrays = dict[str, np.ndarray]


def _policy(change: Callable[[Arrays], Arrays]) -> tuple[Policy, dict[str, list[Option]]]:
    points = [t3c.spec.Level(level, 8) for level in (1, 2, 3)]
    made = Controller({"a": points}, ("device",), ControllerConfig(hidden=2)).to_policy()
    made = replace(made, threshold=np.array([1.0, 2.0], np.float32))
    chains = {"a": [Option(p, i + 1.0, 3.0 - i) for i, p in enumerate(points)]}
    return Policy(made.about, **change(dict(made.tensors()))), chains


def test_continuous_proposals_are_projected_to_nested_points(exported: Exports) -> None:
    policy = Artifact(exported["controller"][0]).controller()
    assert policy is not None
    about = policy.policy.about
    chains = {
        unit: [Option(p, float(i + 1), float(len(points) - i)) for i, p in enumerate(points)]
        for unit, points in about.units.items()
    }
    path = allocate.decided(policy.policy, chains, continuous=True)
    assert len(path) > 2
    assert path[-1].points == {unit: points[-1] for unit, points in about.units.items()}
    for below, above in itertools.pairwise(path):
        assert all(below.points[unit] <= above.points[unit] for unit in chains)


def test_a_controller_that_nothing_proves_monotone_is_refused_before_any_work() -> None:
    with pytest.raises(SpecError, match="not monotone by construction"):
        ExportConfig(controller=ControllerConfig(monotone=False))
