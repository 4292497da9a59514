"""Low rank and fine-tuning: ranks as promised, fewer operations, near the original again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lab.baselines import lrft as module
from lab.baselines.finetune import copied
from lab.baselines.lrft import SMALLEST, factorize_, lrft, ranks_of
from t3c.errors import SpecError
from t3c.evidence.int8 import bytes_on_disk


def multiplications(model: nn.Module, images: Tensor) -> int:
    """Of one pass, counted layer by layer."""
    count = 0

    def add(layer: Any, _: object, output: Tensor) -> None:
        nonlocal count
        outputs = output.numel() if isinstance(layer, nn.Linear) else output[:, 0].numel()
        count += outputs * (
            layer.in_features if isinstance(layer, nn.Linear) else layer.weight.numel()
        )

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    handles = [layer.register_forward_hook(add) for layer in layers]
    with torch.no_grad():
        model.eval()(images)
    for handle in handles:
        handle.remove()
    return count


def test_the_model_has_the_ranks_and_runs_what_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    settled, task = tiny.recorded(monkeypatch, module), tiny.task(steps=4)
    assert task.training is not None
    with tiny.unchanged(task.training.model):
        made = lrft(task)
    rank = int(0.5 * 48 * 512 / (48 + 512))
    shapes = [codes.shape for codes in tiny.codes(made.model)]
    out, into = ranks_of(tiny.network().body, 0.5)
    assert [shape[:2] for shape in shapes] == [
        (32, 3), (into, 32), (out, into), (32, out), (rank, 512), (48, rank), (5, 48)
    ]  # fmt: skip
    assert (made.name, made.steps) == ("lrft", 4)
    assert made.size_bytes == bytes_on_disk(made.model)
    with torch.no_grad():
        wanted = settled[0](tiny.images(16, 4)).numpy()
    assert np.linalg.norm(tiny.answers(made) - wanted) < 0.05 * np.linalg.norm(wanted)


def test_operations_fall_and_the_factors_are_near_the_original() -> None:
    images, original = tiny.images(4, 4), tiny.network()
    counts, drifts = [multiplications(original, images)], list[float]()
    for share in (0.9, 0.7, 0.5):
        model = copied(original)
        found = factorize_(model, share)
        assert tuple(found) == ("body", "hidden")
        counts.append(multiplications(model, images))
        drifts.append(tiny.drift(model, original))
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 4
    assert drifts == sorted(drifts)
    assert drifts[0] < 0.3


LAYERS = st.one_of(
    st.builds(nn.Linear, st.integers(1, 300), st.integers(1, 300)),
    st.builds(
        nn.Conv2d, st.integers(1, 120), st.integers(1, 120), st.sampled_from([1, 2, 3, 5]),
        st.sampled_from([1, 2]),
    ),
)  # fmt: skip


@given(LAYERS, st.floats(0.05, 0.99))
def test_factors_always_save(layer: Any, share: float) -> None:
    found = ranks_of(layer, share)
    out, into, *kernel = layer.weight.shape
    taps = math.prod(kernel)
    if not found:
        return
    assert min(found) >= SMALLEST
    if taps == 1:
        assert found[0] * (out + into) <= share * out * into
        assert (found[0] + 1) * (out + into) > share * out * into
        return
    r_out, r_in = found
    before = into * r_in * math.prod(layer.stride)
    assert before + taps * r_out * r_in + out * r_out <= share * taps * out * into


@torch.no_grad()
@pytest.mark.parametrize(
    "layer",
    [nn.Linear(40, 30), nn.Linear(40, 30, bias=False), nn.Conv2d(24, 32, 1, 2, 1),
     nn.Conv2d(24, 32, 3, 2, 1), nn.Conv2d(24, 32, 3, padding="same", dilation=2, bias=False),
     nn.Conv2d(24, 32, (3, 1), (2, 1), (1, 0))],
)  # fmt: skip
def test_whole_factors_compute_what_the_layer_did(layer: Any) -> None:
    """At full rank the stages are the layer, its stride, padding, dilation and bias included."""
    model = nn.Sequential(layer)
    out, into, *kernel = layer.weight.shape
    ranks = (out, into) if math.prod(kernel) > 1 else (min(out, into),)
    stages = module._factored(model, "0", ranks)
    generator = torch.Generator().manual_seed(0)
    shape = (2, into) if isinstance(layer, nn.Linear) else (2, into, 9, 9)
    inputs = torch.randn(shape, generator=generator)
    assert torch.allclose(stages(inputs), layer(inputs), atol=1e-4)


def test_layers_that_cannot_save_stay() -> None:
    stay = [
        nn.Linear(48, 5), nn.Conv2d(3, 64, 7, 2), nn.Conv2d(64, 64, 3, groups=64),
        nn.Conv2d(64, 64, 3, padding=1, padding_mode="reflect"),
    ]  # fmt: skip
    assert [ranks_of(layer, 0.5) for layer in stay] == [()] * 4
    model = nn.Sequential(*stay)
    assert factorize_(model, 0.5) == {}
    assert list(model) == stay


def test_a_layer_that_is_used_twice_stays_one() -> None:
    layer = nn.Linear(64, 64)
    model = nn.Sequential(layer, nn.ReLU(), nn.Sequential(layer))
    assert factorize_(model, 0.5) == {"0": (16,)}
    assert isinstance(model[0], nn.Sequential)
    assert model[2][0] is model[0]


def test_training_helps_and_two_runs_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = tiny.recorded(monkeypatch, module, convert=False)
    for rate in (1e-9, 3e-4, 3e-4):
        lrft(tiny.task(steps=40), learning_rate=rate)
    plain, trained, again = (tiny.drift(model, tiny.network()) for model in settled)
    assert trained < 0.75 * plain
    assert trained == again


@pytest.mark.parametrize("rank", [0.0, 1.0, float("nan")])
def test_an_impossible_rank_is_refused(rank: float) -> None:
    with pytest.raises(SpecError, match=r"^rank must be in \(0, 1\) of the break-even, got"):
        lrft(tiny.task(), rank=rank)
