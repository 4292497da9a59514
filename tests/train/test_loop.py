"""Runs as a whole: what they reach, how they stop and go on, what they refuse."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from conftest import low
from oracles import first_order_drift
from t3c.convert import elasticize_, state_of
from t3c.errors import ConvertError, DataError, SpecError, TrainError
from t3c.nn import at, elastic_weights
from t3c.spec import Goal, Profile
from t3c.train import (
    BlockConfig,
    History,
    Keep,
    Objective,
    TrainConfig,
    fit,
    loop,
    reconstruct,
    terms,
)
from t3c.train.config import CertificateTerm
from t3c.zoo.digits import IMAGE, Digits


@pytest.fixture
def model(elastic: nn.Module) -> nn.Module:
    return copy.deepcopy(elastic)


@torch.no_grad()
def drift(model: nn.Module, profile: Profile | None, digits: Digits) -> float:
    x = digits.test[0][:200]
    with at(model, profile):
        z, original = model(x), state_of(model).original(x)
    return float(((z - original).norm(dim=1) / original.norm(dim=1)).mean())


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    mine, others = a.state_dict(), b.state_dict()
    return mine.keys() == others.keys() and all(torch.equal(mine[n], others[n]) for n in mine)


def few(digits: Digits, batch: int = 8) -> DataLoader[tuple[Tensor, ...]]:
    """Shuffled batches of 28 samples, so that a short run goes through them more than once."""
    data = TensorDataset(*(t[:28] for t in digits.train))
    return DataLoader(data, batch, shuffle=True, generator=torch.Generator().manual_seed(5))


def test_training_brings_compressed_views_closer(model: nn.Module, digits: Digits) -> None:
    before = drift(model, low(model), digits)
    statistics = {n: b.clone() for n, b in model.named_buffers()}
    history = fit(model, digits.loader(32), TrainConfig(steps=60, full="trained"))
    assert history.steps == 60
    assert drift(model, low(model), digits) < 0.8 * before
    assert 0 < drift(model, None, digits) < 0.1
    assert all(torch.equal(statistics[n], b) for n, b in model.named_buffers())


def test_two_runs_agree(model: nn.Module, digits: Digits) -> None:
    other = copy.deepcopy(model)
    a = fit(model, few(digits), TrainConfig(steps=4))
    torch.rand(7)  # nothing hangs on the global generator
    b = fit(other, few(digits), TrainConfig(steps=4))
    assert a == b
    assert same_weights(model, other)


def test_answers_that_come_with_the_batches_train_as_the_original_does(
    model: nn.Module, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = digits.train[0]
    with torch.no_grad():
        answers = state_of(model).original(x)
    pairs = [(x[i : i + 16], answers[i : i + 16]) for i in range(0, 64, 16)]
    other, config = copy.deepcopy(model), TrainConfig(steps=6, learning_rate=1e-4)
    asked = fit(model, [inputs for inputs, _ in pairs], config)
    original = state_of(other).original  # that of other tests too
    monkeypatch.setattr(original, "forward", lambda *_: pytest.fail("the original was asked"))
    given = fit(other, pairs, replace(config, teacher="targets"))
    assert given.terms["distill"] == pytest.approx(asked.terms["distill"], rel=1e-4)
    with pytest.raises(DataError, match="training needs labels"):
        fit(other, [x[:16]], replace(config, teacher="targets"))
    with pytest.raises(SpecError, match="leaves no labels for the term `task`"):
        replace(config, teacher="targets", full="trained")


def test_the_certificate_alone_lowers_the_drift_it_predicts(
    model: nn.Module, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "CERTIFICATE_EVERY", 2)
    x, original = digits.test[0][:32], state_of(model).original
    before = first_order_drift(model, original, low(model), x).mean()
    config = TrainConfig(
        steps=40, learning_rate=1e-3, objective=Objective(distill=0, certificate=1, tail=0)
    )
    fit(model, digits.loader(8), config)
    assert first_order_drift(model, original, low(model), x).mean() < 0.8 * before


def test_a_certificate_that_weighs_nothing_leaves_a_run_as_it_was(
    model: nn.Module, digits: Digits
) -> None:
    other, before = copy.deepcopy(model), torch.get_rng_state()
    config = TrainConfig(steps=3, masks=True)
    a = fit(model, few(digits), config)
    kind = replace(config, certificate=CertificateTerm(samples=2))
    b = fit(other, few(digits), kind)
    assert a == b
    assert set(a.terms["certificate"]) == {0.0}
    assert torch.equal(before, torch.get_rng_state())
    assert same_weights(model, other)


def test_the_certificate_goes_with_masks(model: nn.Module, digits: Digits) -> None:
    config = TrainConfig(steps=2, masks=True, objective=Objective(certificate=0.1))
    assert min(fit(model, few(digits), config).terms["certificate"]) > 0


# Runs that are stopped, and go on.

SHORT = TrainConfig(steps=7, goal=Goal(worst_drift=5.0), learning_rate=1e-2)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sgd": {"optimizer": "sgd", "learning_rate": 1e-4},
    "gumbel": {"controller": "gumbel"},
    "reinforce": {"controller": "reinforce", "curriculum": "aimed"},
    "masks": {"masks": True},
    "certificate": {
        "objective": Objective(certificate=0.1), "certificate": CertificateTerm(samples=2),
    },
    "augmented": {
        "full": "trained", "augmentations": ("shift", "crop_and_flip"),
        "label_smoothing": 0.1, "objective": Objective(certificate=0.1),
    },
}  # fmt: skip


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep, validate and take the certificate several times in a short run."""
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(loop, "VALIDATIONS", 2)
    monkeypatch.setattr(terms, "CERTIFICATE_EVERY", 3)


