"""Nested views beside quantizers that know their bits: what sharing one 8-bit code costs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from t3c.experiments.fidelity import Say, Subject
from t3c.nn.layers import elastic_type
from t3c.quant.fp8 import Fp8, from_fp8, to_fp8
from t3c.quant.outliers import average_bits, outlier_channels, split_bits
from t3c.quant.straight_through import fake_quantize, fit_gains
from t3c.quant.uniform import Grid, fit_uniform, uniform_quantize

BITS = (3, 4, 6, 8)
OUTLIERS = 0.02

Quantizer = Callable[..., Tensor]


def nested(weight: Tensor, bits: int) -> Tensor:
    """The top bits of one 8-bit code."""
    return fake_quantize(weight, fit_gains(weight), bits)


def independent(weight: Tensor, bits: int) -> Tensor:
    """Symmetric, per row, the largest magnitude on the last level (paper B.3)."""
    return _uniform(weight, Grid(bits))


def grouped(weight: Tensor, bits: int) -> Tensor:
    """Symmetric, with a scale for every 32 weights."""
    return _uniform(weight, Grid(bits, per="group", group=32))


def affine(weight: Tensor, bits: int) -> Tensor:
    """With a zero point, per row."""
    return _uniform(weight, Grid(bits, symmetric=False))


def outlier_split(weight: Tensor, bits: int) -> Tensor:
    """The nested view with two more bits for the largest rows."""
    return split_bits(weight, outlier_channels(weight, OUTLIERS), nested, bits, 2)


QUANTIZERS: dict[str, Quantizer] = {
    "nested": nested,
    "independent": independent,
    "affine": affine,
    "group 32": grouped,
    "nested, outlier rows +2 bits": outlier_split,
}


def compare(subject: Subject, say: Say) -> list[dict[str, Any]]:
    """Fidelity and weight error of each quantizer on all weights of a model, by bits."""
    rows = [
        _row(subject, name, bits, partial(quantize, bits=bits), say)
        for bits in BITS
        for name, quantize in QUANTIZERS.items()
    ]
    rows += [_row(subject, f"fp8 {kind}", 8, partial(_fp8, kind), say) for kind in Fp8]
    return rows


def _row(
    subject: Subject, name: str, bits: int, quantize: Callable[[Tensor], Tensor], say: Say
) -> dict[str, Any]:
    model = copy.deepcopy(subject.model)
    error = _quantize_(model, quantize)
    value = subject.evaluate(model)
    say(f"{subject.name} {name} {bits} bits: {value:.4f}")
    extra = average_bits(torch.tensor([True] + [False] * 49), bits, 2) - bits
    return {
        "model": subject.name, "quantizer": name, "bits": bits,
        "extra_bits": extra if "outlier" in name else 0.0, "weight_error": error,
        "measure": subject.measure, "value": value, "samples": subject.samples,
    }  # fmt: skip


@torch.no_grad()
def _quantize_(model: nn.Module, quantize: Callable[[Tensor], Tensor]) -> float:
    """Quantize the weights of all layers that can be elastic; the relative error of all of them."""
    lost = total = 0.0
    seen: set[int] = set()
    for module in model.modules():
        weight = module.weight if elastic_type(module) is not None else None
        if not isinstance(weight, Tensor) or id(weight) in seen:
            continue
        seen.add(id(weight))
        rounded = quantize(weight)
        lost += float((rounded - weight).double().square().sum())
        total += float(weight.double().square().sum())
        weight.copy_(rounded)
    return float((lost / max(total, 1e-30)) ** 0.5)


def _fp8(kind: Fp8, weight: Tensor) -> Tensor:
    return from_fp8(*to_fp8(weight, kind), kind)


def _uniform(weight: Tensor, grid: Grid) -> Tensor:
    return uniform_quantize(weight, *fit_uniform(weight, grid), grid)
