"""Block-wise reconstruction: what a few hundred unlabelled samples are enough for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from t3c.convert import LayerPlan, state_of, units
from t3c.errors import DataError
from t3c.nn.inputs import Inputs, batches_of, evaluating, gather, select, tensors
from t3c.progress import showing
from t3c.spec import LayerPoint, Level, Profile
from t3c.train.calls import UnevenError, runs_of
from t3c.train.find_blocks import find_blocks
from t3c.train.one_block import Block, BlockConfig, BlockRow, weights_of
from t3c.train.sampling import sample_profile

__all__ = ["BlockConfig", "BlockReport", "BlockRow", "find_blocks", "reconstruct"]

HELD_OUT = 0.1  # of the samples


@dataclass(frozen=True)
class BlockReport:
    """What became of every block, in order of execution."""

    rows: tuple[BlockRow, ...]


def reconstruct(
    model: nn.Module,
    batches: Iterable[Any],
    config: BlockConfig | None = None,
    *,
    profiles: Sequence[Profile] = (),
    progress: bool = True,
) -> BlockReport:
    """Train an elastic model in place, block after block, to answer as the original's blocks do.

    `batches` yields inputs or (inputs, target); targets are not used. Each step is at one of
    `profiles`, or at a sampled one. Only factors and gains are trained. Biases, norms, dense
    weights and their 8-bit gains serve the full view too and stay as they are: trained as well,
    with the full view as an anchor in every fourth step, they brought the low profiles of a small
    network (DigitsNet) hardly closer and took its full view 4% away.

    A block that got worse on a held-out tenth of the samples has its weights back; a weight that
    several blocks share stays as it is. How far it is is told on stderr unless `progress` is False.
    """
    config = config or BlockConfig()
    plans = state_of(model).plan.layers
    rng = np.random.default_rng(config.seed)
    training, held = _split(gather(batches), config, rng)

    def draw() -> Profile:
        if not profiles:
            return sample_profile(plans, rng)
        return profiles[int(rng.integers(len(profiles)))]

    judges = list(profiles) or _spread(plans)
    names, runs, rows = find_blocks(model), runs_of(model), []
    trainable = {name: _trainable(model, name, names) for name in names}
    with showing(progress) as show, evaluating(model):
        for index, name in enumerate(names):
            show.watch(f"reconstructing block {name}", index, len(names))
            parameters, reason = trainable[name]
            if name not in runs:
                reason = "it does not run on the example"
            if reason:
                rows.append(BlockRow(name, None, None, False, reason))
                continue
            block = Block(model, name, runs[name], parameters, config)
            try:
                rows.append(block.train(training, block.exams(held, judges), draw, rng))
            except UnevenError as uneven:
                block.restore()
                rows.append(BlockRow(name, None, None, False, str(uneven)))
    return BlockReport(tuple(rows))


def _split(
    samples: Inputs, config: BlockConfig, rng: np.random.Generator
) -> tuple[list[Inputs], list[Inputs]]:
    """Shuffled samples in batches: those to train on, and those held out."""
    count = tensors(samples)[0].shape[0]
    if count < 2:
        raise DataError("reconstruction needs at least 2 samples: one is held out")
    shuffled = select(samples, torch.from_numpy(rng.permutation(count)))
    held = max(1, round(HELD_OUT * count))
    parts = (select(shuffled, slice(held, None)), select(shuffled, slice(held)))
    training, rest = (list(batches_of(part, config.batch)) for part in parts)
    return training, rest


def _spread(plans: Sequence[LayerPlan]) -> list[Profile]:
    """Few profiles that reach every rank and every bits: no view is made worse unnoticed."""
    options = []
    for unit in units(plans):
        points = unit.points()
        options.append((unit, sorted({p.level for p in points}), sorted({p.bits for p in points})))
    profiles = []
    for index in range(max(max(len(levels), len(bits)) for _, levels, bits in options)):
        chosen: dict[str, LayerPoint] = {}
        for unit, levels, bits in options:
            level = Level(levels[index % len(levels)], bits[index % len(bits)])
            chosen |= unit.layer_points(level)
        profiles.append(Profile(f"judge {index}", chosen))
    return profiles


def _trainable(model: nn.Module, name: str, names: Sequence[str]) -> tuple[list[nn.Parameter], str]:
    """The parameters that the block's compressed views alone have; or why there are none."""
    mine = weights_of(model.get_submodule(name))
    shared = {
        id(weight): other
        for other in names
        if other != name
        for weight in weights_of(model.get_submodule(other))
    }
    parameters = [
        parameter
        for weight in mine
        if id(weight) not in shared
        for parameter in weight.parameters()
        if parameter.requires_grad and parameter is not weight.dense
    ]
    if parameters:
        return parameters, ""
    others = sorted({shared[id(weight)] for weight in mine if id(weight) in shared})
    if others:
        return [], f"its weights are also those of {', '.join(others)}"
    return [], "its weights are frozen"
