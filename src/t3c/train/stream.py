"""The batches of a run, gone through again as often as needed, from any step on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from t3c.errors import DataError
from t3c.nn.inputs import Inputs, split_batch

Sample = tuple[Inputs, Tensor]


def forever(batches: Iterable[Any], steps: int) -> Iterator[Sample]:
    """`steps` pairs (inputs, target). A loader with `set_epoch` is told which time it is."""
    done = epoch = 0
    while done < steps:
        before = done
        set_epoch = getattr(batches, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        for batch in batches:
            inputs, target = split_batch(batch)
            if target is None:
                raise DataError("training needs batches of (inputs, target)")
            done += 1
            yield inputs, target
            if done == steps:
                return
        if done == before:
            ended = f"ended after {done} of {steps} batches: give what can be gone through again"
            raise DataError(f"the training data {ended if done else 'is empty'}")
        epoch += 1
