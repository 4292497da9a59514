"""The batches of a run, gone through again as often as needed, from any step on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from t3c.errors import DataError
from t3c.nn.inputs import Inputs, split_batch, tensors

Sample = tuple[Inputs, Tensor | None]


def forever(batches: Iterable[Any], steps: int, *, labelled: bool = False) -> Iterator[Sample]:
    """Yield `steps` pairs (inputs, target), the target None where there is none.

    Where they have to be `labelled`, batches without are refused. A loader with `set_epoch` is
    told which time it is.
    """
    done = epoch = 0
    while done < steps:
        before = done
        set_epoch = getattr(batches, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        for batch in batches:
            inputs, target = split_batch(batch)
            _check_target(target, len(tensors(inputs)[0]), labelled)
            done += 1
            yield inputs, target
            if done == steps:
                return
        if done == before:
            ended = f"ended after {done} of {steps} batches: give what can be gone through again"
            raise DataError(f"the training data {ended if done else 'is empty'}")
        epoch += 1


def _check_target(target: Any, samples: int, labelled: bool) -> None:
    """Refuse labels that are missing where they are needed, or that are not of these samples."""
    if target is None and labelled:
        raise DataError(
            "training needs labels: give batches of (inputs, target) or mappings with `labels`, or "
            'leave out what reads them: Objective(task=0), teacher="original"'
        )
    if target is None:
        return
    if not isinstance(target, Tensor):
        raise DataError(f"labels are a tensor, got {type(target).__name__}")
    if target.shape[:1] != (samples,):
        raise DataError(f"a batch of {samples} samples has labels of shape {tuple(target.shape)}")
