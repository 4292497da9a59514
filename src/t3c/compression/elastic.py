"""Make a model elastic with the factorization that measures best, and keep it in a file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from t3c.compression.choice import Choice
from t3c.convert import ElasticConfig, Report, elasticize_, smooth_
from t3c.device.execution import example_inputs
from t3c.device.machine import describe
from t3c.device.measured import time_sessions
from t3c.engines import Engine
from t3c.errors import ConvertError, DataError
from t3c.exporter import content
from t3c.exporter.allocate import Allocated
from t3c.exporter.described import Described
from t3c.graph.assemble import assemble
from t3c.nn.inputs import Inputs, select, tensors
from t3c.spec import Factorization, Form, ProfileChain
from t3c.train.targets import find_path

STATISTICS = 256  # samples that factors are fitted to
PROBED = 32  # samples that two factorizations are compared on
ALIKE = 0.1  # first-order drift at which they are compared
ROUNDS = 40
KERNELS = (nn.Conv1d, nn.Conv2d)
# Ranks at multiples of a sixteenth: where a layer starts to pay differs by geometry, and the
# device's table says where. Bits down to 4, since second-order rounding keeps 4 useful.
RANKS = tuple(share / 16 for share in (2, 3, 4, 5, 6, 7, 8, 9, 10))
BITS = (4, 5, 6, 7, 8)
STORED = 0.8  # of the dense weights, what factors of a layer may take

Watch = Callable[[str, int, int], object]


def kernels_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of convolutions wider than a point, not in groups."""
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, KERNELS) and max(module.kernel_size) > 1 and module.groups == 1
    )


def config_for(convolution: Factorization, **changes: Any) -> ElasticConfig:
    """Return how the door makes a model elastic, with one factorization of kernels."""
    settings: dict[str, Any] = {
        "convolution": convolution, "rank_fractions": RANKS, "bits": BITS, "store_ratio": STORED,
    }  # fmt: skip
    return ElasticConfig(**(settings | changes))


def choose_factorization(
    model: nn.Module, example: Inputs, batches: Sequence[Inputs], engine: Engine
) -> tuple[Factorization, Choice | None]:
    """Return how kernels are factored: in the whole network, whichever is faster at equal drift.

    Both are made of all kernels at once, their ranks allocated to one first-order drift, and timed
    in turns with each other on the engine.
    """
    names = kernels_of(model)
    if not names:
        return Factorization.TUCKER1, None
    sessions, few = {}, batches[: max(1, PROBED // len(tensors(batches[0])[0]))]
    for way in (Factorization.TUCKER1, Factorization.TUCKER2):
        trial = copy.deepcopy(model)
        config = config_for(way, include=names, bits=(8,), metric="inputs")
        try:
            elasticize_(trial, example, config, calibration=few)
        except ConvertError:
            return Factorization.TUCKER1, None  # no kernel is worth a rank
        profile = _at_drift(trial, few[0], ALIKE)
        traced = content.topology(trial)
        packed = content.pack(Described(trial, traced, "trial"), Allocated.of(profile))
        draft = content.ranged(packed, select(few[0], slice(0, 8)))
        top = draft.manifest.chain.top
        forms = {
            name: Form.FACTORED if Form.FACTORED in spec.forms(top.points[name]) else Form.DENSE
            for name, spec in draft.manifest.specs.items()
        }
        bits = describe(engine).weight_bits
        graph = assemble(draft, top, forms, draft.ranges(top.name), bits)
        sessions[str(way)] = engine.compile(graph)
        inputs = example_inputs(draft)
    times = time_sessions(sessions, inputs, ROUNDS)
    tried = {name: latency.p50 for name, latency in times.items()}
    taken = min(tried, key=tried.__getitem__)
    found = Choice(
        what="kernels are factored by", tried=tried, unit="ms", taken=taken,
        why=f"all kernels at a first-order drift of {ALIKE:g}",
    )  # fmt: skip
    return Factorization(taken), found


def _at_drift(model: nn.Module, samples: Inputs, drift: float) -> ProfileChain:
    """Return the cheapest profile by counted work that drifts at most so much."""
    path = find_path(model, samples, 0.0)
    return ProfileChain((path.profile(path.within(drift), "trial"),))


def make_elastic(
    model: nn.Module,
    example: Inputs,
    batches: Sequence[Inputs],
    convolution: Factorization,
    *,
    smooth: bool,
    watch: Watch = lambda what, done, total: None,
) -> Report:
    """Make the model elastic in place, with factors fitted to the batches.

    With `smooth`, what linear layers read is smoothed first where that lessens the error of 8 bits.
    """
    if smooth:
        smooth_(model, batches)
    return elasticize_(
        model, example, config_for(convolution), calibration=batches,
        on_layer=lambda done, total, name: watch(f"converting {name}", done, total),
    )  # fmt: skip


def keep_elastic(model: nn.Module, path: Path) -> None:
    """Write all parameters and buffers of an elastic model, factors included."""
    values = {name: value.detach().cpu().contiguous() for name, value in _named(model).items()}
    save_file(values, path)


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