class StopError(Exception):
    """Ends a run from within."""


def test_a_step_of_sgd_moves_a_share_of_the_weights(model: nn.Module, digits: Digits) -> None:
    """The rate does not depend on how large weights or gradients are; the first step is ramped."""
    rate = 1e-4
    config = TrainConfig(
        steps=2, optimizer="sgd", learning_rate=rate, warmup=0.0, weight_decay=0.0,
        objective=Objective(distill=1e6),
    )  # fmt: skip
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    fit(model, digits.loader(32), config)
    moved = {n: (p.detach() - before[n]) for n, p in model.named_parameters()}
    trained = [n for w in elastic_weights(model) for n in moved if n.startswith(f"{w}.elastic.")]
    trained = [n for n in trained if not n.endswith("elastic.dense")]
    assert trained
    size = torch.stack([before[n].norm() for n in trained]).norm()
    length = torch.stack([change.norm() for change in moved.values()]).norm()
    torch.testing.assert_close(length, 1.9 * rate * size, rtol=1e-3, atol=0.0)  # Nesterov's step
    assert not any(bool(moved[n].any()) for n in moved if n not in trained)


def run(
    model: nn.Module, digits: Digits, config: TrainConfig, keep: Keep | None,
    stop: int | None = None,
) -> History:  # fmt: skip
    def on_step(step: int, values: Mapping[str, float]) -> None:
        if step == stop:
            raise StopError

    held = [tuple(t[:10] for t in digits.test)]
    return fit(model, few(digits), config, keep=keep, validation=held, image=IMAGE, on_step=on_step)


