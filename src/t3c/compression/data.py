"""Samples of a model's inputs with their labels, and how they are split by content."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from t3c.certify.slices import sample_keys
from t3c.errors import DataError
from t3c.nn.inputs import (
    LABELS,
    Inputs,
    check_finite,
    check_like,
    join,
    moved,
    select,
    split_batch,
    tensors,
)
from t3c.train.lengths import lengths_of, like_lengths, trimmed

MOST_BYTES = 6 << 30  # of samples held in memory at once
MOST_ROWS = 100_000  # of a data set


@dataclass(frozen=True)
class Data:
    """Samples (n, ...) of every input, and labels (n, ...) where they are known."""

    inputs: Inputs
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        counts = {len(value) for value in tensors(self.inputs)}
        if self.labels is not None:
            counts.add(len(self.labels))
        if len(counts) != 1 or not max(counts):
            raise DataError(f"the data has no samples, or parts of different length: {counts}")
        check_finite(self.inputs, "the data")

    def __len__(self) -> int:
        return len(tensors(self.inputs)[0])

    @property
    def bytes(self) -> int:
        return sum(value.numel() * value.element_size() for value in tensors(self.inputs))

    def at(self, index: Tensor | slice) -> Data:
        """Return the samples at some places."""
        labels = None if self.labels is None else self.labels[index]
        return Data(select(self.inputs, index), labels)

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return the inputs as a runtime takes them."""
        return [value.detach().cpu().contiguous().numpy() for value in tensors(self.inputs)]

    def keys(self) -> list[str]:
        """Return a hash of each sample's inputs: equal keys are equal samples."""
        return sample_keys(self.arrays())

    def statistics(self, samples: int, positions: int, size: int) -> list[Inputs]:
        """Return inputs that layers are observed on, in batches: the first `samples`, or as many
        more texts as have so many tokens, each with others of like length."""
        lengths = lengths_of(self.inputs)
        if lengths is None:
            first = self.at(slice(0, samples))
            return [select(first.inputs, slice(i, i + size)) for i in range(0, len(first), size)]
        enough = int(np.searchsorted(lengths.cumsum(), positions)) + 1
        lengths = lengths[: max(samples, enough)]
        parts = like_lengths(lengths, min(size, len(lengths)), 0, 0)
        rest = np.setdiff1d(np.arange(len(lengths)), np.concatenate(parts))
        parts += [rest] if len(rest) else []
        return [trimmed(select(self.inputs, torch.from_numpy(part))) for part in parts]

    def batches(self, size: int) -> list[tuple[Inputs, Tensor] | Inputs]:
        """Return the samples in order, in batches of at most `size`, with labels if there are."""
        found: list[tuple[Inputs, Tensor] | Inputs] = []
        for start in range(0, len(self), size):
            part = self.at(slice(start, start + size))
            found.append(part.inputs if part.labels is None else (part.inputs, part.labels))
        return found


def joined(parts: Sequence[Data]) -> Data:
    """Return several parts as one; labels are kept where every part has them."""
    labels = [part.labels for part in parts if part.labels is not None]
    whole = torch.cat(labels) if len(labels) == len(parts) else None
    return Data(join([part.inputs for part in parts]), whole)


Rows = list[Mapping[str, Any]]  # of a data set: texts or pictures, each beside its label


def gathered(batches: Any) -> Data | Rows:
    """Read Python data into memory: a Data, a batch, or an iterable of batches, samples or rows.

    A batch is inputs, (inputs, labels), or a mapping with `labels` in it, a sample the same
    without the axis of samples, a row a mapping with texts or pictures in it. Whatever yields
    more than fits into 6 GiB is refused.
    """
    if isinstance(batches, Data):
        return batches
    if isinstance(batches, Tensor | np.ndarray | Mapping):
        return _batch(batches)
    if not hasattr(batches, "__iter__"):
        raise DataError(
            f"data is a folder, a file, or batches of inputs, got {type(batches).__name__}"
        )
    iterator = iter(batches)
    first = list(itertools.islice(iterator, 1))
    if first and _is_row(first[0]):
        rows = [*first, *itertools.islice(iterator, MOST_ROWS)]
        if len(rows) > MOST_ROWS:
            raise DataError(
                f"the data has more than {MOST_ROWS:,} rows: give some, such as "
                f"dataset.shuffle(seed=0).select(range({MOST_ROWS}))"
            )
        return rows
    return _joined_batches(itertools.chain(first, iterator))


