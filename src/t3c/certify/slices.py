"""Slices of samples: how each group of them fares, and that no two parts share any."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from t3c.certify.drift import Array
from t3c.certify.risk import share_interval
from t3c.errors import DataError, SpecError

MOST_SLICES = 1000
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SliceRow:
    """One slice at one profile: how far it drifts and how much of it is within the bound.

    `interval` is the 95% Clopper-Pearson interval of `within`: wide where samples are few. Bounds
    promise their coverage over all samples, not over each slice.
    """

    label: Hashable
    profile: str
    samples: int
    mean: float
    p95: float
    within: float
    interval: tuple[float, float]
    flip_rate: float | None


def slice_table(
    labels: npt.NDArray[Any],
    drifts: Array,
    flips: Array | None,
    bounds: Array,
    names: Sequence[str],
) -> list[SliceRow]:
    """Rows by slice, then by profile, of labels (n,), drifts and flips (n, profiles)."""
    _check_table(labels, drifts, flips, bounds, names)
    return [
        _row(label, where, drifts[:, at], None if flips is None else flips[:, at], bounds[at], name)
        for label, where in _groups(labels).items()
        for at, name in enumerate(names)
    ]


def _row(
    label: Hashable, where: Indices, drifts: Array, flips: Array | None, bound: float, name: str
) -> SliceRow:
    mine = drifts[where]
    inside = int(np.count_nonzero(mine <= bound))
    return SliceRow(
        label=label,
        profile=name,
        samples=len(mine),
        mean=float(mine.mean()),
        p95=float(np.quantile(mine, 0.95)),
        within=inside / len(mine),
        interval=share_interval(inside, len(mine)),
        flip_rate=None if flips is None else float(flips[where].mean()),
    )


def _groups(labels: npt.NDArray[Any]) -> dict[Hashable, Indices]:
    """The indices of each label, labels in their own order, or in that of their text."""
    groups: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels.tolist()):
        if not isinstance(label, Hashable) or label != label:
            raise DataError(f"label {label!r} of sample {index} cannot name a slice")
        groups.setdefault(label, []).append(index)
        if len(groups) > MOST_SLICES:
            raise DataError(
                f"more than {MOST_SLICES} slices in {len(labels)} samples: is this a label?"
            )
    try:
        ordered = sorted(groups)  # type: ignore[type-var]
    except TypeError:
        ordered = sorted(groups, key=str)
    return {label: np.array(groups[label], dtype=np.int64) for label in ordered}


def _check_table(
    labels: npt.NDArray[Any],
    drifts: Array,
    flips: Array | None,
    bounds: Array,
    names: Sequence[str],
) -> None:
    wanted = (len(labels), len(names))
    if labels.ndim != 1 or not drifts.size or drifts.shape != wanted:
        raise DataError(
            f"drifts of shape {drifts.shape} do not match labels of shape {labels.shape} "
            f"and {len(names)} profiles"
        )
    if flips is not None and flips.shape != wanted:
        raise DataError(f"flips of shape {flips.shape} do not match drifts of {wanted}")
    if bounds.shape != (len(names),):
        raise DataError(f"bounds of shape {bounds.shape} do not match {len(names)} profiles")
    for name, values in (("drifts", drifts), ("flips", flips), ("bounds", bounds)):
        if values is not None and np.isnan(values).any():
            raise DataError(f"{name} must not be NaN")


def digest(keys: Sequence[str]) -> str:
    """Return a hash of samples in their order, by their keys."""
    return sha256("".join(keys).encode()).hexdigest()


def sample_keys(arrays: Sequence[npt.NDArray[Any]]) -> list[str]:
    """A key of 16 hex digits for each sample, from its part of all arrays (n, ...).

    Equal keys are equal samples: same values, types and shapes.
    """
    if not arrays or any(not a.ndim or len(a) != len(arrays[0]) for a in arrays):
        raise DataError(f"inputs of shapes {[a.shape for a in arrays]} are not of the same samples")
    if any(a.dtype.hasobject for a in arrays):
        raise DataError("inputs that are Python objects cannot be told apart by their bytes")
    heads = [f"{a.dtype.str}{a.shape[1:]}".encode() for a in arrays]
    keys = []
    for index in range(len(arrays[0])):
        key = blake2b(digest_size=8)
        for head, array in zip(heads, arrays, strict=True):
            key.update(head)
            key.update(array[index].tobytes())
        keys.append(key.hexdigest())
    return keys


def refuse_overlap(parts: Mapping[str, Sequence[str]]) -> None:
    """Raise if two parts, by name the keys of their samples, have a sample in common."""
    for (first, some), (second, others) in combinations(parts.items(), 2):
        shared = len(set(some) & set(others))
        if shared:
            raise DataError(
                f"the {first} and the {second} slices share {shared} sample{'s' * (shared > 1)}: "
                "keep each in one of the two, a certificate needs data that set nothing else"
            )


def split_unique(keys: Sequence[str], shares: Sequence[float], seed: int) -> list[Indices]:
    """Split samples at random by shares, all copies of a sample in the same part: their indices.

    Which part a sample is in depends on the seed and the other samples, not on their order. No part
    is empty; sizes are as close to the shares as copies let them be.
    """
    if not shares or min(shares) <= 0 or not math.isclose(sum(shares), 1.0):
        raise SpecError(f"shares must be positive and sum to 1, got {list(shares)}")
    distinct, owner, copies = np.unique(
        np.asarray(keys, dtype=np.str_), return_inverse=True, return_counts=True
    )
    if len(distinct) < len(shares):
        raise DataError(f"{len(distinct)} distinct samples cannot fill {len(shares)} parts")
    mixed = np.random.default_rng(seed).permutation(len(distinct))
    middles = np.cumsum(copies[mixed]) - copies[mixed] / 2
    cuts = np.searchsorted(middles, np.cumsum(shares)[:-1] * len(keys)).tolist()
    edges = [0]
    for part, cut in enumerate(cuts, start=1):
        edges.append(min(max(cut, edges[-1] + 1), len(distinct) - len(shares) + part))
    place = np.empty(len(distinct), dtype=np.int64)
    place[mixed] = np.arange(len(distinct))
    order = np.argsort(place[owner], kind="stable").astype(np.int64)
    ends = np.searchsorted(place[owner][order], edges[1:])
    return np.split(order, ends)
