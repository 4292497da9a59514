"""One-shot pruning: what runs has the zeros, is near the original, and is packed as such."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from torch import Tensor, nn

from lab.baselines import magprune
from lab.baselines.baseline import Baseline, Task
from lab.baselines.finetune import Training
from lab.baselines.layers import weight_layers
from lab.baselines.sparsegpt import sparsegpt
from t3c.engines.openvino import OpenVINO
from t3c.errors import SpecError

ENGINE = OpenVINO(1)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1, groups=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10),
    )  # fmt: skip


def tokens() -> nn.Module:
    """Rows of images, each a token."""
    return nn.Sequential(
        nn.Flatten(1, 2), nn.Linear(16, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 32),
        nn.ReLU(), nn.Linear(32, 4), nn.Flatten(), nn.Linear(192, 10),
    )  # fmt: skip


MAKERS = {"convolutions": convolutions, "tokens": tokens}


def images(count: int, seed: int) -> Tensor:
    """Smooth images, whose neighbouring pixels go together as in pictures."""
    coarse = torch.randn(count, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(coarse, 16, mode="bilinear")


@cache
def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MAKERS[name]().eval()


def task(name: str) -> Task:
    kind: Any = "float" if name == "tokens" else "int8"
    samples = images(16 if kind == "int8" else 64, 0)
    training = Training(network(name), samples, minutes=1)
    return Task(b"", samples, ENGINE, kind, training=training)


@cache
def made(name: str) -> Baseline:
    return sparsegpt(task(name))


def codes(graph: ov.Model) -> list[Any]:
    """The 8-bit weights that run."""
    constants = [op for op in graph.get_ops() if op.get_type_name() == "Constant"]
    return [op.data for op in constants if op.get_element_type() == ov.Type.i8]


def drift(outputs: Any, name: str, test: Tensor) -> float:
    with torch.no_grad():
        wanted = network(name)(test).numpy()
    return float(np.linalg.norm(outputs - wanted) / np.linalg.norm(wanted - wanted.mean(0)))


@pytest.mark.parametrize("name", MAKERS)
def test_half_of_each_layer_that_runs_is_zero(name: str) -> None:
    found = codes(made(name).model)
    assert len(found) == len(weight_layers(network(name)))
    for code in found:  # a few of those that are left round to zero
        assert 0.5 <= (code == 0).mean() < 0.55


@pytest.mark.parametrize("name", MAKERS)
def test_it_is_nearer_than_pruning_by_magnitude(name: str) -> None:
    plain, test = copy.deepcopy(network(name)), images(64, 1)
    for layer in weight_layers(plain).values():
        size = layer.weight.detach().abs()
        layer.weight.data *= size > size.median()
    session = ENGINE.compile_read(made(name).model)
    found = np.concatenate([session.run([image[None]])[0] for image in test.numpy()])
    with torch.no_grad():
        without = drift(plain(test).numpy(), name, test)
    assert drift(found, name, test) < 0.7 * without


def test_layers_with_few_of_the_weights_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = weight_layers(network("convolutions"))
    least = min(layer.weight.numel() for layer in layers.values())
    total = sum(layer.weight.numel() for layer in layers.values())
    monkeypatch.setattr(magprune, "FEW", (least + 1) / total)
    for code in codes(sparsegpt(task("convolutions")).model):
        dense = code.size == least
        assert (code == 0).mean() < 0.05 if dense else (code == 0).mean() >= 0.5


def test_more_zeros_take_less() -> None:
    few, many = made("convolutions"), sparsegpt(task("convolutions"), sparsity=0.75)
    weights = sum(layer.weight.numel() for layer in weight_layers(network("convolutions")).values())
    # Less what rounds to zero anyway; names in the topology are not always of one length.
    assert few.size_bytes - many.size_bytes == pytest.approx(weights / 4, rel=0.05)
    assert "75%" in many.method


def test_a_share_that_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match=r"sparsity must be in \[0, 1\], got 2"):
        sparsegpt(task("tokens"), sparsity=2)