def _is_row(value: Any) -> bool:
    """Return whether a value is a row of a data set as it was written: nothing is encoded yet."""
    held = value.values() if isinstance(value, Mapping) else ()
    return any(isinstance(one, str | Image.Image) for one in held)


def _joined_batches(batches: Iterable[Any]) -> Data:
    parts: list[Data] = []
    held = 0
    for batch in batches:
        parts.append(_batch(batch))
        check_like(parts[-1].inputs, parts[0].inputs, "a batch of the data")
        held += parts[-1].bytes
        if held > MOST_BYTES:
            raise DataError(
                f"the data takes more than {MOST_BYTES >> 30} GiB: give fewer samples, "
                "such as itertools.islice(loader, 100)"
            )
    if not parts:
        raise DataError("the data is empty: an iterator that was read before has nothing left")
    return joined(parts)


def _batch(batch: Any) -> Data:
    """Read one batch, or one sample of a data set that yields a mapping of lists."""
    if isinstance(batch, Mapping):
        batch = {name: _tensor(name, value) for name, value in batch.items()}
        label = next((batch[name] for name in LABELS if name in batch), None)
        if label is not None and label.dim() == 0:  # one sample
            batch = {name: value[None] for name, value in batch.items()}
    elif isinstance(batch, np.ndarray):
        batch = torch.from_numpy(batch)
    inputs, labels = split_batch(batch)
    cpu = torch.device("cpu")
    return Data(moved(inputs, cpu), None if labels is None else labels.to(cpu))


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:  # lists of different lengths, objects
        raise DataError(f"the data: {name!r} is no array: {error}") from error


# The parts a data set is split into, in order, with the share of samples each gets. `test` is
# first in line: what was never used is what a reader asks for. Training has all that is left.
SHARES = {"test": 0.2, "certificate": 0.125, "placement": 0.2, "ranges": 0.06}
MOST = {"test": 2000, "certificate": 1000, "placement": 1000, "ranges": 128}
LEAST = {"test": 30, "certificate": 40, "placement": 30, "ranges": 8}
TRAIN = "train"


@dataclass(frozen=True)
class Parts:
    """Disjoint parts of a data set: no two share a sample, copies of one stay together."""

    train: Data
    ranges: Data
    placement: Data
    certificate: Data
    test: Data

    def sizes(self) -> dict[str, int]:
        """Return how many samples each part has."""
        return {name: len(getattr(self, name)) for name in (TRAIN, *SHARES)}


def split(data: Data, test: Data | None = None) -> Parts:
    """Split by content hash: a sample is in the same part whatever the order of the files.

    With a `test` set of its own nothing is held out of the data for it, and samples of it that
    are in the data too are left out of all other parts.
    """
    keys = data.keys()
    places: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    if test is not None:
        for known in set(test.keys()) & set(places):
            del places[known]
    order = sorted(places, key=lambda key: hashlib.sha256(key.encode()).digest())
    shares = {name: share for name, share in SHARES.items() if test is None or name != "test"}
    needed = sum(LEAST[name] for name in shares) + LEAST["ranges"]
    if len(order) < needed:
        raise DataError(
            f"{len(order)} different samples are too few to train, place, certify and test on: "
            f"at least {needed} are needed"
        )
    found: dict[str, Data] = {} if test is None else {"test": test}
    start = 0
    for name, share in shares.items():
        count = min(MOST[name], max(LEAST[name], round(share * len(order))))
        found[name] = _taken(data, places, order[start : start + count])
        start += count
    found[TRAIN] = _taken(data, places, order[start:])
    return Parts(**found)


def _taken(data: Data, places: Mapping[str, Sequence[int]], keys: Sequence[str]) -> Data:
    return data.at(torch.tensor([place for key in keys for place in places[key]]))
