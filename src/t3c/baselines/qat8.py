"""Quantization-aware training to 8 bits by NNCF, on OpenVINO."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import openvino as ov
import torch
from torch import Tensor, nn

from t3c.baselines.baseline import Baseline, bytes_on_disk
from t3c.errors import MissingExtraError, SpecError, TrainError
from t3c.nn.inputs import Inputs, call, check_inputs
from t3c.runtime.engines.openvino import OpenVINO
from t3c.runtime.engines.protocol import Array
from t3c.runtime.measured import DOT_PRODUCTS, cpu_name
from t3c.train.config import TrainConfig
from t3c.train.losses import Loss, classification
from t3c.train.objective import distill
from t3c.train.schedules import learning_rate_share
from t3c.train.stream import forever

OnStep = Callable[[int, float], object]


@dataclass(frozen=True)
class QatConfig:
    """How long and how hard to train: AdamW, a linear warm-up, then a cosine to zero.

    A `teacher` trains towards the original's logits instead of the labels.
    """

    steps: int = 2000
    learning_rate: float = 1e-4
    warmup: float = 0.1
    weight_decay: float = 0.01
    teacher: bool = False
    clip_norm: float = 1.0
    seed: int = 3407

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise SpecError(f"steps must be at least 1, got {self.steps}")
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise SpecError(f"{name} must be positive, got {getattr(self, name):g}")
        if not 0 <= self.warmup < 1:
            raise SpecError(f"warmup must be in [0, 1), got {self.warmup:g}")
        if not 0 <= self.weight_decay < math.inf:
            raise SpecError(f"weight_decay must be at least 0, got {self.weight_decay:g}")


@dataclass(frozen=True)
class QatSeconds:
    """Wall-clock seconds; `building` is NNCF's kernels, which are compiled once per machine."""

    building: float
    preparing: float
    stepping: float
    exporting: float


@dataclass(frozen=True)
class Trained:
    """A baseline that took training; `model` computes in torch what the baseline's session does."""

    baseline: Baseline
    model: nn.Module
    losses: tuple[float, ...]
    seconds: QatSeconds


def qat8(
    model: nn.Module,
    batches: Iterable[Any],
    samples: Array,
    engine: OpenVINO,
    config: QatConfig | None = None,
    *,
    loss: Loss | None = None,
    on_step: OnStep | None = None,
) -> Trained:
    """Train a copy of `model`, quantized on `samples` (n, ...), and compile it on the engine.

    `batches` yields (inputs, target) and is gone through again as often as needed. `loss` takes
    outputs and targets; it is cross-entropy, or with a teacher what draws profiles to the original.
    """
    config = config or QatConfig()
    loss = loss or (distill if config.teacher else classification)
    torch.manual_seed(config.seed)
    marks = [time.perf_counter()]
    compiled = build_kernels()
    marks.append(time.perf_counter())
    original = copy.deepcopy(model).eval() if config.teacher else None
    quantized = prepare_qat(model, samples)
    marks.append(time.perf_counter())
    losses = _fit(quantized, original, batches, config, loss, on_step)
    marks.append(time.perf_counter())
    graph = to_openvino(quantized, samples[:1])
    marks.append(time.perf_counter())
    method = "NNCF quantization-aware training, 8 bits" + (", weights 7" if saturates() else "")
    if not compiled:
        method += ", its kernels not compiled"
    baseline = Baseline("qat8", method, engine.compile_read(graph), bytes_on_disk(graph))
    spent = [after - before for before, after in pairwise(marks)]
    return Trained(baseline, quantized, losses, QatSeconds(*spent))


def prepare_qat(model: nn.Module, samples: Array) -> nn.Module:
    """A copy of `model` with NNCF's trainable quantizers, calibrated on all `samples` (n, ...).

    It is in evaluation mode and is trained so: norms keep their running statistics.
    """
    rows = torch.from_numpy(np.ascontiguousarray(samples))
    check_inputs(rows, "the calibration data")
    build_kernels()
    nncf = _nncf()
    fix = nncf.OverflowFix.ENABLE if saturates() else nncf.OverflowFix.FIRST_LAYER
    free = copy.deepcopy(model).eval().requires_grad_(True)
    with _quiet():
        quantized: nn.Module = nncf.quantize(
            free,
            nncf.Dataset([row[None] for row in rows]),
            subset_size=len(rows),
            advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=fix),
        )
    return quantized.eval()


