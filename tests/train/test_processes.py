"""A run in two processes is the run in one."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from t3c.convert import elasticize_
from t3c.errors import DataError
from t3c.spec import Goal, Profile
from t3c.train import Keep, Objective, TrainConfig, fit, schedules, terms
from t3c.train.config import CertificateTerm
from t3c.train.processes import Processes
from t3c.train.run import Run
from t3c.zoo.digits import Digits

# Much decay: parameters that a step does not use must not feel it in two processes either.
BASE: dict[str, Any] = {
    "steps": 5, "learning_rate": 1e-3, "weight_decay": 1.0, "goal": Goal(worst_drift=5.0),
    "objective": Objective(certificate=0.1),
}  # fmt: skip
CONFIGS: dict[str, tuple[int, TrainConfig]] = {
    "odd": (15, TrainConfig(**BASE, full="trained", augmentations=("shift", "crop_and_flip"))),
    "even": (
        16,
        TrainConfig(
            **BASE, certificate=CertificateTerm(samples=2), masks=True, controller="reinforce",
        ),
    ),
}  # fmt: skip

SCRIPT = """
import os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from t3c.errors import DataError
from t3c.train import Keep, fit, schedules, terms
from t3c.train.run import Run

schedules.RAMP, terms.CERTIFICATE_EVERY = 0.01, 2
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
cases = torch.load(folder / "cases.pt", weights_only=False)
profiles, drawn = Run.profile, []

def noted(self, step):
    drawn.append(profiles(self, step))
    return drawn[-1]

def refuse(*_):
    raise AssertionError("only the main process writes")

Run.profile = noted
if rank:
    Run.save = Run.write_manifest = refuse
found = {}
for name, (model, batches, config) in cases.items():
    drawn.clear()
    history = fit(model, batches, config, keep=Keep(folder / name))
    named = [(p.name, dict(p.points)) for p in drawn]
    found[name] = (dict(history.terms), model.state_dict(), named)
try:
    fit(model, [tuple(part[:1] for part in batches[0])], config)
except DataError as error:
    found["small"] = str(error)
torch.save(found, folder / f"found-{rank}.pt")
"""


@pytest.fixture(scope="module")
def elastic(trained: nn.Module, digits: Digits) -> nn.Module:
    net = copy.deepcopy(trained)
    elasticize_(net, digits.train[0][:2], calibration=digits.loader(64))
    return net


def batches(digits: Digits, size: int) -> list[tuple[Tensor, Tensor]]:
    x, y = digits.train
    return [(x[at : at + size], y[at : at + size]) for at in range(0, 3 * size, size)]


@pytest.fixture(scope="module")
def launched(
    elastic: nn.Module, digits: Digits, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """What two processes found, started as a launcher starts them."""
    folder = tmp_path_factory.mktemp("two")
    cases = {name: (elastic, batches(digits, n), config) for name, (n, config) in CONFIGS.items()}
    torch.save({name: copy.deepcopy(case) for name, case in cases.items()}, folder / "cases.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder)], stderr=subprocess.PIPE, text=True,
            env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=180)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(told)[-3000:]
    found = [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in (0, 1)]
    return folder, found


@pytest.mark.parametrize("name", CONFIGS)
def test_two_processes_run_as_one(
    elastic: nn.Module, digits: Digits, launched: tuple[Path, list[dict[str, Any]]], name: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    folder, found = launched
    drawn: list[Profile] = []
    profiles = Run.profile

    def noted(self: Run, step: int) -> Profile:
        drawn.append(profiles(self, step))
        return drawn[-1]

    monkeypatch.setattr(Run, "profile", noted)
    monkeypatch.setattr(schedules, "RAMP", 0.01)
    monkeypatch.setattr(terms, "CERTIFICATE_EVERY", 2)
    size, config = CONFIGS[name]
    model = copy.deepcopy(elastic)
    expected = fit(model, batches(digits, size), config, keep=Keep(tmp_path))
    assert len(drawn) == config.steps
    for values, state, mine in (each[name] for each in found):
        assert mine == [(p.name, p.points) for p in drawn]
        _close(values, expected.terms, 1e-4)
        for key, value in model.state_dict().items():
            # By norms: Adam makes full steps of gradients that are all rounding.
            off = (state[key] - value).double().norm()
            assert off <= 1e-4 * value.double().norm(), key
    assert found[0][name][0] == found[1][name][0]
    ranks = [each[name][1] for each in found]
    assert all(torch.equal(ranks[0][key], ranks[1][key]) for key in ranks[0])
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(config.steps))
    manifests = [json.loads((at / "run.json").read_text()) for at in (folder / name, tmp_path)]
    assert manifests[0]["data"] == manifests[1]["data"]


def _close(mine: Mapping[str, Any], others: Mapping[str, Any], rtol: float) -> None:
    assert mine.keys() == others.keys()
    for name, values in mine.items():
        assert list(values) == pytest.approx(list(others[name]), rel=rtol, abs=1e-6), name


def test_a_batch_smaller_than_the_processes(launched: tuple[Path, list[dict[str, Any]]]) -> None:
    told = "a part of 1 samples cannot be shared by 2 processes"
    assert [each["small"] for each in launched[1]] == [told, told]


@given(rows=st.integers(1, 20), count=st.integers(1, 6))
def test_weighted_shares_are_the_mean_of_all(rows: int, count: int) -> None:
    values, total = torch.arange(1.0, rows + 1), 0.0
    for rank in range(count):
        processes = Processes()
        processes.rank, processes.count = rank, count
        if rows < count:
            with pytest.raises(DataError, match=f"{rows} samples cannot be shared by {count}"):
                processes.share(values)
            continue
        mine, weight = processes.share(values)
        assert isinstance(mine, Tensor)
        assert torch.equal(mine, values[processes.rows])
        total += weight * float(mine.mean()) / count
    if rows >= count:
        assert total == pytest.approx(float(values.mean()), rel=1e-5)
