"""How a task's quality is judged, and the original and its views as functions of arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from t3c.compression.data import Data
from t3c.compression.source import Source, Task
from t3c.convert import state_of
from t3c.evidence.quality import MAX_DROP, Array, Judge, Metric, Outputs, Run
from t3c.nn.inputs import Inputs, call
from t3c.nn.view import at
from t3c.spec import Profile

BATCH = 32


def judge_of(source: Source, data: Data, max_drop: float | None) -> Judge:
    """Return how quality is judged: by labels, tokens, answers or neighbours."""
    outputs = _output_shape(source)
    labels = None if data.labels is None else data.labels.numpy()
    targets = None
    if source.task is Task.LANGUAGE:
        metric, targets = Metric.PERPLEXITY, data.arrays()[0]
    elif source.task is Task.EMBEDDING or len(outputs) != 1 or outputs[0] < 2:
        metric = Metric.NEIGHBOURS
    elif labels is not None and labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
        metric, targets = Metric.ACCURACY, labels
    else:
        metric = Metric.AGREEMENT
    return Judge(metric, MAX_DROP[metric] if max_drop is None else max_drop, targets)


@torch.no_grad()
def _output_shape(source: Source) -> tuple[int, ...]:
    return tuple(call(source.model, source.example).shape[1:])


def run_original(model: nn.Module, example: Inputs) -> Run:
    """Return the original in torch as a function of arrays."""

    @torch.no_grad()
    def run(arrays: list[Outputs]) -> Outputs:
        values = tuple(torch.from_numpy(value) for value in arrays)
        if isinstance(example, Mapping):
            return call(model, dict(zip(example, values, strict=True))).cpu().numpy()
        return call(model, values[0] if isinstance(example, torch.Tensor) else values).cpu().numpy()

    return run


@torch.no_grad()
def view_losses(model: nn.Module, profile: Profile | None, data: Data, judge: Judge) -> Array:
    """Return the expected loss of each sample (n,) for a profile of an elastic model in torch.

    Samples go in batches, since a profile's weights are put together for each call; `None` is the
    original.
    """
    kept: list[tuple[Outputs, Outputs]] = []
    losses: list[Array] = []
    for start in range(0, len(data), BATCH):
        part = slice(start, start + BATCH)
        inputs = data.at(part).inputs
        wanted = call(state_of(model).original, inputs).cpu().numpy()
        answered = wanted
        if profile is not None:
            with at(model, profile):
                answered = call(model, inputs).cpu().numpy()
        if judge.metric is Metric.PERPLEXITY:  # logits of all texts are too large to hold
            losses.append(judge.at(part).losses(answered, wanted))
        else:
            kept.append((answered, wanted))
    if losses:
        return np.concatenate(losses)
    answers, original = (np.concatenate(column) for column in zip(*kept, strict=True))
    return judge.expected_losses(answers, original)
