"""ImageNet from a folder: pictures found with their classes, read a batch at a time."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from t3c.compression.pictures import Preprocessing, listed, pictures_of, read_image
from t3c.errors import DataError, SpecError
from t3c.zoo.local import first

CLASSES = 1000
SIDE, SHORTER = 224, 256
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LABELS = ("val.txt", "LOC_val_solution.csv")

_ID = re.compile(r"n\d{8}")
_NAMED = re.compile(r"(n\d{8})(_.*)?")  # n01440764, n01440764_tench
_NUMBERED = "ILSVRC2012_"


@dataclass(frozen=True)
class Samples:
    """Pictures and the class of each."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def first(self, count: int | None) -> Samples:
        """Return the first `count`, all of them for None, never fewer than asked for."""
        return self._at(first(range(len(self)), count, "pictures"))

    def split(self, tune: int | None = None, seed: int = 0) -> tuple[Samples, Samples]:
        """Return two shuffled parts: `tune` pictures to tune on, or half, and the rest to test."""
        held = len(self) // 2 if tune is None else tune
        if not 0 < held < len(self):
            raise DataError(f"{held} of {len(self)} pictures to tune on leave nothing for one part")
        order = np.random.default_rng(seed).permutation(len(self)).tolist()
        return self._at(order[:held]), self._at(order[held:])

    def _at(self, places: Sequence[int]) -> Samples:
        return Samples(
            tuple(self.paths[i] for i in places), tuple(self.labels[i] for i in places)
        )  # fmt: skip


@dataclass(frozen=True)
class Batches:
    """Images (n, 3, h, w) and labels (n,), `size` at a time, read when they are asked for."""

    samples: Samples
    preprocessing: Preprocessing = Preprocessing()  # noqa: RUF009  (frozen)
    size: int = 64

    def __post_init__(self) -> None:
        if self.size < 1:
            raise SpecError(f"a batch has at least one picture, got {self.size}")

    def __len__(self) -> int:
        return -(-len(self.samples) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.samples), self.size):
            part = slice(start, start + self.size)
            images = [read_image(path, self.preprocessing) for path in self.samples.paths[part]]
            yield torch.stack(images), torch.tensor(self.samples.labels[part])


def imagenet_folder() -> Path:
    """Return where ImageNet's pictures to validate on are: in T3C_DATA or in T3C_IMAGENET."""
    root, named = os.environ.get("T3C_DATA"), os.environ.get("T3C_IMAGENET")
    if root and (Path(root) / "imagenet").is_dir():
        return Path(root) / "imagenet"
    if not named or not Path(named).is_dir():
        told = f"T3C_IMAGENET names {named}, which is no folder" if named else "nor T3C_IMAGENET"
        raise DataError(f"T3C_DATA holds no folder imagenet, {told}: it is not to be fetched")
    return Path(named)


def find_samples(
    folder: Path, classes: Sequence[str] | None = None, labels: Path | None = None
) -> Samples:
    """Return the pictures of a folder, or of its `val`, in any of the forms that ImageNet comes in.

    Folders named by WordNet id, pictures named by it, or numbered pictures beside a file of
    `labels`; in the order of their paths. A class is the place of its id in `classes`, or in sorted
    order if all 1,000 are there; a number in a file of labels is the class itself.
    """
    place = folder / "val" if (folder / "val").is_dir() else folder
    entries = listed(place)
    ids = [p.name for p in entries if _ID.fullmatch(p.name) and p.is_dir()]
    if ids:
        order = _order(place, ids, classes)
        found = [(p, order[name]) for name in ids for p in pictures_of(listed(place / name))]
    elif named := [(p, m[1]) for p in pictures_of(entries) if (m := _NAMED.fullmatch(p.stem))]:
        order = _order(place, sorted({name for _, name in named}), classes)
        found = [(p, order[name]) for p, name in named]
    else:
        numbered = [p for p in pictures_of(entries) if p.name.startswith(_NUMBERED)]
        found = _labelled(place, numbered, classes, labels) if numbered else []
    if not found:
        raise DataError(
            f"{place} holds no ImageNet: neither folders nor pictures named by WordNet id such as "
            f"n01440764, nor pictures {_NUMBERED}*"
        )
    return Samples(tuple(path for path, _ in found), tuple(label for _, label in found))


def _order(place: Path, ids: Sequence[str], classes: Sequence[str] | None) -> dict[str, int]:
    """Return the class of each id, if it can be known."""
    if classes is None:
        if len(ids) != CLASSES:
            raise DataError(
                f"{place} holds {len(ids)} of the {CLASSES:,} WordNet ids, which does not tell "
                f"their classes: give all ids in order as classes"
            )
        classes = ids
    order = {name: index for index, name in enumerate(classes)}
    if len(order) < len(classes):
        raise DataError(f"{len(classes):,} classes were given, {len(order):,} of them different")
    if unknown := [name for name in ids if name not in order]:
        raise DataError(
            f"{place}: {unknown[0]} is none of the {len(order):,} classes that were given"
        )
    return order


def _labelled(
    place: Path, pictures: Sequence[Path], classes: Sequence[str] | None, labels: Path | None
) -> list[tuple[Path, int]]:
    """Return numbered pictures with the classes that a file tells."""
    beside = [folder / name for folder in (place, place.parent) for name in LABELS]
    file = labels or next((path for path in beside if path.is_file()), None)
    if file is None:
        raise DataError(f"{place} has no {' or '.join(LABELS)} beside its pictures: give labels")
    told = _told(file)
    if lacking := [path.name for path in pictures if path.stem not in told]:
        raise DataError(f"{file} has no label of {lacking[0]}, and {len(lacking) - 1} others")
    ids = sorted({name for name in told.values() if not name.isdecimal()})
    order = _order(file, ids, classes) if ids else {}
    count = CLASSES if classes is None else len(classes)
    order |= {str(index): index for index in range(count)}
    if odd := next((path for path in pictures if told[path.stem] not in order), None):
        raise DataError(f"{file}: {odd.name} is of class {told[odd.stem]}, not 0 to {count - 1}")
    return [(path, order[told[path.stem]]) for path in pictures]


def _told(file: Path) -> dict[str, str]:
    """Return a number or a WordNet id for each picture's name without its ending."""
    text = _text(file)
    if file.suffix == ".csv":
        try:
            rows = [row for row in csv.reader(text.splitlines()) if row][1:]
        except csv.Error as error:
            raise DataError(f"{file} cannot be read: {error}") from error
        pairs = [[row[0], *row[1].split()[:1]] if len(row) > 1 else row for row in rows]
    else:
        pairs = [line.split() for line in text.splitlines() if line.strip()]
    found: dict[str, str] = {}
    for pair in pairs:
        if len(pair) != 2 or not (pair[1].isdecimal() or _ID.fullmatch(pair[1])):
            raise DataError(f"{file}: {' '.join(pair)!r} is no picture's name and its class")
        stem = Path(pair[0]).stem
        if found.setdefault(stem, pair[1]) != pair[1]:
            raise DataError(f"{file}: {stem} is of class {found[stem]} and of {pair[1]}")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {reason}") from error
