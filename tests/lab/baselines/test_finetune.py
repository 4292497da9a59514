"""The training that baselines share: planned by the clock, the same for all, and in place."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn

from lab.baselines import finetune
from lab.baselines.baseline import Task
from lab.baselines.finetune import (
    TIMED,
    Training,
    copied,
    descend,
    finetune_,
    reparametrize_,
    settle_,
    to_openvino,
    weighted,
)
from lab.baselines.kdptq import kdptq
from lab.baselines.loracomp import loracomp
from lab.baselines.lrft import lrft
from lab.baselines.magprune import magprune
from lab.baselines.moveprune import moveprune
from lab.baselines.mpqat import mpqat
from lab.baselines.ptq4 import ptq4
from lab.baselines.qat8 import qat8
from lab.baselines.sparsegpt import sparsegpt
from t3c.engines.openvino import OpenVINO
from t3c.errors import DataError, SpecError, TrainError
from t3c.nn.inputs import select


def training(**options: Any) -> Training:
    return tiny.task(**options).trained("a test")


@pytest.fixture
def student() -> nn.Module:
    model = copied(tiny.network())
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    return model


def test_batches_are_the_same_again_and_take_every_sample_once_an_epoch() -> None:
    given = training()
    one, other = (list(itertools.islice(given.batches(), 4)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    epochs = [torch.cat([one[i], one[i + 1]]) for i in (0, 2)]
    for epoch in epochs:
        assert {row.sum().item() for row in epoch} == {x.sum().item() for x in given.inputs}
    assert not torch.equal(*epochs)


def test_batches_of_several_inputs_keep_samples_together() -> None:
    ids = torch.arange(40).reshape(10, 4)
    given = Training(tiny.network(), {"ids": ids, "mask": 2 * ids}, 1.0, batch=4)
    batch = next(given.batches())
    assert list(batch) == ["ids", "mask"]
    assert torch.equal(batch["mask"], 2 * batch["ids"])


def test_fewer_samples_than_a_batch_are_all_taken() -> None:
    assert len(next(training(batch=1000).batches())) == 32


def test_training_draws_the_model_to_the_original(student: nn.Module) -> None:
    given, shares, seen = training(steps=30), list[float](), list[Any]()
    statistics = copy.deepcopy(student.norm.state_dict())
    with tiny.unchanged(given.model):
        done = finetune_(
            student, given, learning_rate=3e-3, before_step=shares.append,
            watch=lambda *told: seen.append(told),
        )  # fmt: skip
    assert done.steps == len(done.losses) == 30
    assert done.seconds > 0
    assert shares == [step / 30 for step in range(30)]
    assert seen[-1] == (f"step 30: loss {done.losses[-1]:.3f}", 30, 30)
    assert np.mean(done.losses[-5:]) < 0.5 * done.losses[0]
    for name in ("running_mean", "running_var"):
        assert torch.equal(statistics[name], student.norm.state_dict()[name])


def test_minutes_are_turned_into_steps_that_fit(
    monkeypatch: pytest.MonkeyPatch, student: nn.Module
) -> None:
    """A first step of 30 s, then steps of 2 s: of a minute 20 s are left to train in."""
    clock, calls, shares = SimpleNamespace(now=0.0), itertools.count(), list[float]()
    monkeypatch.setattr(finetune, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def slow(*_: object) -> None:
        clock.now += 2.0 if next(calls) else 30.0

    pinned = copy.deepcopy(student)
    handle = student.register_forward_pre_hook(slow)
    done = finetune_(
        student, training(steps=None), learning_rate=1e-3, before_step=shares.append
    )  # fmt: skip
    handle.remove()
    wanted = int((60 - 30 - 2 * (TIMED - 1)) / 2)
    assert done.steps == wanted
    assert done.seconds == 60
    assert shares == [0.0] * TIMED + [step / wanted for step in range(wanted)]
    # What was timed has left no trace.
    again = finetune_(pinned, training(steps=wanted), learning_rate=1e-3)
    assert again.losses == done.losses
    for name, value in student.state_dict().items():
        assert torch.equal(value, pinned.state_dict()[name]), name


def test_minutes_too_few_for_a_step_are_one_step(
    monkeypatch: pytest.MonkeyPatch, student: nn.Module
) -> None:
    ticks = itertools.count(0, 100)
    monkeypatch.setattr(finetune, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert finetune_(student, training(steps=None), learning_rate=1e-3).steps == 1


def test_a_loss_that_is_not_finite_names_its_step(student: nn.Module) -> None:
    def broken(share: float) -> None:
        if share == 0.5:
            nn.init.constant_(student.head.weight, torch.nan)

    with pytest.raises(TrainError, match=r"^step 3: the loss is not finite: nan$"):
        finetune_(student, training(steps=4), learning_rate=1e-3, before_step=broken)


def test_a_step_is_clipped_and_a_bad_loss_changes_nothing() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with pytest.raises(TrainError, match=r"^the loss is not finite: inf$"):
        descend(optimizer, weight.sum() * torch.inf)
    assert weight.tolist() == [3.0, 4.0]
    assert descend(optimizer, weight.square().sum(), clip_norm=0.5) == 25.0
    assert weight.tolist() == pytest.approx([2.7, 3.6], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"minutes": 0.0}, "minutes must be positive, got 0"),
     ({"minutes": float("nan")}, "minutes must be positive, got nan"),
     ({"steps": 0}, "steps must be at least 1, got 0"),
     ({"batch": 0}, "batch must be at least 1, got 0"),
     ({"inputs": torch.zeros(0, 3, 8, 8)}, "there is no sample to train on")],
)  # fmt: skip
def test_a_training_that_cannot_be_is_refused(options: Any, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}$"):
        training(**options)


class Pushed(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.detach().sign()


def test_layers_that_share_a_weight_are_changed_together() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(1, 2, 3), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    layers = weighted(model)
    assert {name: len(sharing) for name, sharing in layers.items()} == {"0": 2, "1": 1}
    before = model[0].weight.detach().clone()
    for sharing in layers.values():
        reparametrize_(sharing, Pushed())
    assert len(list(model.parameters())) == 5
    settle_(layers)
    assert model[2].weight is model[0].weight
    assert torch.equal(model[0].weight, before + before.sign())
    assert sorted(model.state_dict()) == sorted(
        f"{i}.{k}" for i in "012" for k in ("weight", "bias")
    )


def test_a_model_for_openvino_computes_the_same() -> None:
    model, images = tiny.network().eval(), tiny.images(1, 5)
    graph = to_openvino(model, images)
    found = OpenVINO(1).compile_read(graph).run([images.numpy()])[0]
    with torch.no_grad():
        assert np.allclose(found, model(images).numpy(), atol=1e-5)


class Pair(nn.Module):
    """Two inputs by name; what it answers is in an object, as of a Hugging Face model."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(30, 16), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        words = attention_mask[..., None].float()
        mean = (self.table(input_ids) * words).sum(dim=1) / words.sum(dim=1)
        return {"logits": self.head(mean)}


