"""Weights of 4 bits: what runs has so few values, is near the original, and is packed as such."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from torch import Tensor, nn

from lab.baselines import BASELINES, Baseline, Task
from lab.baselines.compensate import clipped_scale
from lab.baselines.finetune import Training
from lab.baselines.layers import weight_layers
from lab.baselines.pack import Format, decode, encode, on_grid
from lab.baselines.ptq4 import _rounded, ptq4
from t3c.engines.openvino import OpenVINO
from t3c.errors import DataError

ENGINE = OpenVINO(1)


class Tokens(nn.Module):
    """Patches of images (n, 3, 16, 16) as 16 tokens, mixed and widened: (n, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, 4)
        self.norm = nn.LayerNorm(32)
        self.query, self.value = nn.Linear(32, 32), nn.Linear(32, 32)
        self.widen, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        query = self.query(self.norm(x))
        x = x + (query @ x.transpose(1, 2) / 6).softmax(-1) @ self.value(x)
        x = x + self.narrow(torch.relu(self.widen(self.norm(x))))
        out: Tensor = self.head(x.mean(1))
        return out


def convolutions() -> nn.Module:
    norm = nn.BatchNorm2d(24)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False), norm, nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.ReLU(),
        nn.Conv2d(24, 32, 3, padding=1, groups=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


MAKERS = {"convolutions": convolutions, "tokens": Tokens}
ACTIVATIONS: dict[str, Any] = {"convolutions": "int8", "tokens": "float"}


def images(count: int, seed: int) -> Tensor:
    """Smooth images, whose neighbouring pixels go together as in pictures."""
    coarse = torch.randn(count, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(coarse, 16, mode="bilinear")


@cache
def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MAKERS[name]().eval()


@cache
def made(name: str, ends: bool = False) -> Baseline:
    samples = images(16, 0)
    training = Training(network(name), samples, minutes=1)
    task = Task(b"", samples, ENGINE, ACTIVATIONS[name], training=training)
    return ptq4(task, ends=ends)


def codes(graph: ov.Model) -> list[Any]:
    """The 8-bit weights that run, each (rows, ...)."""
    constants = [op for op in graph.get_ops() if op.get_type_name() == "Constant"]
    found = [op.data for op in constants if op.get_element_type() == ov.Type.i8]
    return [c.reshape(-1, *c.shape[2:]) if c.ndim == 5 else c for c in found]  # groups


def drift(outputs: Any, name: str, test: Tensor) -> float:
    with torch.no_grad():
        wanted = network(name)(test).numpy()
    return float(np.linalg.norm(outputs - wanted) / np.linalg.norm(wanted - wanted.mean(0)))


def answers(baseline: Baseline, test: Tensor) -> Any:
    session = ENGINE.compile_read(baseline.model)
    return np.concatenate([session.run([image[None]])[0] for image in test.numpy()])


@pytest.mark.parametrize("name", MAKERS)
def test_what_runs_has_four_bits_but_at_its_ends(name: str) -> None:
    layers = weight_layers(network(name))
    found = codes(made(name).model)
    assert len(found) == len(layers)
    many = [code.size for code in found if max(len(np.unique(row)) for row in code) > 15]
    sizes = [layer.weight.numel() for layer in layers.values()]
    assert sorted(many) == sorted([sizes[0], sizes[-1]])


@pytest.mark.parametrize("name", MAKERS)
def test_it_is_nearer_than_plain_rounding(name: str) -> None:
    plain, test = copy.deepcopy(network(name)), images(64, 1)
    for layer in list(weight_layers(plain).values())[1:-1]:
        scale = clipped_scale(layer.weight.detach().flatten(1), 7)
        layer.weight.data = on_grid(layer.weight, Format(4, scale=scale))
    with torch.no_grad():
        without = drift(plain(test).numpy(), name, test)
    found = drift(answers(made(name), test), name, test)
    assert found < 0.5 * without


def test_the_file_has_four_bits_and_what_it_needs_besides(tmp_path: Path) -> None:
    model, baseline = network("tokens"), made("tokens")
    weights = [layer.weight for layer in weight_layers(model).values()]
    bits = [8, *(4 for _ in weights[2:]), 8]
    codes = sum(b * w.numel() // 8 for b, w in zip(bits, weights, strict=True))
    floats = sum(p.numel() for p in model.parameters()) - sum(w.numel() for w in weights)
    scales = sum(len(w) for w in weights)
    ov.save_model(baseline.model, tmp_path / "model.xml", compress_to_fp16=False)
    topology = (tmp_path / "model.xml").stat().st_size
    names = baseline.size_bytes - topology - codes - 4 * (floats + scales)
    assert 0 < names < 50 * len(list(model.parameters()))  # of the tensors, and their shapes


def test_its_ends_may_have_four_bits_too() -> None:
    four = made("tokens", ends=True)
    assert max(len(np.unique(row)) for code in codes(four.model) for row in code) <= 15
    layers = list(weight_layers(network("tokens")).values())
    saved = (layers[0].weight.numel() + layers[-1].weight.numel()) // 2
    # OpenVINO numbers its nodes on and on, so that names in the topology get longer.
    assert made("tokens").size_bytes - four.size_bytes == pytest.approx(saved, abs=100)


def test_the_original_is_not_changed() -> None:
    made("tokens")
    torch.manual_seed(0)
    for mine, fresh in zip(network("tokens").parameters(), Tokens().parameters(), strict=True):
        assert torch.equal(mine, fresh)


@pytest.mark.parametrize("name", ["ptq4", "sparsegpt"])
def test_without_torch_it_is_told(name: str) -> None:
    task = Task(b"", images(2, 0), ENGINE)
    with pytest.raises(DataError, match=f"^{name} needs the original in torch"):
        BASELINES[name](task)


def test_groups_of_inputs_have_scales_of_their_own_and_come_nearer() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 64), torch.randn(500, 64)
    weight[:, :16] *= 6  # a channel's one scale is too coarse for the rest of it
    moment = (x.T @ x / len(x))[None]
    wanted = x @ weight.T
    errors = {}
    for group in (0, 16):
        settled, form = _rounded(weight[None], moment, group)
        errors[group] = float((x @ settled[0].T - wanted).norm())
        packed = encode(settled[0], form)
        torch.testing.assert_close(decode(packed, (24, 64), form), settled[0], atol=1e-5, rtol=0)
        assert len(packed) == 24 * 64 // 2 + 4 * 24 * max(1, 64 // (group or 64))
    assert errors[16] < 0.7 * errors[0]
    assert _rounded(weight[:, :60][None], moment[:, :60, :60], 16)[1].groups == 1
