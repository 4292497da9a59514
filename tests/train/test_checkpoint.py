from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from t3c import files
from t3c.errors import TrainError
from t3c.train import checkpoint
from t3c.train.checkpoint import (
    MODEL,
    OPTIMIZER,
    STATE,
    alone,
    latest,
    load_checkpoint,
    save_checkpoint,
)

FORK = multiprocessing.get_context("fork")


class Net(nn.Module):
    """Tied weights, a transposed layout, and buffers of every sort."""

    def __init__(self, seed: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(width, 3).T)
        self.unused = nn.Parameter(torch.randn(2))
        self.register_buffer("seen", torch.zeros(width, dtype=torch.bool))
        self.register_buffer("coarse", torch.randn(4).bfloat16())
        self.register_buffer("passing", torch.randn(1), persistent=False)
        self.register_buffer("view", self.get_buffer("coarse")[1:3])

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("seen").logical_or_(x.mean(dim=0) > 0.2)
        out: Tensor = self.second(self.norm(self.first(x)).relu()) @ self.turned.T
        return out


def adamw(net: nn.Module, **options: Any) -> torch.optim.AdamW:
    named = list(net.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named if "bias" in n]},
        {"params": [p for n, p in named if "bias" not in n], "lr": 0.03},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), **options)


def go(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        for group in optimizer.param_groups:  # a schedule, which the groups remember
            group["lr"] *= 0.9


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = value
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(a[n], b[n]) for n in a
    )


def trained(folder: Path, *saves: int) -> tuple[Net, torch.optim.AdamW]:
    net = Net(0)
    optimizer = adamw(net)
    done = 0
    for step in saves:
        go(net, optimizer, range(done, step))
        done = step
        save_checkpoint(folder, step, net, optimizer, {"at": step})
    return net, optimizer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}, {"foreach": True}])
def test_a_resumed_run_is_the_run(tmp_path: Path, options: dict[str, bool]) -> None:
    whole = Net(0)
    whole_optimizer = adamw(whole, **options)
    go(whole, whole_optimizer, range(6))
    first = Net(0)
    first_optimizer = adamw(first, **options)
    go(first, first_optimizer, range(3))
    at_three = everything(first, first_optimizer)
    path = save_checkpoint(tmp_path, 3, first, first_optimizer, {})
    assert same(at_three, everything(first, first_optimizer))

    fresh = Net(1)
    optimizer = adamw(fresh)
    parameters, weight = list(fresh.parameters()), fresh.first.weight
    load_checkpoint(path, fresh, optimizer)
    assert same(at_three, everything(fresh, optimizer))
    assert all(p is q for p, q in zip(parameters, fresh.parameters(), strict=True))
    assert fresh.second.weight is weight
    assert fresh.turned.stride() == first.turned.stride()
    go(fresh, optimizer, range(3, 6))
    assert same(everything(whole, whole_optimizer), everything(fresh, optimizer))
    mine, theirs = (
        [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
        for o in (optimizer, whole_optimizer)
    )
    assert mine == theirs
    assert optimizer.state.get(fresh.unused, {}) == {}


def test_what_is_loaded_does_not_write_to_the_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    fresh = Net(1)
    optimizer = adamw(fresh)
    path = latest(tmp_path)
    assert path is not None
    load_checkpoint(path, fresh, optimizer)
    go(fresh, optimizer, range(3, 5))
    assert latest(tmp_path) == path


def test_state_comes_back(tmp_path: Path) -> None:
    net = Net(0)
    optimizer = adamw(net)
    state: dict[str, Any] = {
        "rng": {"state": 2**127 + 1},
        "loss": 0.1 + 0.2,
        "nothing": None,
        "name": "é",
    }
    path = save_checkpoint(tmp_path, 12, net, optimizer, state)
    step, back = load_checkpoint(path, net, optimizer)
    assert (step, back) == (12, state)
    assert names(path) == sorted([MODEL, OPTIMIZER, STATE])


def test_other_optimizers_and_tensor_rates(tmp_path: Path) -> None:
    net = nn.Linear(8, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    net(torch.ones(1, 8)).sum().backward()
    sgd.step()
    path = save_checkpoint(tmp_path, 1, net, sgd, {})
    other = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.5), momentum=0.1)
    load_checkpoint(path, net, other)
    assert torch.equal(other.param_groups[0]["lr"], torch.tensor(0.1))
    assert torch.equal(
        other.state[net.weight]["momentum_buffer"], sgd.state[net.weight]["momentum_buffer"]
    )
    with pytest.raises(TrainError, match="the optimizer is SGD there and AdamW here"):
        load_checkpoint(path, net, torch.optim.AdamW(net.parameters()))


def test_the_newest_two_stay(tmp_path: Path) -> None:
    trained(tmp_path, 1, 2, 3, 10)
    assert names(tmp_path) == ["step-00000003", "step-00000010"]
    newest = latest(tmp_path)
    assert newest == tmp_path / "step-00000010"