def qat_optimizer(model: nn.Module, config: QatConfig) -> torch.optim.AdamW:
    """Weights, norms and the quantizers' scales, all trained alike."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, config.learning_rate, weight_decay=config.weight_decay)


def qat_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Inputs,
    target: Tensor,
    *,
    loss: Loss = classification,
    clip_norm: float = 1.0,
) -> float:
    """One step of a prepared model: forward, backward, update; the loss before the update."""
    found = loss(call(model, inputs), target)
    value = float(found.detach())
    if not math.isfinite(value):
        raise TrainError(f"the loss is not finite: {value}")
    optimizer.zero_grad(set_to_none=True)
    found.backward()  # type: ignore[no-untyped-call]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimizer.step()
    return value


def to_openvino(quantized: nn.Module, sample: Array) -> ov.Model:
    """A prepared model for samples (1, ...): its weights as int8, activations by FakeQuantize."""
    example = torch.from_numpy(np.ascontiguousarray(sample))
    with _quiet():  # tracing warns of every number that a quantizer reads
        return ov.convert_model(quantized, example_input=example, input=[sample.shape])


def build_kernels() -> bool:
    """Load NNCF's kernels, compiling them the first time; False if it has to do without."""
    _nncf()
    from nncf.torch.extensions import ExtensionLoaderTimeoutException
    from nncf.torch.quantization.extensions import QuantizedFunctionsCPU as Kernels
    from nncf.torch.quantization.extensions import QuantizedFunctionsCPULoader as Loader
    from nncf.torch.quantization.reference import ReferenceQuantizedFunctions

    # Compiling takes a minute, which is how long NNCF waits unless told.
    os.environ.setdefault("NNCF_EXTENSION_LOAD_TIMEOUT", "600")
    try:
        with _quiet():
            kernel = Kernels.get("Quantize_forward")
    except ExtensionLoaderTimeoutException as error:
        raise TrainError(
            "NNCF's kernels are not there after a long wait: if an earlier build was cut short, "
            f"remove {Loader.get_build_dir()}"
        ) from error
    return kernel is not ReferenceQuantizedFunctions.Quantize_forward


def saturates() -> bool:
    """Whether int8 kernels here add pairs of products in 16 bits, which 8-bit weights overflow.

    There NNCF is told to train weights in half the range, as T3C executes its own with 7 bits.
    """
    known = cpu_name().split()
    return "avx2" in known and not any(flag in known for flag in DOT_PRODUCTS)


def _fit(
    quantized: nn.Module,
    original: nn.Module | None,
    batches: Iterable[Any],
    config: QatConfig,
    loss: Loss,
    on_step: OnStep | None,
) -> tuple[float, ...]:
    optimizer = qat_optimizer(quantized, config)
    pace = TrainConfig(steps=config.steps, warmup=config.warmup)  # the schedule of our own training
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_share(step, pace)
    )
    losses: list[float] = []
    for step, (inputs, target) in enumerate(forever(batches, config.steps)):
        if original is not None:
            with torch.no_grad():
                target = call(original, inputs)
        try:
            value = qat_step(
                quantized, optimizer, inputs, target, loss=loss, clip_norm=config.clip_norm
            )
        except TrainError as error:
            raise TrainError(f"step {step}: {error}") from error
        schedule.step()
        losses.append(value)
        if on_step is not None:
            on_step(step, value)
    return tuple(losses)


def _nncf() -> Any:
    logging.getLogger("nncf").setLevel(logging.ERROR)
    try:
        import nncf
        import nncf.torch
    except ImportError as missing:
        raise MissingExtraError("nncf", "bench") from missing
    return nncf


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no warnings of the libraries' own code."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
