"""ImageNet from a folder: pictures found with their classes, read a batch at a time."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from t3c.errors import DataError, SpecError
from t3c.spec import ImageSpec
from t3c.zoo.local import first

CLASSES = 1000
SIDE, SHORTER = 224, 256
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PICTURES = {".jpeg", ".jpg", ".png"}
LABELS = ("val.txt", "LOC_val_solution.csv")

_ID = re.compile(r"n\d{8}")
_NAMED = re.compile(r"(n\d{8})(_.*)?")  # n01440764, n01440764_tench
_NUMBERED = "ILSVRC2012_"


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes an input (3, h, w): resized, cropped, (value * rescale - mean) / std.

    `resize` is the length of the shorter side, or a height and a width that the picture is squeezed
    to; `crop` is the height and width that are cut from the centre. None leaves it as it is.
    """

    resize: int | tuple[int, int] | None = SHORTER
    crop: tuple[int, int] | None = (SIDE, SIDE)
    mean: tuple[float, float, float] = MEAN
    std: tuple[float, float, float] = STD
    rescale: float = 1 / 255
    resample: Image.Resampling = Image.Resampling.BILINEAR

    def __post_init__(self) -> None:
        lengths = (self.resize,) if isinstance(self.resize, int) else self.resize or ()
        if not all(0 < length <= 8192 for length in (*lengths, *(self.crop or ()))):
            raise SpecError(
                f"an image has sides of 1 to 8192, got resize {self.resize} and crop {self.crop}"
            )
        if self.crop is None and not isinstance(self.resize, tuple):
            raise SpecError("images would differ in size: give crop, or both sides as resize")
        if not len(self.mean) == len(self.std) == 3 or not all(map(math.isfinite, self.mean)):
            raise SpecError(f"three colours have a mean and a std, got {self.mean} and {self.std}")
        if not all(0 < value < math.inf for value in (*self.std, self.rescale)):
            raise SpecError(f"std and rescale are positive, got {self.std} and {self.rescale:g}")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an input."""
        size = self.crop or self.resize
        assert isinstance(size, tuple)
        return size

    @property
    def image(self) -> ImageSpec:
        """Size, mean and std of an input whose pixels were scaled to 0..1."""
        unit = 255 * self.rescale
        mean, std = (tuple(v / unit for v in values) for values in (self.mean, self.std))
        return ImageSpec(*self.size, mean, std)


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
    preprocessing: Preprocessing = Preprocessing()
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
    entries = _listed(place)
    ids = [p.name for p in entries if _ID.fullmatch(p.name) and p.is_dir()]
    if ids:
        order = _order(place, ids, classes)
        found = [(p, order[name]) for name in ids for p in _pictures(_listed(place / name))]
    elif named := [(p, m[1]) for p in _pictures(entries) if (m := _NAMED.fullmatch(p.stem))]:
        order = _order(place, sorted({name for _, name in named}), classes)
        found = [(p, order[name]) for p, name in named]
    else:
        numbered = [p for p in _pictures(entries) if p.name.startswith(_NUMBERED)]
        found = _labelled(place, numbered, classes, labels) if numbered else []
    if not found:
        raise DataError(
            f"{place} holds no ImageNet: neither folders nor pictures named by WordNet id such as "
            f"n01440764, nor pictures {_NUMBERED}*"
        )
    return Samples(tuple(path for path, _ in found), tuple(label for _, label in found))


def read_image(path: Path, how: Preprocessing) -> Tensor:
    """Return an input (3, h, w) of a picture's red, green and blue."""
    try:
        with Image.open(path) as file:
            picture = file.convert("RGB")
    # Pillow says SyntaxError of a broken chunk.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if how.resize is not None:
        height, width = _resized(picture, how.resize)
        picture = picture.resize((width, height), how.resample)
    if how.crop is not None:
        height, width = how.crop
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        if min(left, top) < 0:
            raise DataError(
                f"{path} has {picture.width}x{picture.height} pixels, fewer than {width}x{height}"
            )
        picture = picture.crop((left, top, left + width, top + height))
    image = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().contiguous()
    mean, std = (torch.tensor(values)[:, None, None] for values in (how.mean, how.std))
    return image.mul_(how.rescale).sub_(mean).div_(std)


def _resized(picture: Image.Image, to: int | tuple[int, int]) -> tuple[int, int]:
    """Return height and width of a picture once it is resized."""
    if not isinstance(to, int):
        return to
    shorter = min(picture.size)
    return to * picture.height // shorter, to * picture.width // shorter


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


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from error


def _pictures(paths: Sequence[Path]) -> list[Path]:
    """Return those that are pictures by name; what begins with a dot is some system's own."""
    return [p for p in paths if p.suffix.lower() in PICTURES and not p.name.startswith(".")]