def as_recorded(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_ends_as_if_it_had_not(
    elastic: nn.Module, digits: Digits, tmp_path: Path, kind: str
) -> None:
    config = replace(SHORT, **KINDS[kind])
    whole, stopped, resumed = (copy.deepcopy(elastic) for _ in range(3))
    expected = run(whole, digits, config, Keep(tmp_path / "whole"))
    folder = tmp_path / "stopped"
    with pytest.raises(StopError):
        run(stopped, digits, config, Keep(folder), stop=5)  # after the checkpoint of step 4
    assert [p.name for p in sorted((folder / "checkpoints").glob("step-*"))][-1] == "step-00000004"
    torch.rand(3)
    found = run(resumed, digits, config, Keep(folder, resume=True))
    assert found == expected
    assert same_weights(whole, resumed)
    assert not same_weights(whole, elastic)
    assert as_recorded(folder) == as_recorded(tmp_path / "whole")
    if expected.controller is not None:
        assert found.controller is not None
        assert same_weights(expected.controller, found.controller)
    data = [json.loads((f / "run.json").read_text())["data"] for f in (folder, tmp_path / "whole")]
    assert data[0] == data[1]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from t3c.train import Keep, fit, loop, terms
loop.CHECKPOINT_EVERY, terms.CERTIFICATE_EVERY = 2, 3
model, batches, config, folder = torch.load(sys.argv[1], weights_only=False)
def on_step(step, values):
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
fit(model, batches, config, keep=Keep(Path(folder)), on_step=on_step)
"""


@pytest.mark.usefixtures("often")
def test_a_run_that_was_killed_goes_on(elastic: nn.Module, digits: Digits, tmp_path: Path) -> None:
    config = replace(
        SHORT,
        masks=True,
        objective=Objective(certificate=0.1),
        certificate=CertificateTerm(samples=2),
    )
    folder, given = tmp_path / "killed", tmp_path / "given.pt"
    torch.save((elastic, few(digits), config, str(folder)), given)
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(given)], capture_output=True, timeout=120
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-2000:]
    assert len(as_recorded(folder).splitlines()) == 6
    whole, resumed = copy.deepcopy(elastic), copy.deepcopy(elastic)
    expected = fit(whole, few(digits), config, keep=Keep(tmp_path / "whole"))
    assert fit(resumed, few(digits), config, keep=Keep(folder, resume=True)) == expected
    assert same_weights(whole, resumed)
    assert as_recorded(folder) == as_recorded(tmp_path / "whole")


def test_a_folder_that_holds_a_run(elastic: nn.Module, digits: Digits, tmp_path: Path) -> None:
    config, model = replace(SHORT, steps=2), copy.deepcopy(elastic)
    expected = fit(model, few(digits), config, keep=Keep(tmp_path))
    before = as_recorded(tmp_path)
    again = copy.deepcopy(elastic)
    with pytest.raises(TrainError, match=r"^\S+ holds a run already: resume it or name another$"):
        fit(again, few(digits), config, keep=Keep(tmp_path))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"learning_rate": 0.5}, "learning_rate 0.01 there, 0.5 here"),
        ({"controller": "gumbel"}, "controller off there, gumbel here"),
        ({"full": "trained", "seed": 1}, "full kept there, trained here, seed 3407 there, 1 here"),
        ({"goal": Goal()}, "goal.worst_drift 5.0 there, 0.15 here"),
        ({"augmentations": ("shift",)}, r"augmentations \[\] there, \['shift'\] here"),
    ]
    for changed, told in changes:
        with pytest.raises(TrainError, match=f"another configuration: {told}$"):
            fit(again, few(digits), replace(config, **changed), keep=Keep(tmp_path, resume=True))
    assert same_weights(again, elastic)  # what is refused has changed nothing
    steps: list[int] = []
    done = Keep(tmp_path, resume=True)
    found = fit(again, few(digits), config, keep=done, on_step=lambda s, _: steps.append(s))
    assert found == expected
    assert not steps
    assert same_weights(again, model)
    assert as_recorded(tmp_path) == before


def test_a_finished_run_with_masks_is_sorted_again(
    elastic: nn.Module, digits: Digits, tmp_path: Path
) -> None:
    config = replace(SHORT, steps=3, masks=True, learning_rate=0.1)
    model, again = copy.deepcopy(elastic), copy.deepcopy(elastic)
    fit(model, few(digits), config, keep=Keep(tmp_path))
    fit(again, few(digits), config, keep=Keep(tmp_path, resume=True))
    assert same_weights(model, again)
    assert not any(weight.sort_() for weight in elastic_weights(model).values())


def test_resuming_where_nothing_is_starts_anew(
    elastic: nn.Module, digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "VALIDATIONS", 1)
    model, other = copy.deepcopy(elastic), copy.deepcopy(elastic)
    config = replace(SHORT, steps=2)
    with pytest.raises(StopError):  # before any checkpoint
        run(copy.deepcopy(elastic), digits, config, Keep(tmp_path), stop=0)
    a = run(model, digits, config, Keep(tmp_path, resume=True))
    assert a == run(other, digits, config, None)
    assert same_weights(model, other)
    steps = [json.loads(line)["step"] for line in as_recorded(tmp_path).splitlines()]
    assert steps == [0, 1, 1]


# Validation.


@pytest.mark.usefixtures("often")
def test_validation_is_recorded_at_its_steps(
    model: nn.Module, digits: Digits, tmp_path: Path
) -> None:
    held = DataLoader(TensorDataset(*(t[:20] for t in digits.test)), 15, shuffle=True)
    other, before = copy.deepcopy(model), torch.get_rng_state()
    config = TrainConfig(steps=5, goal=Goal(worst_drift=5.0), label_smoothing=0.1)
    history = fit(model, few(digits), config, validation=held, keep=Keep(tmp_path))
    assert torch.equal(before, torch.get_rng_state())  # though the loader shuffles
    assert list(history.validation) == [1, 3, 4]
    views = ("full", "tiny", "med", "max")
    measured = {f"{view}/{what}" for view in views for what in ("loss", "drift", "accuracy")}
    assert all(set(found) == measured for found in history.validation.values())
    lines = [json.loads(line) for line in as_recorded(tmp_path).splitlines()]
    told = {line["step"]: line["values"] for line in lines if line["kind"] == "validation"}
    assert told == history.validation
    x, y = (t[:20] for t in digits.test)
    with torch.no_grad():
        for view, profile in {"full": None, **{p.name: p for p in history.profiles}}.items():
            if view not in views:
                continue
            with at(model, profile):
                z = model.eval()(x)
            last = history.validation[4]
            assert last[f"{view}/loss"] == pytest.approx(
                float(F.cross_entropy(z, y, label_smoothing=0.1)), rel=1e-4
            )
            assert last[f"{view}/accuracy"] == pytest.approx(
                float((z.argmax(1) == y).float().mean())
            )
    assert history.validation[4]["full/drift"] == 0.0
    assert history.validation[4]["tiny/drift"] > history.validation[4]["max/drift"] > 0
    assert fit(other, few(digits), config).terms == history.terms
    assert same_weights(model, other)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (lambda x, y: [], "the validation data is empty"),
        (lambda x, y: [x], r"validation needs batches of \(inputs, target\)"),
        (lambda x, y: iter([(x, y)]), "validation goes through its data again"),
    ],
)
def test_validation_that_cannot_be_is_refused_at_once(
    model: nn.Module, digits: Digits, tmp_path: Path, held: Callable[..., Any], message: str
) -> None:
    steps: list[int] = []
    with pytest.raises(DataError, match=message):
        fit(
            model, few(digits), TrainConfig(steps=2), validation=held(*digits.test),
            keep=Keep(tmp_path / "run"), on_step=lambda step, _: steps.append(step),
        )  # fmt: skip
    assert not steps
    assert not (tmp_path / "run").exists()


# Runs that cannot go on.


def test_labels_that_no_term_reads_change_nothing(model: nn.Module, digits: Digits) -> None:
    x, y = (t[:32] for t in digits.train)
    other, third = copy.deepcopy(model), copy.deepcopy(model)
    config = TrainConfig(steps=4)
    history = fit(model, [(x, y)], config)
    assert fit(other, [x], config) == history
    assert fit(third, [(x, torch.full((32,), 99.0))], config) == history
    assert same_weights(model, other)
    assert same_weights(model, third)


class Named(nn.Module):
    """A network that takes its inputs by name, as those of Hugging Face do; no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, features: Tensor) -> Tensor:
        z: Tensor = self.layers(features)
        return z


