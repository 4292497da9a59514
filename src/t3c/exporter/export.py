"""`t3c.export`: one call from an elastic model to a certified artifact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from t3c.artifact.card import write_card
from t3c.artifact.devices import DeviceTable, Ledger
from t3c.artifact.folder import staged
from t3c.artifact.graph import Traced
from t3c.certify.conformal import least_samples
from t3c.convert import state_of
from t3c.errors import DataError, SpecError
from t3c.exporter import content, evidence
from t3c.exporter.allocate import allocate, time_layers
from t3c.nn.inputs import Inputs, check_finite, check_like, evaluating, gather, select, tensors
from t3c.runtime.engines import open_engine
from t3c.runtime.runtime import Runtime
from t3c.spec import ImageSpec, ProfileChain

PARITY_SAMPLES = 16


@dataclass(frozen=True)
class ExportConfig:
    """What to export for, and how.

    `worst_drift` is where the smallest profile starts: the first-order drift from the trained full
    view, relative to the output, that is still of use. `size_weight` is what bytes count for
    against time when layer points are allocated. `delta` is the share of samples `epsilon` may
    miss.
    """

    engine: str = "openvino"
    threads: int | None = None
    worst_drift: float = 0.15
    size_weight: float = 0.5
    delta: float = 0.05
    rounds: int = 200
    seed: int = 3407

    def __post_init__(self) -> None:
        if not self.worst_drift > 0:
            raise SpecError(f"worst_drift must be positive, got {self.worst_drift:g}")
        if not 0 <= self.size_weight < 1:
            raise SpecError(f"size_weight must be in [0, 1), got {self.size_weight:g}")
        if not 0 < self.delta < 1:
            raise SpecError(f"delta must be between 0 and 1, got {self.delta:g}")
        if self.rounds < 1:
            raise SpecError(f"rounds must be at least 1, got {self.rounds}")


@dataclass(frozen=True)
class Exported:
    """What was written, and what was measured on the way."""

    path: Path
    profiles: ProfileChain
    table: DeviceTable
    ledger: Ledger
    parity: tuple[evidence.Parity, ...]


@dataclass(frozen=True)
class Slices:
    """The calibration data in three disjoint parts (paper E.1)."""

    quantizer: Inputs
    scaling: Inputs
    scores: Inputs


def export(
    model: nn.Module,
    path: str | Path,
    calibration: Iterable[Any],
    config: ExportConfig | None = None,
    *,
    name: str | None = None,
    image: ImageSpec | None = None,
    classes: Iterable[str] | None = None,
    say: Callable[[str], object] = lambda message: None,
) -> Exported:
    """Write an elastic model as an artifact: profiles, costs, certificates, packed factors.

    `calibration` yields inputs, or (inputs, target), that the model was not trained on: one part
    sets ranges and allocates, the rest makes the certificates. An artifact that was at `path`
    stays whole until the new one is.
    """
    config = config or ExportConfig()
    state = state_of(model)
    path = Path(path)
    engine = open_engine(config.engine, config.threads)
    samples = gather(calibration)
    check_finite(samples, "the calibration data")
    check_like(samples, state.example, "the calibration data")
    slices = split(samples, config)
    names = None if classes is None else tuple(classes)
    with evaluating(model), staged(path) as folder:
        say("tracing the model")
        traced = content.topology(model)
        _check_described(traced, image, names)
        say(f"timing layer points on {engine.name}, {engine.threads} threads")
        timings = time_layers(engine, state.plan.layers, say)
        say("allocating ranks and bits")
        allocated = allocate(
            model, slices.quantizer, state.plan.layers, timings,
            worst_drift=config.worst_drift, size_weight=config.size_weight,
        )  # fmt: skip
        say("packing weights, observing activation ranges")
        artifact = content.write(
            folder, model, traced, allocated, slices.quantizer, name=name or path.stem,
            seed=config.seed, image=image, classes=names,
        )  # fmt: skip
        say("timing profiles")
        table = evidence.calibrate(
            artifact, engine, timings, slices.quantizer, rounds=config.rounds, seed=config.seed
        )
        artifact.add_device(table)
        runtime = Runtime(artifact, config.engine, config.threads)
        say("checking each profile against torch")
        parity = evidence.check_parity(
            model, runtime, select(slices.quantizer, slice(0, PARITY_SAMPLES))
        )
        say(f"certifying on {len(tensors(slices.scores)[0])} samples")
        ledger = evidence.certify(
            model, state.original, runtime, slices.scaling, slices.scores, config.delta
        )
        artifact.add_ledger(ledger)
        write_card(artifact)
    return Exported(path, allocated.profiles, table, ledger, tuple(parity))


def split(samples: Inputs, config: ExportConfig) -> Slices:
    """A sixth for the quantizers, a sixth to scale the certificates, the rest to score them."""
    count = len(tensors(samples)[0])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(config.seed))
    sixth = max(1, count // 6)
    needed = least_samples(config.delta)
    if count - 2 * sixth < needed:
        least = next(n for n in itertools.count(3) if n - 2 * max(1, n // 6) >= needed)
        raise DataError(
            f"{count} calibration samples are too few for delta={config.delta:g}: "
            f"at least {least} are needed"
        )
    parts = (order[:sixth], order[sixth : 2 * sixth], order[2 * sixth :])
    quantizer, scaling, scores = (select(samples, part) for part in parts)
    return Slices(quantizer, scaling, scores)


def _check_described(
    traced: Traced, image: ImageSpec | None, classes: tuple[str, ...] | None
) -> None:
    """Whether what the user says of inputs and outputs fits the model."""
    graph = traced.model.graph
    into, out = (
        [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (graph.input[0], graph.output[0])
    )
    if classes is not None and len(classes) != out[-1]:
        raise SpecError(f"{len(classes)} classes for an output of shape {tuple(out[1:])}")
    if image is not None and into[1:] != [len(image.mean), image.height, image.width]:
        raise SpecError(
            f"pictures of {len(image.mean)}x{image.height}x{image.width} for an input of shape "
            f"{tuple(into[1:])}"
        )