def texts(count: int) -> dict[str, Tensor]:
    ids = torch.randint(30, (count, 6), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(6) < 3 + torch.arange(count)[:, None] % 4).long()
    return {"input_ids": ids, "attention_mask": mask}


def test_a_model_of_named_inputs_for_openvino_computes_the_same() -> None:
    model, given = Pair().eval(), texts(4)
    graph = to_openvino(model, select(given, slice(0, 1)))
    arrays = [value.numpy() for value in given.values()]
    found = OpenVINO(1).compile_read(graph).run(arrays)[0]
    with torch.no_grad():
        assert np.allclose(found, model(**given)["logits"].numpy(), atol=1e-5)


@pytest.mark.parametrize("method", [ptq4, lrft, loracomp, sparsegpt, kdptq])
def test_methods_for_texts_take_named_inputs(method: Any) -> None:
    given = texts(16)
    training = Training(Pair().eval(), given, 1.0, steps=2, batch=8)
    task = Task(b"", given, OpenVINO(1), transformer=True, training=training)
    with tiny.plain_kernels():
        made = method(task)
    found = OpenVINO(1).compile_read(made.model).run(task.arrays)[0]
    assert found.shape == (16, 3)
    assert np.isfinite(found).all()


METHODS = (qat8, kdptq, mpqat, magprune, moveprune, lrft, loracomp)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_without_training_data_there_is_one_clear_error(method: Any) -> None:
    with pytest.raises(DataError) as caught:
        method(replace(tiny.task(), training=None))
    wanted = "trains: it needs the model in torch and data to train on"
    assert str(caught.value) == f"{method.__name__} {wanted}"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_products_are_halved_where_asked_for_but_not_with_quantizers_of_nncf(
    monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    seen: set[torch.dtype] = set()
    convolve = torch.nn.functional.conv2d

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        found = convolve(*args, **kwargs)
        if torch.is_grad_enabled():
            seen.add(found.dtype)
        return found

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.nn.functional, "conv2d", noted)
    with tiny.plain_kernels():
        made = method(tiny.task(precision="auto", steps=2))
    assert (torch.bfloat16 in seen) == (method not in (qat8, kdptq))
    assert made.steps == 2
