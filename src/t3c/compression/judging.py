"""How a task's quality is judged, and what views of the model lose by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from t3c.compression.data import Data
from t3c.compression.source import Source, Task
from t3c.convert import state_of
from t3c.evidence.quality import MAX_DROP, Array, Judge, Outputs
from t3c.nn.inputs import call, evaluating
from t3c.nn.view import at
from t3c.spec import Metric, Profile
from t3c.train.precision import multiplying

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


@torch.no_grad()
def view_losses(
    model: nn.Module, profiles: Sequence[Profile], data: Data, judge: Judge
) -> Iterator[Array]:
    """Yield the expected loss of each sample (n,) for the original, then for each profile in torch.

    Samples go in batches, since a profile's weights are put together for each call.
    """
    parts = [slice(start, start + BATCH) for start in range(0, len(data), BATCH)]
    whole = judge.metric is not Metric.PERPLEXITY  # logits of all texts are too large to hold

    def answered(part: slice) -> Outputs:
        return call(model, data.at(part).inputs).float().numpy()

    def losses(answers: Callable[[slice], Outputs], original: Outputs | None) -> Array:
        if original is None:
            found = [judge.at(part).losses(given := answers(part), given) for part in parts]
            return np.concatenate(found)
        return judge.expected_losses(np.concatenate([answers(part) for part in parts]), original)

    def original(part: slice) -> Outputs:
        return call(state_of(model).original, data.at(part).inputs).numpy()

    reference = np.concatenate([original(part) for part in parts]) if whole else None
    yield (
        losses(original, None) if reference is None else judge.expected_losses(reference, reference)
    )
    for profile in profiles:
        with evaluating(model), at(model, profile), multiplying("auto"):
            yield losses(answered, reference)
