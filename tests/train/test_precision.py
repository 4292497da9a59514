"""What training multiplies in: bfloat16 where asked for and to be had, and nothing else moves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from t3c.errors import SpecError
from t3c.nn.layers import ElasticLayer
from t3c.train import Objective, TrainConfig, fit
from t3c.train.precision import Precision
from t3c.zoo.digits import Digits


@pytest.mark.parametrize(
    ("precision", "has", "wanted"),
    [
        ("auto", True, torch.bfloat16),
        ("auto", False, torch.float32),
        ("float", True, torch.float32),
    ],
)
def test_training_multiplies_in_what_was_asked_for(
    elastic: nn.Module,
    digits: Digits,
    monkeypatch: pytest.MonkeyPatch,
    precision: Precision,
    has: bool,
    wanted: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    model = copy.deepcopy(elastic)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    seen: set[torch.dtype] = set()

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        if torch.is_grad_enabled():
            seen.add(out.dtype)

    for module in model.modules():
        if isinstance(module, ElasticLayer):
            module.register_forward_hook(hook)
    history = fit(
        model,
        digits.loader(16),
        TrainConfig(steps=3, precision=precision, objective=Objective(tail=0)),
    )
    # What is aimed at is found in float, whatever is trained in.
    assert (torch.bfloat16 in seen) == (wanted is torch.bfloat16)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert all(p.dtype is before[n].dtype for n, p in model.named_parameters())
    assert all(0 < value < 1e3 for value in history.terms["distill"])


def test_another_precision_is_refused() -> None:
    with pytest.raises(SpecError, match="precision is one of float, auto, got 'half'"):
        TrainConfig(precision="half")  # type: ignore[arg-type]
