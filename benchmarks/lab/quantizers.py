"""Nested views beside quantizers that know their bits: what sharing one 8-bit code costs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lab.fidelity import Say, Subject, outputs
from lab.quant.calibrate import bias_correction, choose_percentile
from lab.quant.fp8 import Fp8, from_fp8, to_fp8
from lab.quant.outliers import outlier_channels, split_bits
from lab.quant.uniform import Grid, fit_uniform, uniform_quantize
from t3c.nn.inputs import Inputs
from t3c.nn.layers import elastic_type
from t3c.quant.straight_through import fake_quantize, fit_gains

BITS = (3, 4, 6, 8)
OUTLIERS = 0.02
CLIPPED, CORRECTED = "independent, clipped by output KL", "independent, biases corrected"
MOST_OUTPUTS = 8192  # of a layer whose output KL is worth computing

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
    seen = _inputs(subject.model, subject.calibration[0])
    rows = []
    for bits in BITS:
        for name, quantize in QUANTIZERS.items():
            rows.append(_row(subject, name, bits, _always(partial(quantize, bits=bits)), say))
        rows.append(_row(subject, CLIPPED, bits, partial(_clipped, seen, bits), say))
        corrected = _always(partial(independent, bits=bits))
        rows.append(_row(subject, CORRECTED, bits, corrected, say, means=seen))
    for kind in Fp8:
        rows.append(_row(subject, f"fp8 {kind}", 8, _always(partial(_fp8, kind)), say))
    return rows


def by_bits(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a quantizer of a model, its fidelity in columns."""
    table: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["model"], row["quantizer"]
        start = {"model": row["model"], "measure": row["measure"], "quantizer": row["quantizer"]}
        mine = table.setdefault(key, start | {f"{bits} bits": "" for bits in BITS})
        mine[f"{row['bits']} bits"] = row["value"]
    return list(table.values())


Chosen = Callable[[str, Tensor], Tensor]  # of a layer's name and weight


def _row(
    subject: Subject, name: str, bits: int, quantize: Chosen, say: Say,
    means: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:  # fmt: skip
    model = copy.deepcopy(subject.model)
    error = _quantize_(model, quantize, means or {})
    value = subject.evaluate(model)
    say(f"{subject.name} {name} {bits} bits: {value:.4f}")
    return {
        "model": subject.name, "quantizer": name, "bits": bits, "weight_error": error,
        "measure": subject.measure, "value": value, "samples": subject.samples,
    }  # fmt: skip


@torch.no_grad()
def _quantize_(model: nn.Module, quantize: Chosen, inputs: Mapping[str, Tensor]) -> float:
    """Quantize the weights of all layers that can be elastic; the relative error of all of them.

    With inputs of layers, what their rounding does to the mean output goes into their biases.
    """
    lost = total = 0.0
    seen: set[int] = set()
    for name, module in model.named_modules():
        weight = module.weight if elastic_type(module) is not None else None
        if not isinstance(weight, Tensor) or id(weight) in seen:
            continue
        seen.add(id(weight))
        rounded = quantize(name, weight)
        change = weight - rounded
        if name in inputs and isinstance(module.bias, Tensor):
            module.bias += bias_correction(change, inputs[name].mean(0))
        lost += float(change.double().square().sum())
        total += float(weight.double().square().sum())
        weight.copy_(rounded)
    return float((lost / max(total, 1e-30)) ** 0.5)


def _inputs(model: nn.Module, batch: Inputs, count: int = 256) -> dict[str, Tensor]:
    """Some of the vectors (n, in) each linear layer reads."""
    rows: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows[name] = args[0].flatten(0, -2)[:count]

        return hook

    linear = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear]
    handles = [module.register_forward_pre_hook(watch(name)) for name, module in linear]
    try:
        outputs(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return rows


def _clipped(inputs: Mapping[str, Tensor], bits: int, name: str, weight: Tensor) -> Tensor:
    """Per row, clipped at the percentile whose layer output is closest in KL (paper B.3)."""

    def quantize(values: Tensor, percentile: float) -> Tensor:
        grid = Grid(bits)
        return uniform_quantize(values, *fit_uniform(values, grid, percentile), grid)

    if name not in inputs or len(weight) > MOST_OUTPUTS:
        return quantize(weight, 100.0)
    return quantize(weight, choose_percentile(weight, inputs[name], quantize))


def _always(quantize: Callable[[Tensor], Tensor]) -> Chosen:
    return lambda _, weight: quantize(weight)


def _fp8(kind: Fp8, weight: Tensor) -> Tensor:
    return from_fp8(*to_fp8(weight, kind), kind)


def _uniform(weight: Tensor, grid: Grid) -> Tensor:
    return uniform_quantize(weight, *fit_uniform(weight, grid), grid)
