"""CIFAR-100 from its binary files: a coarse label, a fine one and the pixels, image by image."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from t3c.errors import DataError
from t3c.spec import ImageSpec
from t3c.zoo.local import first

SIDE = 32
RECORD = 2 + 3 * SIDE * SIDE  # bytes of an image with its labels
IMAGE = ImageSpec(SIDE, SIDE, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))
CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle",
    "bottle", "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar",
    "cattle", "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile",
    "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster",
    "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster",
    "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy",
    "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal",
    "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar",
    "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor",
    "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman",
    "worm",
)  # fmt: skip
COARSE = 20  # groups of classes
FETCHED = Path("out/data/cifar100")
FILES = {"train": "train.bin", "test": "test.bin"}
COUNTS = {"train": 50_000, "test": 10_000}

Part = Literal["train", "test"]


def cifar100(part: Part, count: int | None = None) -> tuple[Tensor, Tensor]:
    """The first `count` images (n, 3, 32, 32), normalised, and fine labels (n,) of a part."""
    if part not in FILES:
        raise DataError(f"the parts of CIFAR-100 are train and test, got {part!r}")
    held = _records(cifar100_folder(), part)
    records = held[: len(first(range(len(held)), count, f"{part} images"))]
    images = torch.from_numpy(records[:, 2:].reshape(-1, 3, SIDE, SIDE)).float()
    mean, std = (torch.tensor(v)[:, None, None] for v in (IMAGE.mean, IMAGE.std))
    return images.div_(255).sub_(mean).div_(std), torch.from_numpy(records[:, 1]).long()


def cifar100_folder() -> Path:
    """Where CIFAR-100 is: in T3C_DATA, in T3C_CIFAR100, or where `t3c data get` puts it."""
    root, named = os.environ.get("T3C_DATA"), os.environ.get("T3C_CIFAR100")
    if root and (Path(root) / "cifar100").is_dir():
        return Path(root) / "cifar100"
    folder = Path(named) if named else FETCHED
    if not folder.is_dir():
        raise DataError(
            f"CIFAR-100 is not in T3C_DATA, and {folder} is no folder: "
            "run `t3c data get cifar100 --from FOLDER`"
        )
    return folder


def check_folder(folder: Path) -> None:
    """Refuse a folder that does not hold every image of both parts."""
    for part in FILES:
        _records(folder, part)


def _records(folder: Path, part: str) -> npt.NDArray[np.uint8]:
    """Bytes (n, 3074): the coarse label, the fine label, then red, green and blue by lines."""
    path = folder / FILES[part]
    try:
        size = path.stat().st_size
        if size != COUNTS[part] * RECORD:
            raise DataError(
                f"{path} has {size:,} bytes, {COUNTS[part]:,} images of {RECORD:,} bytes are "
                f"{COUNTS[part] * RECORD:,}"
            )
        records = np.fromfile(path, np.uint8).reshape(-1, RECORD)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    for place, name, known in ((0, "coarse", COARSE), (1, "fine", len(CLASSES))):
        if (wrong := records[:, place] >= known).any():
            at = int(wrong.argmax())
            raise DataError(
                f"{path}: image {at} has the {name} label {records[at, place]}, "
                f"the last is {known - 1}"
            )
    return records
