"""Make a model elastic with the factorization that measures best, and keep it in a file."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from t3c.artifact.devices import LayerTiming
from t3c.certify.sensitivity import LayerSensitivity, layer_sensitivities
from t3c.compression.choice import Choice
from t3c.convert import ElasticConfig, elasticize_, smooth_, state_of
from t3c.device.measured import time_layer
from t3c.engines import Engine
from t3c.errors import ConvertError, DataError
from t3c.nn.inputs import Inputs, select
from t3c.nn.units import UnitGroup
from t3c.nn.view import elastic_weights
from t3c.spec import MAX_BITS, Factorization, Form, LayerPoint

STATISTICS = 256  # samples that factors are fitted to, at the least
POSITIONS = 40_000  # tokens, that more texts are taken for
PROBED = 16  # samples that two factorizations are compared on
WAYS = (Factorization.TUCKER1, Factorization.TUCKER2)
LEVELS = 16  # drifts that they are compared at
KERNELS = (nn.Conv1d, nn.Conv2d)
# Ranks at multiples of a sixteenth: where a layer starts to pay differs by geometry, and the
# device's table says where. Bits down to 4, since second-order rounding keeps 4 useful.
RANKS = tuple(share / 16 for share in (2, 3, 4, 5, 6, 7, 8, 9, 10))
BITS = (4, 5, 6, 7, 8)
STORED = 0.8  # of the dense weights, what factors of a layer may take

Watch = Callable[[str, int, int], object]


def kernels_of(model: nn.Module) -> list[list[str]]:
    """Return the names of convolutions wider than a point and not in groups, alike together."""
    found: dict[tuple[object, ...], list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, KERNELS) and max(module.kernel_size) > 1 and module.groups == 1:
            shape = (*module.weight.shape, *module.stride, *module.dilation)
            found.setdefault(shape, []).append(name)
    return list(found.values())


def config_for(kernels: Mapping[str, Factorization], **changes: Any) -> ElasticConfig:
    """Return how the door makes a model elastic, with the factorizations of its kernels."""
    settings: dict[str, Any] = {
        "kernels": kernels, "convolution": Factorization.TUCKER1, "rank_fractions": RANKS,
        "bits": BITS, "store_ratio": STORED,
    }  # fmt: skip
    return ElasticConfig(**(settings | changes))


def choose_kernels(
    model: nn.Module, example: Inputs, batches: Sequence[Inputs], engine: Engine
) -> tuple[dict[str, Factorization], Choice | None]:
    """Return how each kernel is factored: whichever takes less time for the same drift.

    Of kernels that are alike one is tried.
    """
    shapes = kernels_of(model)
    first = tuple(names[0] for names in shapes)
    samples = select(batches[0], slice(0, PROBED)) if shapes else None
    trials = {}
    for way in WAYS if samples is not None else ():
        trials[way] = copy.deepcopy(model)
        config = config_for({}, convolution=way, include=first, bits=(MAX_BITS,), metric="inputs")
        try:
            elasticize_(trials[way], example, config, calibration=[samples])
        except ConvertError:
            return {}, None  # no kernel is worth a rank
    if samples is None:
        return {}, None
    sensitivities = layer_sensitivities(trials[WAYS[0]], samples)
    better = {
        name: _relative_times(trials, sensitivities[name], name, engine)
        for name in first
        if name in sensitivities  # small ones are left as they are
    }
    chosen = {
        name: min(better[names[0]], key=better[names[0]].__getitem__)
        for names in shapes
        if names[0] in better
        for name in names
    }
    tried = {str(way): float(np.mean([times[way] for times in better.values()])) for way in WAYS}
    counts = Counter(str(way) for way in chosen.values())
    found = Choice(
        what="kernels are factored by", tried=tried, unit="of the time of dense, at equal drift",
        taken=" and ".join(f"{way} in {n}" for way, n in counts.items()),
        why=f"one of each of {len(better)} shapes was timed",
    )  # fmt: skip
    return chosen, found


def _relative_times(
    trials: Mapping[Factorization, nn.Module],
    sensitivity: LayerSensitivity,
    name: str,
    engine: Engine,
) -> dict[Factorization, float]:
    """Return what a layer takes of its dense time, in the mean over drifts that all ways reach."""
    curves: dict[Factorization, list[tuple[float, float]]] = {}
    for way, trial in trials.items():
        plan = next(p for p in state_of(trial).plan.layers if p.spec.name == name)
        mine = replace(sensitivity, weight=elastic_weights(trial)[name])
        ranks = plan.ranks[:-1]
        curves[way] = [
            (mine.squared_drift(LayerPoint(t.rank, MAX_BITS)), _share(t))
            for t in time_layer(engine, plan.spec, ranks)
        ]
    known = {way: curve for way, curve in curves.items() if curve}
    if not known:
        return dict.fromkeys(trials, 1.0)
    least = max(min(drift for drift, _ in curve) for curve in known.values())
    most = max(drift for curve in known.values() for drift, _ in curve)
    return {way: mean_time(curves[way], least, most) for way in trials}


def mean_time(curve: Sequence[tuple[float, float]], least: float, most: float) -> float:
    """Return the least time of a curve of (drift, time) that drifts no more than a level, in the
    mean over levels; 1 where only dense does."""
    levels = np.geomspace(max(least, 1e-12), max(most, 1e-12), LEVELS)
    times = [min((t for d, t in curve if d <= level * (1 + 1e-9)), default=1.0) for level in levels]
    return float(np.mean(times))


def _share(timing: LayerTiming) -> float:
    return min(timing.ms.values()) / timing.ms[Form.DENSE]


def smooth_inputs(model: nn.Module, batches: Sequence[Inputs]) -> Choice:
    """Smooth what linear layers read in place, where that lessens the error of 8 bits."""
    left = [one.error for one in smooth_(model, batches).values()]
    return _where_better("smoothing of what linear layers read", "smoothed", left)


def make_elastic(
    model: nn.Module,
    example: Inputs,
    batches: Sequence[Inputs],
    kernels: Mapping[str, Factorization],
    widths: Sequence[UnitGroup] = (),
    watch: Watch = lambda what, done, total: None,
) -> list[Choice]:
    """Make the model elastic in place, with factors fitted to the batches, and return the choices.

    Layers that make or read the units of `widths` are narrowed, the others factored.
    """
    report = elasticize_(
        model, example, config_for(kernels, widths=tuple(widths)), calibration=batches,
        on_layer=lambda done, total, name: watch(f"converting {name}", done, total),
    )  # fmt: skip
    if not any(plan.spec.factorization is Factorization.SVD for plan in report.converted):
        return []
    left = list(report.balance.values())
    return [_where_better("balance of both factors of a matrix", "balanced", left)]


def _where_better(what: str, how: str, left: Sequence[float]) -> Choice:
    """Return a choice made layer by layer; `left` is the rounding error of those it was taken for,
    relative to that without."""
    tried = {"as they are": 1.0} | ({how: float(np.mean(left))} if left else {})
    unit = "of the rounding error, in the mean over the layers it lowers"
    return Choice(what=what, tried=tried, unit=unit, taken=f"{len(left)} layers are {how}")


def keep_elastic(model: nn.Module, path: Path) -> None:
    """Write all parameters and buffers of an elastic model, factors included."""
    values = {name: value.detach().cpu().contiguous() for name, value in _named(model).items()}
    try:
        save_file(values, path)
    except SafetensorError as error:
        raise DataError(f"{path}: cannot be written: {error}") from error


def restore_elastic(model: nn.Module, path: Path) -> None:
    """Give an elastic model what was kept of it."""
    try:
        kept: Mapping[str, torch.Tensor] = load_file(path)
        with torch.no_grad():
            for name, value in _named(model).items():
                value.copy_(kept[name])
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise DataError(
            f"{path} is not what this model was: {error}: start anew with --fresh"
        ) from error


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())