@pytest.mark.parametrize("full", ["kept", "trained"])
def test_labels_in_mappings_are_split_off(full: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(48, 32), torch.randint(8, (48,))
    batches = [{"features": x[at : at + 16], "labels": y[at : at + 16]} for at in range(0, 48, 16)]
    model = Named()
    elasticize_(model, batches[0], calibration=batches)
    assert state_of(model).example.keys() == {"features"}
    other = copy.deepcopy(model)
    config = TrainConfig(steps=4, full=full)
    history = fit(model, batches, config)
    pairs = [({"features": batch["features"]}, batch["labels"]) for batch in batches]
    assert fit(other, pairs, config) == history
    assert same_weights(model, other)
    assert reconstruct(model, batches, BlockConfig(steps=2)).rows


def test_data_that_cannot_be_trained_on(model: nn.Module, digits: Digits) -> None:
    x, y = (t[:4] for t in digits.train)
    with pytest.raises(DataError, match="training data is empty"):
        fit(model, [], TrainConfig(steps=2))
    whole = TrainConfig(steps=2, full="trained")
    for batches, message in (
        ([x], "training needs labels: give batches of"),
        ([(x, y[:3])], r"a batch of 4 samples has labels of shape \(3,\)"),
        ([(x, y.tolist())], "labels are a tensor, got list"),
        ([(x, y.float())], "labels of classes are integers, got torch.float32"),
        ([(x, y + 9)], "the model's classes are 0 to 9, got the label"),
    ):
        with pytest.raises(DataError, match=message):
            fit(model, batches, whole)
    with pytest.raises(DataError, match="training data ended after 2 of 5 batches"):
        fit(model, iter([(x, y)] * 2), TrainConfig(steps=5))
    with pytest.raises(ConvertError, match="not elastic"):
        fit(nn.Linear(2, 2), [])
    with pytest.raises(SpecError, match="a loss is one of"):
        fit(model, [(x, y)], TrainConfig(loss="hinge"))
    with pytest.raises(DataError, match=r"a loss is one number, the mean over samples, got \(4,\)"):
        fit(
            model, [(x, y)], TrainConfig(steps=1, full="trained"),
            loss=lambda z, t: F.cross_entropy(z, t, reduction="none"),
        )  # fmt: skip


def alone(**weights: float) -> dict[str, Any]:
    nothing = Objective(0, 0, 0, 0, 0, 0, 0, 1)
    return {"objective": replace(nothing, **weights, gap=0), "full": "trained"}


@pytest.mark.parametrize(
    "given",
    [{}, {"full": "trained"}, alone(certificate=1), alone(task=1)],
    ids=["kept", "trained", "certificate", "task"],
)
def test_a_batch_that_is_not_finite(
    model: nn.Module, digits: Digits, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "CERTIFICATE_EVERY", 1)
    x, y = (t[:4].clone() for t in digits.train)
    bad = x.clone()
    bad[0, 0, 3, 3] = float("nan")
    config = TrainConfig(steps=4, **given)
    told = r"^step 2: the loss is not finite: the batch holds NaN or infinite values \("
    with pytest.raises(TrainError, match=told):
        fit(model, [(x, y), (x, y), (bad, y)], config)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite(model: nn.Module, digits: Digits, value: float) -> None:
    def spoil(step: int, values: Mapping[str, float]) -> None:
        if step == 1:
            with torch.no_grad():
                model.get_parameter("blocks.1.bn2.weight")[3] = value

    told = "step 2: the loss is not finite: parameter 'blocks.1.bn2.weight' is not finite"
    with pytest.raises(TrainError, match=told):
        fit(model, few(digits), TrainConfig(steps=4), on_step=spoil)


def test_a_layer_that_explodes(model: nn.Module, digits: Digits) -> None:
    def grow(step: int, values: Mapping[str, float]) -> None:
        with torch.no_grad():
            model.get_parameter("blocks.1.bn1.weight").fill_(3e38)

    told = "step 1: the loss is not finite: the output of layer 'blocks.1.bn1' is not finite in "
    with pytest.raises(TrainError, match=told):
        fit(model, few(digits), TrainConfig(steps=3), on_step=grow)


class Poison(torch.autograd.Function):
    """Passes values on, and a gradient that is not finite back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * float("nan")


def test_a_gradient_that_is_not_finite_is_named(model: nn.Module, digits: Digits) -> None:
    # Of all that is trained only the last bias has a gradient of NaN.
    head = model.get_submodule("head")
    bias = head.bias
    assert isinstance(bias, Tensor)

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        poisoned: Tensor = Poison.apply(bias)  # type: ignore[no-untyped-call]
        return F.cross_entropy(outputs, target) + 0 * poisoned.sum()

    with pytest.raises(TrainError, match=r"^step 0: the gradient of 'head.bias' is not finite$"):
        fit(model, few(digits), TrainConfig(steps=2, full="trained"), loss=loss)


# Tasks.


def test_a_loss_of_ones_own(model: nn.Module, digits: Digits) -> None:
    seen: list[tuple[int, ...]] = []

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        seen.append((*outputs.shape, *target.shape))
        return F.multi_margin_loss(outputs, target)

    config = TrainConfig(steps=3, full="trained", label_smoothing=0.0)
    task = fit(model, digits.loader(8), config, loss=loss).terms["task"]
    assert seen == [(8, 10, 8)] * 3
    assert len(set(task)) == 3


def test_label_smoothing_is_of_the_task_alone(elastic: nn.Module, digits: Digits) -> None:
    config = TrainConfig(steps=1, full="trained", label_smoothing=0.2)
    batch = [tuple(t[:8] for t in digits.train)]
    smooth, plain = (
        fit(copy.deepcopy(elastic), batch, c).terms
        for c in (config, replace(config, label_smoothing=0.0))
    )
    with torch.no_grad():
        z = state_of(elastic).original(batch[0][0])
        wanted = F.cross_entropy(z, batch[0][1], label_smoothing=0.2)
    assert smooth["task"][0] == pytest.approx(float(wanted), rel=1e-4)
    assert smooth["task"] != plain["task"]
    assert smooth["distill"] == plain["distill"]


def test_values_are_fitted_by_their_drift_alone() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 3))
    x = torch.randn(96, 32)
    y = torch.randn(96, 3)
    elasticize_(net, x[:2], calibration=[x])
    config = TrainConfig(
        steps=4, loss="regression", full="trained", curriculum="aimed", goal=Goal(profiles=1),
    )  # fmt: skip
    before = copy.deepcopy(net)
    history = fit(net, [(x[:32], y[:32])], config, validation=[(x, y)])
    (profile,) = history.profiles
    assert history.terms["distill"][0] == pytest.approx(
        _relative(before, profile, x[:32]), rel=1e-4
    )
    with torch.no_grad():
        task = F.mse_loss(before(x[:32]), y[:32])
    assert history.terms["task"][0] == pytest.approx(float(task), rel=1e-4)
    assert not any("accuracy" in key for key in history.validation[3])
    with pytest.raises(DataError, match="regression takes outputs and targets of one shape"):
        fit(net, [(x, y[:, :2])], config)


@torch.no_grad()
def _relative(net: nn.Module, profile: Profile, x: Tensor) -> float:
    with at(net, profile):
        z = net(x)
    before = state_of(net).original(x)
    return float(((z - before).norm(dim=1) / before.norm(dim=1)).mean())


def _language_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        made = transformers.LlamaConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, intermediate_size=64, max_position_embeddings=16,
        )  # fmt: skip
        llama: nn.Module = transformers.LlamaForCausalLM(made)
        return llama
    made = transformers.GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    gpt2: nn.Module = transformers.GPT2LMHeadModel(made)
    return gpt2


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_language_models(kind: str) -> None:
    net = _language_model(kind)
    tokens = torch.randint(0, 60, (16, 12), generator=torch.Generator().manual_seed(1))
    elasticize_(net, {"input_ids": tokens[:2]}, calibration=[{"input_ids": tokens}])
    target = tokens.clone()
    target[:, -3:] = -100  # not predicted
    mask = torch.ones_like(tokens)
    config = TrainConfig(
        steps=3, loss="language_modelling", full="trained", objective=Objective(certificate=0.1)
    )
    named = {"input_ids": tokens, "attention_mask": mask}
    as_dict, as_tensor = copy.deepcopy(net), copy.deepcopy(net)
    history = fit(as_dict, [(named, target)], config, validation=[(named, target)])
    other = fit(as_tensor, [(tokens, target)], config)
    with torch.no_grad():
        logits = state_of(net).original(tokens).logits
    wanted = F.cross_entropy(logits[:, :8].flatten(0, 1), tokens[:, 1:9].flatten())
    assert history.terms["task"][0] == pytest.approx(float(wanted), rel=1e-4)
    assert min(history.terms["distill"]) > 0
    for name, values in other.terms.items():
        assert history.terms[name] == pytest.approx(values, rel=1e-3, abs=1e-6), name
    assert "full/loss" in history.validation[2]
    dropped = replace(config, augmentations=("drop_tokens",), full="kept")
    assert min(fit(as_dict, [(named, target)], dropped).terms["augment"]) > 0
