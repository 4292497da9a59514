"""Adapters on 4-bit weights: a start nearer than rounding, fixed codes, small on disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lab.baselines import loracomp as module
from lab.baselines.finetune import copied, settle_, weighted
from lab.baselines.loracomp import Adapter, adapt_, loracomp, started
from lab.baselines.mpqat import clipped_scale
from lab.baselines.pack import on_grid, pack, unpack
from lab.quant.uniform import Grid, uniform_quantize
from t3c.errors import SpecError

PARTS = ("up", "down")
RANK = 8  # a stem of 27 inputs and a head of 5 classes are too small for it


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Models with their adapters, and formats, as they were packed."""
    seen: list[Any] = []
    packed = module.packed_bytes

    def noted(model: nn.Module, formats: Any, graph: Any) -> int:
        seen.append((model, formats))
        return packed(model, formats, graph)

    monkeypatch.setattr(module, "packed_bytes", noted)
    return seen


def rounded(model: nn.Module) -> nn.Module:
    """All weights in plain 4 bits."""
    with torch.no_grad():
        for (layer,) in weighted(model).values():
            scale = clipped_scale(layer.weight, Grid(4))
            layer.weight.copy_(
                uniform_quantize(layer.weight, scale, torch.zeros_like(scale), Grid(4))
            )  # fmt: skip
    return model


def test_the_start_is_closer_than_plain_rounding() -> None:
    original = tiny.network()
    plain = tiny.drift(rounded(copied(original)), original)
    drifts = []
    for rank in (1, 4, 16):
        model = copied(original)
        adapt_(model, rank)
        drifts.append(tiny.drift(model, original))
    assert drifts[0] < plain
    assert drifts == sorted(drifts, reverse=True)
    assert drifts[1] < 0.8 * plain


@given(st.integers(2, 12), st.integers(2, 12), st.integers(1, 4), st.integers(0, 99))
def test_adapters_leave_no_more_than_the_svd_of_the_residual(
    rows: int, inner: int, rank: int, seed: int
) -> None:
    weight = torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed))
    codes, form, adapter = started(weight, rank)
    assert torch.equal(on_grid(codes, form), codes)
    scale = clipped_scale(weight, Grid(4))
    plain = uniform_quantize(weight, scale, torch.zeros_like(scale), Grid(4))
    tail = torch.linalg.svdvals(weight - plain)[rank:].norm()
    assert (adapter(codes) - weight).norm() <= tail + 1e-4
    assert adapter.up.norm(dim=1).detach().numpy() == pytest.approx(
        adapter.down.norm(dim=1).detach().numpy(), rel=1e-3, abs=1e-4
    )


def test_only_layers_worth_an_adapter_have_one() -> None:
    model = copied(tiny.network())
    adapted, formats = adapt_(model, RANK)
    assert tuple(adapted) == ("body", "hidden")
    assert {name: form.bits for name, form in formats.items() if "up" not in name} == {
        "stem.weight": 8, "head.weight": 8,
        "body.parametrizations.weight.original": 4, "body.parametrizations.weight.0.down": 8,
        "hidden.parametrizations.weight.original": 4, "hidden.parametrizations.weight.0.down": 8,
    }  # fmt: skip
    free = {name for name, value in model.named_parameters() if value.requires_grad}
    assert free == {
        "stem.bias", "norm.weight", "norm.bias", "hidden.bias", "head.bias",
        *(f"{name}.parametrizations.weight.0.{part}" for name in adapted for part in PARTS),
    }  # fmt: skip
    with torch.no_grad():
        before = model(tiny.images(4, 4))
        settle_(adapted)
        assert torch.equal(model.eval()(tiny.images(4, 4)), before)


def test_what_is_written_is_what_runs(written: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settled, task = tiny.recorded(monkeypatch, module), tiny.task(steps=4)
    assert task.training is not None
    with tiny.unchanged(task.training.model):
        made = loracomp(task, rank=RANK, learning_rate=1e-3)
    model, formats = written[0]
    found = unpack(pack(model, formats))
    for name in ("body", "hidden"):
        place = f"{name}.parametrizations.weight"
        factors = (found[f"{place}.0.{part}"] for part in PARTS)
        merged = Adapter(*factors)(found[f"{place}.original"])
        assert torch.allclose(merged, settled[0].get_submodule(name).weight, atol=1e-6)
        assert all(len(row.unique()) <= 15 for row in found[f"{place}.original"])
    for name in ("stem", "head"):
        kept = settled[0].get_submodule(name).weight
        assert torch.allclose(found[f"{name}.weight"], kept, atol=1e-6)
    small, large = 32 * 27 + 48 * 5, 32 * 32 * 9 + 48 * 512
    codes = small + large / 2 + RANK * (32 + 288 + 48 + 512)
    assert codes < tiny.stored(made) < codes + 4 * 400 + 1500
    assert (made.name, made.steps) == ("loracomp", 4)
    with torch.no_grad():
        wanted = settled[0](tiny.images(16, 4)).numpy()
    assert np.linalg.norm(tiny.answers(made) - wanted) < 0.05 * np.linalg.norm(wanted)


def test_training_helps_and_two_runs_agree(
    written: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = tiny.recorded(monkeypatch, module, convert=False)
    for rate in (1e-9, 3e-4, 3e-4):
        loracomp(tiny.task(steps=40), rank=RANK, learning_rate=rate)
    plain, trained, again = (tiny.drift(model, tiny.network()) for model in settled)
    assert trained < 0.8 * plain
    assert trained == again
    codes = [model.hidden.parametrizations.weight.original for model, _ in written]
    assert torch.equal(codes[0], codes[1])


def test_an_impossible_rank_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^rank must be at least 1, got 0$"):
        loracomp(tiny.task(), rank=0)