def test_no_checkpoint(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    (tmp_path / "notes.txt").write_text("mine")
    assert latest(tmp_path) is None
    trained(tmp_path, 1, 2, 3)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_another_model_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    path = tmp_path / "step-00000002"

    def refused(net: nn.Module, match: str) -> None:
        optimizer = torch.optim.AdamW(net.parameters())
        before = everything(net, optimizer)
        with pytest.raises(TrainError, match=match) as caught:
            load_checkpoint(path, net, optimizer)
        assert "\n" not in str(caught.value)
        assert same(before, everything(net, optimizer))

    refused(Net(1, width=9), r"turned is \(3, 8\) torch.float32 there and \(3, 9\) torch")
    refused(Net(1).double(), r"turned is .*float32 there and .*float64 here")
    untied = Net(1)
    untied.second.weight = nn.Parameter(untied.first.weight.detach().clone())
    refused(untied, r"second\.weight is absent there and \(8, 8\) torch\.float32 here")
    bare = Net(1)
    del bare.seen
    refused(bare, r"seen is \(8,\) torch\.bool there and absent here")
    refused(Net(1), "the optimizer has 2 groups there and 1 here")
    net = Net(1)
    swapped = adamw(net)
    swapped.param_groups[0]["params"].pop()
    before = everything(net, swapped)
    with pytest.raises(TrainError, match=r"the optimizer's groups differ in second\.bias"):
        load_checkpoint(path, net, swapped)
    assert same(before, everything(net, swapped))


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    net = Net(0)
    with pytest.raises(TrainError, match=r"plain JSON: .*set"):
        save_checkpoint(tmp_path, 1, net, adamw(net), {"a": {1}})  # type: ignore[dict-item]
    with pytest.raises(TrainError, match=r"group 0 has a parameter \(3,\) that is not the model's"):
        save_checkpoint(tmp_path, 1, net, torch.optim.AdamW([nn.Parameter(torch.ones(3))]), {})
    with pytest.raises(TrainError, match="at least 0, got -1"):
        save_checkpoint(tmp_path, -1, net, adamw(net), {})
    assert names(tmp_path) == []


def flip(path: Path, position: float) -> None:
    raw = bytearray(path.read_bytes())
    raw[int(position * (len(raw) - 1))] ^= 4
    path.write_bytes(raw)


def cut(path: Path, position: float) -> None:
    os.truncate(path, int(position * (path.stat().st_size - 1)))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    trained(folder, 3, 6)
    return folder


@settings(max_examples=40)
@given(
    name=st.sampled_from([MODEL, OPTIMIZER, STATE]),
    harm=st.sampled_from([flip, cut]),
    position=st.floats(0, 1),
)
def test_a_damaged_file_is_found_wherever_it_is(
    two: Path, name: str, harm: Any, position: float
) -> None:
    path = two / "step-00000006" / name
    whole = path.read_bytes()
    harm(path, position)
    try:
        if name == STATE and json.loads(path.read_bytes()) == json.loads(whole):
            return  # a blank that became another blank is no damage
    except ValueError:
        pass
    heard: list[str] = []
    net = Net(1)
    optimizer = adamw(net)
    before = everything(net, optimizer)
    try:
        assert latest(two, heard.append) == two / "step-00000003"
        assert len(heard) == 1
        assert "step-00000006 is passed over" in heard[0]
        assert name in heard[0]
        assert "\n" not in heard[0]
        with pytest.raises(TrainError, match=name):
            load_checkpoint(path.parent, net, optimizer)
        assert same(before, everything(net, optimizer))
    finally:
        path.write_bytes(whole)
    assert latest(two) == two / "step-00000006"


def test_none_is_whole(tmp_path: Path) -> None:
    trained(tmp_path, 3, 6)
    (tmp_path / "step-00000006" / OPTIMIZER).unlink()
    assert latest(tmp_path) == tmp_path / "step-00000003"
    (tmp_path / "step-00000003" / STATE).unlink()
    with pytest.raises(TrainError, match="no checkpoint is whole") as caught:
        latest(tmp_path)
    assert "\n" not in str(caught.value)
    assert "step-00000006" in str(caught.value)
    assert "step-00000003" in str(caught.value)


def test_a_damaged_one_never_outlives_a_whole_one(tmp_path: Path) -> None:
    net, optimizer = trained(tmp_path, 3, 6)
    cut(tmp_path / "step-00000006" / MODEL, 0.5)
    save_checkpoint(tmp_path, 9, net, optimizer, {})
    assert names(tmp_path) == ["step-00000003", "step-00000009"]
    cut(tmp_path / "step-00000009" / MODEL, 0.5)
    save_checkpoint(tmp_path, 5, net, optimizer, {})  # resumed at 3, saved more often
    assert names(tmp_path) == ["step-00000003", "step-00000005"]
    cut(tmp_path / "step-00000005" / MODEL, 0.5)
    save_checkpoint(tmp_path, 5, net, optimizer, {"second": True})
    path = latest(tmp_path)
    assert path == tmp_path / "step-00000005"
    assert load_checkpoint(path, net, optimizer).state == {"second": True}
    assert names(tmp_path) == ["step-00000003", "step-00000005"]


def test_another_runs_checkpoints_are_not_run_over(tmp_path: Path) -> None:
    net, optimizer = trained(tmp_path, 3, 6)
    with pytest.raises(TrainError, match="holds step-00000006, later than step 4"):
        save_checkpoint(tmp_path, 4, net, optimizer, {})
    assert names(tmp_path) == ["step-00000003", "step-00000006"]


def test_a_death_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders cannot be exchanged in one step, the old one of the same step is found."""
    net, optimizer = trained(tmp_path, 6)
    only = tmp_path / "step-00000006"
    aside = files.beside(only, "previous")
    only.rename(aside)
    assert latest(tmp_path) == aside
    assert load_checkpoint(aside, net, optimizer).step == 6
    monkeypatch.setattr(files, "_swap", lambda a, b: False)
    for state in ({"n": 1}, {"n": 2}):
        save_checkpoint(tmp_path, 6, net, optimizer, state)
        assert names(tmp_path) == ["step-00000006"]
        assert load_checkpoint(only, net, optimizer).state == state


def _save_and_die(folder: Path, net: Net, optimizer: torch.optim.AdamW, where: str) -> None:
    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write(path: Path, *rest: Any) -> str:
        if path.name == where:
            path.write_bytes(b"half")
            die()
        return whole(path, *rest)

    whole = checkpoint._write
    checkpoint._write = write  # type: ignore[assignment]
    for module in (files, checkpoint):
        if hasattr(module, where):
            setattr(module, where, die)
    save_checkpoint(folder, 9, net, optimizer, {})


@pytest.mark.parametrize("where", [MODEL, OPTIMIZER, "_dump", "_sync", "_exchange", "_prune"])
def test_a_killed_save(tmp_path: Path, where: str) -> None:
    net, optimizer = trained(tmp_path, 3, 6)
    kept = everything(net, optimizer)
    process = FORK.Process(target=_save_and_die, args=(tmp_path, net, optimizer, where))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    path = latest(tmp_path, pytest.fail)
    assert path == tmp_path / ("step-00000009" if where == "_prune" else "step-00000006")
    fresh = Net(1)
    other = adamw(fresh)
    load_checkpoint(path, fresh, other)
    assert same(kept, everything(fresh, other))
    save_checkpoint(tmp_path, 9, fresh, other, {})
    assert names(tmp_path) == ["step-00000006", "step-00000009"]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a full disk does, for anyone: writing beyond `size` fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [100, 3000])
def test_a_full_disk_leaves_the_old_ones(tmp_path: Path, size: int) -> None:
    net, optimizer = trained(tmp_path, 3, 6)
    with (
        files_of_at_most(size),
        pytest.raises(TrainError, match=r"step-00000009: cannot be written: .*[Tt]oo large") as e,
    ):
        save_checkpoint(tmp_path, 9, net, optimizer, {"long": "x" * 5000})
    assert "\n" not in str(e.value)
    assert names(tmp_path) == ["step-00000003", "step-00000006"]
    assert latest(tmp_path, pytest.fail) == tmp_path / "step-00000006"


def test_no_right_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = trained(tmp_path, 3)
    with pytest.raises(TrainError, match="cannot be written: "):
        save_checkpoint(tmp_path / "step-00000003" / STATE, 9, net, optimizer, {})

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "_exchange", refuse)
    with pytest.raises(TrainError, match="step-00000009: cannot be written: Permission denied"):
        save_checkpoint(tmp_path, 9, net, optimizer, {})
    assert names(tmp_path) == ["step-00000003"]


def _hold(folder: Path, which: str, ready: Any, done: Any) -> None:
    with alone(folder) if which == "run" else files.locked(folder / "checkpoints"):
        ready.set()
        done.wait(60)


@pytest.mark.parametrize("which", ["run", "save"])
def test_a_second_writer_is_refused(tmp_path: Path, which: str) -> None:
    net, optimizer = trained(tmp_path, 3)
    ready, done = FORK.Event(), FORK.Event()
    process = FORK.Process(target=_hold, args=(tmp_path, which, ready, done))
    process.start()
    try:
        assert ready.wait(60)
        claim = alone(tmp_path) if which == "run" else nullcontext()
        with pytest.raises(TrainError, match="another process is writing it") as caught, claim:
            save_checkpoint(tmp_path, 4, net, optimizer, {})
        assert "\n" not in str(caught.value)
    finally:
        done.set()
        process.join(60)
    with alone(tmp_path):  # a run that is alone may save
        save_checkpoint(tmp_path, 4, net, optimizer, {})
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
