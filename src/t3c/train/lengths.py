"""Batches of texts of like length, so that little of them is padding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from t3c.nn.inputs import Inputs
from t3c.train.schedules import draws

SORTED = 50  # batches whose samples are sorted by length together
MASK = "attention_mask"  # what Hugging Face calls it: 1 where a text has a token


def like_lengths(
    lengths: npt.NDArray[np.int64], batch: int, seed: int, epoch: int
) -> list[npt.NDArray[np.int64]]:
    """Return batches of samples of like length, in chance order; each once, less a last few.

    `lengths` (n,); where all are alike, batches are drawn at random.
    """
    rng = draws(seed, epoch, "order")
    order = rng.permutation(len(lengths))
    order = order[: len(order) // batch * batch]
    batches: list[npt.NDArray[np.int64]] = []
    for start in range(0, len(order), batch * SORTED):
        near = order[start : start + batch * SORTED]
        near = near[np.argsort(lengths[near], kind="stable")]
        batches += np.split(near, len(near) // batch)
    return [batches[i] for i in rng.permutation(len(batches))]


def lengths_of(inputs: Inputs) -> npt.NDArray[np.int64] | None:
    """Return how long each text (n,) is by its mask; None of inputs without a mask."""
    mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None
    if mask is None or mask.dim() != 2:
        return None
    places = np.arange(1, mask.shape[1] + 1)
    used: npt.NDArray[np.int64] = ((mask.cpu().numpy() != 0) * places).max(axis=1)
    return used


def trimmed(inputs: Inputs) -> Inputs:
    """Return texts (n, t) without the columns at their end that are nothing but padding."""
    lengths = lengths_of(inputs)
    if lengths is None:
        return inputs
    assert isinstance(inputs, Mapping)
    whole, used = inputs[MASK].shape, max(1, int(lengths.max()))

    def cut(value: Tensor) -> Tensor:
        return value[:, :used] if value.shape == whole else value

    return {name: cut(value) for name, value in inputs.items()}
