"""How good a model is at a few of its profiles, on data that nothing is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.random import fork_rng

from t3c.certify.drift import relative_drift
from t3c.convert import state_of
from t3c.errors import DataError
from t3c.nn.inputs import call, device_of, split_batch, tensors
from t3c.nn.view import at
from t3c.spec import Profile, ProfileChain
from t3c.train.losses import Loss

SHOWN = ("tiny", "med", "max")


def shown(chain: ProfileChain) -> list[Profile]:
    """Tiny, med and max, or the ends and the middle of a chain that names none of them."""
    named = [profile for profile in chain if profile.name in SHOWN]
    if len(named) == len(SHOWN):
        return named
    profiles = list(chain)
    picked = dict.fromkeys((0, len(profiles) // 2, len(profiles) - 1))
    return [profiles[index] for index in picked]


def check_validation(batches: Iterable[Any]) -> None:
    """Refuse data that cannot be validated on, by its first batch."""
    with fork_rng(devices=[]):
        begun = iter(batches)
        if begun is batches:
            raise DataError("validation goes through its data again: give a list or a loader")
        first = next(begun, None)
    if first is None:
        raise DataError("the validation data is empty")
    if split_batch(first)[1] is None:
        raise DataError("validation needs batches of (inputs, target)")


@fork_rng(devices=[])  # a loader may draw: what a run does next is not to depend on it
@torch.no_grad()
def validate(
    model: nn.Module,
    profiles: Sequence[Profile],
    batches: Iterable[Any],
    loss: Loss,
    *,
    classes: bool = True,
) -> dict[str, float]:
    """The loss, the relative drift and, of classes, the accuracy at each profile and in full.

    Keys are `full/loss`, `med/accuracy`, `tiny/drift`; means over samples.
    """
    views: list[Profile | None] = [None, *profiles]
    sums: dict[str, float] = {}
    count = 0
    for batch in batches:
        inputs, target = split_batch(batch)
        if target is None:
            raise DataError("validation needs batches of (inputs, target)")
        target = target.to(device_of(model))
        rows = len(tensors(inputs)[0])
        count += rows
        original = call(state_of(model).original, inputs).cpu()
        for profile in views:
            with at(model, profile):
                output = call(model, inputs)
            found = {
                "loss": float(loss(output, target)),
                "drift": float(relative_drift(output.cpu(), original).mean()),
            }
            if classes and target.dim() == 1 and output.dim() == 2:
                found["accuracy"] = float((output.argmax(-1) == target).float().mean())
            name = "full" if profile is None else profile.name
            for key, value in found.items():
                sums[f"{name}/{key}"] = sums.get(f"{name}/{key}", 0.0) + rows * value
    if not count:
        raise DataError("the validation data is empty")
    return {key: value / count for key, value in sums.items()}
